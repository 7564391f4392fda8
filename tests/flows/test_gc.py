"""The flow `rl-gc`: it removes what the command would, and leaves its report as an artifact."""

from pathlib import Path

from small_runs import SmallRun, config_tree

from rlcore.store.objects import Objects


async def test_the_flow_collects_and_reports(tmp_path: Path) -> None:
    from prefect.artifacts import Artifact
    from prefect.testing.utilities import prefect_test_harness

    from flows.gc import rl_gc

    objects = Objects.open(tmp_path / "root")
    SmallRun(objects, "a", config_tree("a")).run(4)
    with prefect_test_harness(server_startup_timeout=120):
        would = await rl_gc(root=objects.root, keep=1, dry_run=True)
        done = await rl_gc(root=objects.root, keep=1)
        page = await Artifact.aget(artifact_key(objects.root))
    assert done["removed"] == would["removed"] and len(done["removed"]) == 6
    assert page is not None and "| a | state | 3 | 3 |" in str(page.data)
    assert "bytes removed" in str(page.data)


def artifact_key(root: str) -> str:
    letters = "".join(c if c.isalnum() else "-" for c in f"gc-{root.lower()}")
    return "-".join(part for part in letters.split("-") if part)
