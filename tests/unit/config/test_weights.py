"""The section `weights`: which way goes with which engines."""

from typing import Any

import pytest

from rlcore.config import RunConfig, build_config, config_digest
from rlcore.errors import ConfigError


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
    }
    return build_config(base | sections)


SGLANG: dict[str, Any] = {"rollout": {"engine": "sglang"}}


def test_each_way_has_its_place() -> None:
    for transport in ("disk", "tensor", "distributed", "delta"):
        assert config(weights={"transport": transport}).weights.transport == transport
    assert config(**SGLANG, weights={"transport": "distributed"})
    assert config(**SGLANG, weights={"transport": "tensor"}, cluster={"colocate": True})


@pytest.mark.parametrize(
    ("transport", "cluster", "said"),
    [
        ("tensor", {}, "needs cluster.colocate = true; use 'distributed'"),
        ("distributed", {"colocate": True}, "two members on one GPU; use 'tensor'"),
        ("distributed", {"device": "cpu"}, "but cluster.device = 'cpu'; use 'disk'"),
    ],
)
def test_ways_that_lead_nowhere(transport: str, cluster: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**SGLANG, weights={"transport": transport}, cluster=cluster)


def test_the_size_of_a_bucket_changes_nothing_that_is_computed() -> None:
    small = config(weights={"update_weight_buffer_size": 1})
    assert config_digest(small) == config_digest(config())
    assert config_digest(small, "weights") == config_digest(config(), "weights")


def test_memory_moves_where_gpus_are_shared() -> None:
    def moves(**settings: Any) -> tuple[bool, bool]:
        found = config(cluster=settings)
        return found.offloads_train, found.offloads_rollout

    assert moves() == moves(offload_train=False) == (False, False)
    assert moves(colocate=True) == (True, True)
    assert moves(colocate=True, offload_train=False) == (False, True)
    assert moves(colocate=True, offload_rollout=False) == (True, False)
    alone = config(run={"mode": "debug-rollout-only"}, cluster={"colocate": True})
    assert not (alone.offloads_train or alone.offloads_rollout)
    with pytest.raises(ConfigError, match=r"offload_rollout = true .* set cluster.colocate = true"):
        moves(offload_rollout=True)
