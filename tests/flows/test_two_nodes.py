"""A run over two nodes of Ray, which are two network namespaces of this machine."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Sluice, finish, short, wait_for
from two_nodes import TwoNodes, two_nodes, why_not

ITERATIONS = 8
PATIENCE_S = 600.0
"""Two nodes of Ray and a run are more than two busy cores do in a minute."""
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_nodes_train_what_one_does_and_a_lost_node_loses_nothing(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    path = str(short(tmp_path, ITERATIONS, more="state_interval = 1"))
    ranks = ("--set", "cluster.rollout_num_gpus=2")
    one = Sluice(tmp_path / "root", tmp_path)
    one(
        "train",
        path,
        "--run-id",
        "one",
        *ranks,
        "--set",
        "cluster.actor_num_gpus_per_node=2",
        timeout=PATIENCE_S,
    )

    both = Sluice(tmp_path / "root", tmp_path, env=nodes.env, within=nodes.first.within)
    over = (*ranks, "--set", "cluster.actor_num_nodes=2")
    over += ("--set", f"cluster.ray_address={nodes.ray_address}")
    process = both.start("train", path, "--run-id", "two", *over, "--json")
    wait_for(both.committed("two", 0).exists, PATIENCE_S)
    logs = (tmp_path / "root" / "runs" / "two" / "logs" / "epoch-0001").glob("engine-*.log")
    served = {re.search(r"http://([\d.]+):", log.read_text())[1] for log in logs}  # type: ignore[index]
    assert served == {nodes.first.address, nodes.second.address}

    nodes.second.kill()
    _, err = finish(process, PATIENCE_S)
    assert process.returncode == 1, err
    assert nodes.second.address in err or "died" in err

    nodes.start_second()
    both("resume", "two", "--set", f"cluster.ray_address={nodes.ray_address}", timeout=PATIENCE_S)
    assert one.json("verify", "two")["ok"]
    alone, apart = one.json("show", "one"), one.json("show", "two")
    assert apart["state_sha256"] == alone["state_sha256"]
    assert [m["reward"] for m in apart["metrics"]] == [m["reward"] for m in alone["metrics"]]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_nodes_without_a_common_disk_fetch_the_model_and_get_weights_by_broadcast(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    nodes.start_s3()
    far = Sluice("s3://runs/sluice", tmp_path, env=nodes.env, within=nodes.first.within)
    over = ("--set", "cluster.rollout_num_gpus=2", "--set", "cluster.actor_num_nodes=2")
    over += ("--set", f"cluster.ray_address={nodes.ray_address}")
    path = str(short(tmp_path, 2))
    said = far("train", path, "--run-id", "far", *over, code=1, timeout=PATIENCE_S)
    assert "weights.transport = 'disk', but the run has 2 nodes" in " ".join(said.split())
    over += ("--set", "weights.transport=distributed")
    far("train", path, "--run-id", "sent", *over, timeout=PATIENCE_S)
    assert far.json("verify", "sent")["ok"]
    assert far.json("show", "sent")["committed"] == 2
