"""What `sluice check-plugin` does: try a custom function on what its kind meets in a run."""

import tempfile
from pathlib import Path

from flows.commands.inspect import out, print_json
from flows.exit_codes import DONE, FAILED
from flows.operation.deploy import shipped
from rlcore.config.load import absolute
from rlcore.errors import PluginError
from rlcore.plugin_check import Finding, check_plugin, kind_of
from rlcore.plugins import PARAMETERS, Kind, load_checked


def check(
    spec: str, kind: str | None, *, reward_key: str | None, model: Path | None, as_json: bool
) -> int:
    """Try a custom function, and say what is wrong with it.

    Args:
        spec: the function.
        kind: what it is for; None: its parameters tell.
        reward_key: of a reward function that returns a dict.
        model: folder of the model for a generate function; None: the quickstart's.
        as_json: print one JSON object.

    Returns:
        0: nothing is wrong; 1: something is.

    Raises:
        PluginError: it cannot be loaded or called, or there is no such kind.
    """
    spec = absolute(spec, "function", Path.cwd())
    known = next((name for name in PARAMETERS if name == kind), None)
    if kind is not None and known is None:
        raise PluginError(f"--kind {kind}: it is one of {', '.join(PARAMETERS)}")
    which = known or kind_of(spec)
    with tempfile.TemporaryDirectory(prefix="sluice-check-") as folder:
        if which in ("generate", "group_generate") and model is None:
            model = quickstart_model(Path(folder) / "model")
        found = check_plugin(spec, which, reward_key=reward_key, model=model)
    if as_json:
        rows = [{"what": one.what, "problem": one.problem} for one in found]
        print_json({"function": spec, "kind": which, "tried": rows})
    else:
        show(spec, which, found)
    return FAILED if any(one.problem for one in found) else DONE


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
