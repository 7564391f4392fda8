"""How soon the command answers: `sluice --help`, and `sluice show` of a run of 200 iterations.

The run is made quickly: two iterations are trained, and the records and manifests of the second,
with evaluation and checkpoint, are committed again as iterations 0 to 199 of another run. So every
record has the size and the metrics of a real one.

Run: python -m benchmarks.cli [--iterations N] [--repeats N]
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks._common import REPO, RESULTS, finish, machine, seconds, sluice, spread
from rlcore.store.lease import Lease
from rlcore.store.manifest import StageRef
from rlcore.store.objects import Objects
from rlcore.store.paths import STAGES
from rlcore.store.run_store import RunStore

CONFIG = REPO / "benchmarks" / "orchestration.toml"
HELP_GOAL_S, SHOW_GOAL_S = 1.0, 2.0
SHORT, LONG = "short", "long"


def make_run(root: Path, iterations: int) -> None:
    """Store a run of that many committed iterations."""
    more = ["--root", str(root), "--run-id", SHORT]
    sluice("train", CONFIG, *more, "--set", "train.num_iterations=2")
    objects = Objects.open(str(root))
    source, store = RunStore(objects, SHORT), RunStore(objects, LONG)
    record = source.load_run()
    record["config"]["train"]["num_iterations"] = iterations
    store.create_run(record)
    lease = Lease.acquire(objects, LONG)
    template = source.committed(1)
    assert template is not None
    manifests = {
        name: source.manifest(StageRef.model_validate(template["stages"][name])) for name in STAGES
    }
    for i in range(iterations):
        refs: dict[str, StageRef] = {}
        for name, manifest in manifests.items():
            inputs = {n: refs[n].sha256 if n in refs else s for n, s in manifest.inputs.items()}
            own = {"run_id": LONG, "iteration": i, "inputs": inputs, "epoch": lease.epoch}
            refs[name] = store.commit(manifest.model_copy(update=own), lease)
        stages = {name: ref.model_dump(mode="json") for name, ref in refs.items()}
        store.commit_iteration(i, {"stages": stages, "metrics": template["metrics"]}, lease)
    lease.release()


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--result", type=Path, default=RESULTS / "cli.json")
    args = parser.parse_args()
    facts = machine("cyclopts", "rich", "pydantic", "pyarrow")
    with tempfile.TemporaryDirectory(prefix="sluice-cli-") as name:
        make_run(Path(name), args.iterations)
        shown = sluice("show", LONG, "--root", name)
        if f"{args.iterations} of {args.iterations} iterations committed" not in shown:
            raise SystemExit(f"sluice show does not see the run:\n{shown}")
        commands = {
            "help": ["--help"],
            "show": ["show", LONG, "--root", name],
            "show_json": ["show", LONG, "--root", name, "--json"],
        }
        taken = {
            what: [seconds(partial(sluice, *argv)) for _ in range(args.repeats)]
            for what, argv in commands.items()
        }
    of = {what: spread(each) for what, each in taken.items()}
    result = {
        "benchmark": "cli",
        "what": f"seconds of a command's whole process; show: a run of {args.iterations} "
        "iterations",
        "goal": f"median of help < {HELP_GOAL_S:g}; median of show < {SHOW_GOAL_S:g}",
        "met": of["help"]["median"] < HELP_GOAL_S and of["show"]["median"] < SHOW_GOAL_S,
        "iterations": args.iterations,
        **{
            what: {"by_turn": [round(s, 3) for s in each], **of[what]}
            for what, each in taken.items()
        },
        "machine": facts,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
