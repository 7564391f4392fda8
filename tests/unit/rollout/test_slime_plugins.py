"""Unmodified plugins of slime, in the rollout worker: generate, filters, hooks, whole rollouts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan, StageReport
from rlcore.config import build_config
from rlcore.config.tree import FilterConfig
from rlcore.errors import PluginError
from rlcore.plugins import load_function
from rlcore.rollout.filters.rules import make_rule
from rlcore.rollout.hooks import Hooks
from rlcore.sample import Sample, Status
from rlcore.slime.compat import state
from rlcore.slime.compat.attributes import slime_args_of
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects

PLUGINS = Path(__file__).parents[1] / "slime" / "plugins"


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    state.activate(None)


def plan(tmp_path: Path, model: Path, **more: dict[str, Any]) -> RolloutPlan:
    data = tmp_path / "p.jsonl"
    data.write_text("".join(f'{{"prompt": "{d}=", "label": "{d}"}}\n' for d in range(10)))
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": str(data), "label_key": "label"},
        "reward": {
            "custom_rm_path": f"{PLUGINS}/search_agent.py:reward_func",
            "reward_key": "score",
        },
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "max_response_len": 9},
        "train": {"global_batch_size": 8},
        "compat": {"slime": True, "args": {"max_turns": 2, "drop_cut_off": True}},
    }
    for name, section in more.items():
        tree[name] = tree.get(name, {}) | section
    config = build_config(tree)
    return RolloutPlan(
        run_id="r",
        seed=5,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model),
        model=config.model,
        data=config.data,
        rollout=config.rollout,
        reward=config.reward,
        filter=config.filter,
        eval=config.eval,
        slime=slime_args_of(config),
    )


async def made(plan: RolloutPlan, servers: list[Any]) -> tuple[list[Sample], StageReport, Any]:
    actor = RolloutActor(plan)
    await actor.set_engines([s.url for s in servers])
    try:
        report = await actor.rollout(1, 0, "a0", None, 0)
        scored = await actor.reward(1, 0, "a0", report.files)
    finally:
        await actor.close()
    table = read_parts(Objects.open(plan.root, {}), report.files)
    return table_to_samples(table), report, scored


async def test_a_generate_and_a_reward_function_run_as_they_are(
    tmp_path: Path, model_folder: Path, servers: list[Any]
) -> None:
    own = {"custom_generate_function_path": f"{PLUGINS}/search_agent.py:generate"}
    samples, _, scored = await made(plan(tmp_path, model_folder, rollout=own), servers)
    assert len(samples) == 8
    for sample in samples:
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert sample.loss_mask is not None and sample.loss_mask.count(0) == 1
        assert len(sample.loss_mask) == sample.response_length
    assert not [name for name, n in scored.metrics.items() if name.endswith("failed") and n]
    # Engines share the requests, though the plugin knows one address.
    assert all(any(path == "/generate" for path, _ in s.seen) for s in servers)


async def test_filters_and_hooks_run_as_they_are(
    tmp_path: Path, model_folder: Path, servers: list[Any]
) -> None:
    own = {
        "buffer_filter_path": f"{PLUGINS}/filters.py:newest_first",
        "rollout_sample_filter_path": f"{PLUGINS}/filters.py:drop_cut_off",
        "rollout_all_samples_process_path": f"{PLUGINS}/filters.py:look",
        "over_sampling_batch_size": 5,
    }
    samples, _, _ = await made(plan(tmp_path, model_folder, rollout=own), servers)
    assert len(samples) == 8
    assert all(s.remove_sample == (s.status == Status.TRUNCATED) for s in samples)
    look = load_function(f"{PLUGINS}/filters.py:look", "x")
    assert look.__globals__["seen"].pop() == 4
    rule = make_rule(
        FilterConfig(dynamic_sampling_filter_path=f"{PLUGINS}/filters.py:check_spread"), {}
    )
    verdicts = [rule.decide([], [Sample(reward=r) for r in rs]) for rs in ([1.0, 0.0], [1.0, 1.0])]
    assert [(v.keep, v.reason) for v in verdicts] == [(True, None), (False, "zero_std")]


async def test_a_rollout_function_runs_as_it_is(
    tmp_path: Path, model_folder: Path, servers: list[Any]
) -> None:
    own = {"custom_rollout_function_path": f"{PLUGINS}/own_rollout.py:generate_rollout"}
    samples, report, _ = await made(plan(tmp_path, model_folder, rollout=own), servers)
    assert len(samples) == 8 and report.metrics["rollout/mine"] == 1
    assert all(isinstance(s.reward, (dict, float)) for s in samples)


@pytest.mark.parametrize(
    "whole", [{}, {"custom_rollout_function_path": f"{PLUGINS}/own_rollout.py:generate_rollout"}]
)
async def test_several_samples_of_one_execution_are_taken_as_they_are(
    tmp_path: Path, model_folder: Path, servers: list[Any], whole: dict[str, str]
) -> None:
    own = whole | {"custom_generate_function_path": f"{PLUGINS}/sub_agents.py:generate"}
    samples, _, scored = await made(plan(tmp_path, model_folder, rollout=own), servers)
    assert len(samples) == 16 and scored.metrics["reward/unscored"] == 0
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        assert first.rollout_id == second.rollout_id == first.index
        assert (first.group_index, first.seed) == (second.group_index, second.seed)
        assert second.prompt_length == first.prompt_length + 1
        assert first.reward == {"score": 0.25, "turns": 1}


def test_nothing_of_it_is_there_without_the_setting(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "f.py").write_text(
        "from slime.utils.types import Sample\ndef look(args, all_groups, data_source): ...\n"
    )
    own = {"rollout_all_samples_process_path": f"{tmp_path}/f.py:look"}
    off = plan(tmp_path, model_folder, compat={"slime": False, "args": {}}, rollout=own)
    assert off.slime is None
    with pytest.raises(PluginError, match=r"compat\.slime = true"):
        Hooks(off.rollout, None)
