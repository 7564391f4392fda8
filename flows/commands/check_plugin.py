"""What `sluice check-plugin` does: try a custom function on what its kind meets in a run."""

import tempfile
from pathlib import Path
from typing import Any

from flows.commands.inspect import out, print_json
from flows.exit_codes import DONE, FAILED
from flows.operation.deploy import shipped
from rlcore.config.load import absolute, build_config
from rlcore.errors import PluginError
from rlcore.plugin_check import Finding, check_plugin, kind_of
from rlcore.plugins import PARAMETERS, Kind, load_checked
from rlcore.slime.compat import state
from rlcore.slime.compat.attributes import slime_args


def check(
    spec: str,
    kind: str | None,
    *,
    reward_key: str | None,
    model: Path | None,
    as_json: bool,
    slime: bool = False,
) -> int:
    """Try a custom function, and say what is wrong with it.

    Args:
        spec: the function.
        kind: what it is for; None: its parameters tell.
        reward_key: of a reward function that returns a dict.
        model: folder of the model for a generate function, a sample hook or a source; None: the
            quickstart's.
        as_json: print one JSON object.
        slime: it is written for slime, as with `compat.slime = true`.

    Returns:
        0: nothing is wrong; 1: something is.

    Raises:
        PluginError: it cannot be loaded or called, or there is no such kind.
    """
    spec = absolute(spec, "function", Path.cwd())
    known = next((name for name in PARAMETERS if name == kind), None)
    if kind is not None and known is None:
        raise PluginError(f"--kind {kind}: it is one of {', '.join(PARAMETERS)}")
    with state.active(slime_args_of_defaults(reward_key) if slime else None):
        return _check(spec, known, reward_key, model, as_json)


def _check(
    spec: str, kind: Kind | None, reward_key: str | None, model: Path | None, as_json: bool
) -> int:
    which = kind or kind_of(spec)
    with tempfile.TemporaryDirectory(prefix="sluice-check-") as folder:
        tried_with = ("generate", "group_generate", "sample_hook", "data_source")
        if which in tried_with and model is None:
            model = quickstart_model(Path(folder) / "model")
        found = check_plugin(spec, which, reward_key=reward_key, model=model)
    if as_json:
        rows = [{"what": one.what, "problem": one.problem} for one in found]
        print_json({"function": spec, "kind": which, "tried": rows})
    else:
        show(spec, which, found)
    return FAILED if any(one.problem for one in found) else DONE


def slime_args_of_defaults(reward_key: str | None) -> dict[str, Any]:
    """slime's `args` of a run that sets nothing."""
    tree = {
        "model": {"path": "/model"},
        "data": {"path": "/data.jsonl"},
        "reward": {"rm_type": "math", "reward_key": reward_key},
    }
    return slime_args(build_config(tree).model_dump(mode="json"))


def show(spec: str, kind: Kind, found: list[Finding]) -> None:
    """A line for each thing that was tried."""
    out.print(f"{spec} as {kind}", markup=False)
    for one in found:
        sign = "[red]wrong[/red]" if one.problem else "[green]ok[/green]   "
        out.print(f"{sign}  {one.what}", end=": " if one.problem else "\n")
        if one.problem:
            out.print(one.problem, markup=False)


def quickstart_model(folder: Path) -> Path:
    """A small random model; its vocabulary is digits and a few signs."""
    folder.mkdir()
    path = shipped("examples") / "quickstart" / "model.py"
    load_checked(f"{path}:build", "the model", "build")(folder, 0)
    return folder
