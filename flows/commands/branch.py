"""What `sluice fork` and `sluice rerun` do: make a run that goes on from an iteration of another.

Invariant: each may be killed and called again with the same arguments, and comes to the same.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from flows.commands.inspect import out, print_json, table_of
from flows.exit_codes import DONE
from rlcore import __version__
from rlcore.config import AlgorithmConfig, RunConfig, build_config, with_sets
from rlcore.config.load import parse_set
from rlcore.errors import ConfigError
from rlcore.opening import existing_config, put_driver
from rlcore.sources import check_sources, sources_of
from rlcore.store.branch import Difference, ForkPlan, differences, plan_fork
from rlcore.store.lease import Lease
from rlcore.store.manifest import Manifest, StageRef
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore

SHOWN_FLIPS = 5
_EXCERPT = 160


def fork(
    root: str, run_id: str, iteration: int, name: str, sets: Sequence[str], *, as_json: bool
) -> int:
    """Make a run that goes on after an iteration of another one; nothing is trained yet."""
    plan, config = _plan(root, run_id, iteration, name, sets, None)
    _check_functions(plan, config)
    plan.make()
    changed = _changed(plan)
    if as_json:
        print_json(_head(plan, iteration, changed))
        return DONE
    out.print(f"[bold]{name}[/bold] goes on from {run_id} after iteration {iteration}")
    _print_changed(changed)
    out.print(f"go on with: sluice resume {name}")
    return DONE


def rerun(
    root: str,
    run_id: str,
    iteration: int,
    stage: str,
    name: str,
    sets: Sequence[str],
    *,
    reward: str | None,
    as_json: bool,
) -> int:
    """Run one stage of a committed iteration again, in a fork of its own."""
    if stage not in ("train", "reward"):
        raise ConfigError(f"--stage {stage!r} cannot be run again; use train or reward")
    if reward is not None:
        if stage != "reward":
            raise ConfigError("--reward goes with --stage reward")
        # As TOML text: a path may hold anything.
        sets = [*sets, f"reward.custom_rm_path={json.dumps(reward)}", 'reward.rm_type=""']
    plan, config = _plan(root, run_id, iteration, name, sets, stage)
    if stage == "train":
        return _rerun_train(plan, config, iteration, as_json=as_json)
    return _rerun_reward(plan, config, iteration, as_json=as_json)


def _plan(
    root: str, run_id: str, iteration: int, name: str, sets: Sequence[str], rerun: str | None
) -> tuple[ForkPlan, RunConfig]:
    """The fork as it would be made."""
    base = existing_config(root, run_id)
    given = {".".join(parse_set(text)[0]) for text in sets}
    if wrong := sorted(key for key in given if key == "run.id" or key.startswith("storage.")):
        raise ConfigError(f"--set {wrong[0]}: --as names a fork, which lies in its parent's root")
    if not name:
        raise ConfigError("--as is empty; give the fork a name")
    tree = with_sets(base, sets).model_dump(mode="python")
    config = build_config(tree | {"run": tree["run"] | {"id": name}})
    parent, sources = RunStore(Objects.open(root), run_id), sources_of(config)
    kept = {name: digest for name, digest in sources.items() if not name.startswith(tuple(given))}
    check_sources(run_id, parent.load_run().get("sources", {}), kept)
    plan = plan_fork(
        parent,
        iteration,
        config.model_dump(mode="json"),
        code=__version__,
        rerun=rerun,
        given=given,
        sources=sources,
    )
    return plan, config


def _check_functions(plan: ForkPlan, config: RunConfig) -> None:
    """Custom functions that the fork changes load, before anything is written."""
    from rlcore.preflight import check_plugins
    from rlcore.rollout.rewards import check_reward

    touched = {difference.key.split(".")[0] for difference in _changed(plan)}
    if touched & {"rollout", "filter"}:
        check_plugins(config)
    if "reward" in touched:
        check_reward(config.reward)


# --- train ----------------------------------------------------------------------------------------


def _rerun_train(plan: ForkPlan, config: RunConfig, iteration: int, *, as_json: bool) -> int:
    from flows.commands.launch import drive
    from flows.reporting.progress import Progress
    from rlcore.preflight import preflight

    if not plan.there:
        preflight(config)
    store = plan.make()
    if store.committed(iteration) is None:
        shown = Progress(config, time.perf_counter(), quiet=as_json)
        code, _ = drive(config, shown, only=iteration)
        if code != DONE:
            return code
    old, new = (_trained(s, iteration) for s in (plan.parent, store))
    if as_json:
        head = _head(plan, iteration, _changed(plan))
        print_json(head | {"original": old, "rerun": new})
        return DONE
    out.print(f"[bold]{plan.run_id}[/bold]: iteration {iteration} trained again")
    _print_changed(_changed(plan))
    rows = [
        {
            "metric": key,
            plan.parent.run_id: old["metrics"].get(key),
            plan.run_id: new["metrics"].get(key),
            "difference": _less(new["metrics"].get(key), old["metrics"].get(key)),
        }
        for key in sorted(old["metrics"].keys() | new["metrics"].keys())
    ]
    out.print(table_of(rows))
    for run_id, found in ((plan.parent.run_id, old), (plan.run_id, new)):
        if found["model_sha256"]:
            out.print(f"model sha256 of {run_id}: {found['model_sha256']}")
    out.print(f"go on with: sluice resume {plan.run_id}")
    return DONE


def _trained(store: RunStore, iteration: int) -> dict[str, Any]:
    """What training said of an iteration, without what depends on the machine."""
    manifest = _stage(store, iteration, "train")
    timed = ("seconds", "tokens_per", "perf")
    metrics = {k: v for k, v in manifest.metrics.items() if not any(t in k for t in timed)}
    state = manifest.extra["state"] or {}
    return {"metrics": metrics, "model_sha256": state.get("model_sha256")}


# --- reward ---------------------------------------------------------------------------------------


def _rerun_reward(plan: ForkPlan, config: RunConfig, iteration: int, *, as_json: bool) -> int:
    from rlcore.rescore import rescore

    _check_functions(plan, config)
    store = plan.make()
    if store.committed(iteration) is None:
        lease = Lease.acquire(store.objects, plan.run_id, ttl_s=config.storage.lease_ttl_s)
        lease.start()
        try:
            put_driver(store, lease, sources_of(config))
            rescore(store, config, lease)
        finally:
            with contextlib.suppress(OSError):
                lease.release()
    summary = _scores(plan, store, config, iteration)
    if as_json:
        print_json(_head(plan, iteration, _changed(plan)) | summary)
    else:
        _print_scores(plan, iteration, summary)
    return DONE


def _scores(plan: ForkPlan, store: RunStore, config: RunConfig, iteration: int) -> dict[str, Any]:
    from rlcore.rescore import compare_scores

    parent = plan.parent.owner(iteration)
    theirs = AlgorithmConfig.model_validate(parent.load_run()["config"]["algorithm"])
    change = compare_scores(parent, store, iteration, (theirs, config.algorithm))
    before, after = change.before, change.after

    def one(row: int) -> dict[str, Any]:
        sample = change.samples[row]
        prompt = sample.prompt
        return {
            "row": row,
            "group_index": sample.group_index,
            "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt),
            "response": sample.response,
            "label": sample.label,
            "reward": [before.rewards[row], after.rewards[row]],
            "advantage": [before.advantages[row], after.advantages[row]],
        }

    return {
        "samples": len(change.samples),
        "rewards_changed": len(change.changed),
        "rewarded_when_generated": change.rewarded_before,
        "groups": len({sample.group_index for sample in change.samples}),
        "groups_changed": len(change.groups),
        "mean_reward": [before.mean, after.mean],
        "samples_with_signal": [before.kept, after.kept],
        "samples_not_scored": [v.rewards.count(None) for v in (before, after)],
        "advantages_flipped": [one(row) for row in change.flipped],
    }


def _print_scores(plan: ForkPlan, iteration: int, summary: dict[str, Any]) -> None:
    out.print(f"[bold]{plan.run_id}[/bold]: iteration {iteration} scored again")
    _print_changed(_changed(plan))
    rows = [
        {"": name, plan.parent.run_id: summary[key][0], plan.run_id: summary[key][1]}
        for name, key in (
            ("mean reward", "mean_reward"),
            ("samples with a signal", "samples_with_signal"),
            ("samples not scored", "samples_not_scored"),
        )
    ]
    out.print(table_of(rows))
    flipped = summary["advantages_flipped"]
    out.print(
        f"{summary['rewards_changed']} of {summary['samples']} rewards changed; other advantages "
        f"in {summary['groups_changed']} of {summary['groups']} groups; {len(flipped)} flip sign"
    )
    if summary["rewarded_when_generated"]:
        out.print(
            f"{summary['rewarded_when_generated']} samples got their reward from the generate "
            "function and keep it"
        )
    for one in flipped[:SHOWN_FLIPS]:
        body = Text.assemble((_cut(one["prompt"]), "dim"), (_cut(one["response"]), "bold"))
        (r0, r1), (a0, a1) = one["reward"], one["advantage"]
        title = f"{one['row']}  reward {r0:.3f} -> {r1:.3f}  advantage {a0:+.3f} -> {a1:+.3f}"
        out.print(Panel(body, width=100, title=title, title_align="left"))
    if len(flipped) > SHOWN_FLIPS:
        out.print(f"and {len(flipped) - SHOWN_FLIPS} more; --json has all")
    out.print(f"train on them with: sluice resume {plan.run_id}")


# --- shared ---------------------------------------------------------------------------------------


def _stage(store: RunStore, iteration: int, name: str) -> Manifest:
    record = store.committed(iteration)
    assert record is not None
    return store.manifest(StageRef.model_validate(record["stages"][name]))


def _changed(plan: ForkPlan) -> list[Difference]:
    return differences(plan.parent.load_run()["config"], plan.record["config"])


def _head(plan: ForkPlan, iteration: int, changed: list[Difference]) -> dict[str, Any]:
    return {
        "run_id": plan.run_id,
        "parent": plan.record["parent"],
        "iteration": iteration,
        "changed": {d.key: [d.old, d.new] for d in changed},
    }


def _print_changed(changed: list[Difference]) -> None:
    for d in changed:
        out.print(f"  {escape(str(d))}")


def _less(new: float | None, old: float | None) -> float | None:
    return None if new is None or old is None else new - old


def _cut(text: str) -> str:
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"
