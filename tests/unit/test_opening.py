"""What a run goes on with when it is opened."""

from pathlib import Path

from small_runs import SmallRun, config_tree

from rlcore.cluster.fleet import ACTORS_OF
from rlcore.opening import goes_on_with
from rlcore.store.objects import Objects
from rlcore.store.paths import STAGES, manifest_key


def test_a_run_goes_on_with_the_first_stage_that_is_not_committed(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    run = SmallRun(objects, "r", config_tree("r"))
    assert goes_on_with(run.store) == "rollout"
    refs = run.iteration(0)
    assert goes_on_with(run.store) == "rollout"
    run.iteration(1, commit=False)
    assert goes_on_with(run.store) == "evaluate"
    for name, following in (("train", "train"), ("filter", "filter"), ("reward", "reward")):
        objects.delete(manifest_key("r", 1, name))
        assert goes_on_with(run.store) == following
    objects.put(manifest_key("r", 1, "rollout"), b"torn")
    assert goes_on_with(run.store) == "rollout"
    assert set(ACTORS_OF) < set(STAGES) and set(refs) < set(STAGES)
