"""Custom functions by name: `module:function`, `module.function` or `file.py:function`.

Invariants:
- A file is run once a process, under a module name made from its path, and again only when it
  changed.
- Its folder is importable for its siblings, behind everything installed: a plugin's `utils.py`
  never replaces another package's.
- Every error names the setting and the spec.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rlcore.errors import PluginError

Kind = Literal[
    "generate",
    "group_generate",
    "rollout",
    "data_source",
    "buffer_filter",
    "sample_hook",
    "sample_filter",
    "all_samples",
    "reward",
    "batched_reward",
    "filter",
    "build",
    "reward_post_process",
    "convert_samples",
    "advantage",
    "tis",
    "pg_loss_reducer",
    "loss",
    "post_write",
    "megatron_init",
    "before_log_prob",
    "before_train_step",
]

PARAMETERS: dict[Kind, tuple[str, ...]] = {
    "generate": ("args", "sample", "sampling_params"),
    "group_generate": ("args", "samples", "sampling_params"),
    "rollout": ("args", "rollout_id", "data_source"),
    "data_source": ("args",),
    "buffer_filter": ("args", "rollout_id", "buffer", "num_samples"),
    "sample_hook": ("args", "sample"),
    "sample_filter": ("args", "groups"),
    "all_samples": ("args", "all_groups", "data_source"),
    "reward": ("args", "sample"),
    "batched_reward": ("args", "samples"),
    "filter": ("args", "samples"),
    "build": ("folder", "seed"),
    "reward_post_process": ("args", "samples"),
    "convert_samples": ("args", "samples"),
    "advantage": ("args", "rollout_data"),
    "tis": (
        "args",
        "pg_loss",
        "train_log_probs",
        "rollout_log_probs",
        "loss_masks",
        "total_lengths",
        "response_lengths",
    ),
    "pg_loss_reducer": ("total_lengths", "response_lengths", "masks", "per_token"),
    "loss": ("args", "batch", "logits", "sum_of_sample_mean"),
    "post_write": ("args", "version_dir", "rollout_engines"),
    "megatron_init": ("args",),
    "before_log_prob": ("args", "model", "store_prefix"),
    "before_train_step": (
        "args",
        "rollout_id",
        "step_id",
        "model",
        "optimizer",
        "opt_param_scheduler",
    ),
}

BY_NAME: frozenset[Kind] = frozenset({"tis"})
"""Kinds whose arguments, `args` aside, are given by their names."""

NAMED: dict[Kind, tuple[str, ...]] = {"sample_hook": ("rollout_id", "evaluation")}
"""What a function of a kind is given beside, by its name, where it has a parameter for it."""

TRAINING: dict[str, Kind] = {
    "custom_reward_post_process_path": "reward_post_process",
    "custom_convert_samples_to_train_data_path": "convert_samples",
    "custom_advantage_function_path": "advantage",
    "custom_tis_function_path": "tis",
    "custom_pg_loss_reducer_function_path": "pg_loss_reducer",
    "custom_loss_function_path": "loss",
}
"""Settings of `algorithm` that name a function of the trainer, and its kind."""

MEGATRON: dict[str, Kind] = {
    "custom_megatron_init_path": "megatron_init",
    "custom_megatron_before_log_prob_hook_path": "before_log_prob",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
}
"""Settings of `train` that name a function of the Megatron backend, and its kind."""

PLAIN: frozenset[Kind] = frozenset(
    {
        "filter",
        "build",
        "buffer_filter",
        "sample_filter",
        "all_samples",
        "post_write",
        *TRAINING.values(),
        *MEGATRON.values(),
    }
)
"""Kinds that are never async."""

_loaded: dict[Path, tuple[tuple[int, int], ModuleType]] = {}


def load_function(spec: str, setting: str) -> Callable[..., Any]:
    """The function that a setting names.

    Args:
        spec: `module:function`, `module.function` or `file.py:function`.
        setting: name of the setting, for errors, such as `reward.custom_rm_path`.

    Raises:
        PluginError: the spec is malformed, the module cannot be imported, or it has no such
            function.
    """
    where, name = _split(spec, setting)
    what = f"{setting} = {spec!r}"
    module = _load_file(Path(where), what) if where.endswith(".py") else _import(where, what)
    try:
        function = getattr(module, name, None)
    except ImportError as error:
        raise PluginError(f"{what}: {error}") from None
    if function is None:
        raise PluginError(f"{what}: {where} has no function {name!r}{_nearest(module, name)}")
    if not callable(function):
        raise PluginError(f"{what}: {name} is a {type(function).__name__}, not a function")
    return function


def check_signature(function: Callable[..., Any], kind: Kind, what: str) -> None:
    """See that a function can be called as its kind is.

    Args:
        function: a custom function.
        kind: what it is for.
        what: setting and spec, for errors.

    Raises:
        PluginError: it does not take the arguments, or must be async and is not.
    """
    names = PARAMETERS[kind]
    wanted = f"({', '.join(names)})"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # A built-in without a signature: only a call can tell.
    try:
        if kind in BY_NAME:
            signature.bind(names[0], **dict.fromkeys(names[1:]))
        else:
            more = [name for name in NAMED.get(kind, ()) if name in signature.parameters]
            signature.bind(*names, **dict.fromkeys(more))
    except TypeError as error:
        raise PluginError(
            f"{what}: it is called as {wanted}, but its signature is {signature}: {error}"
        ) from None
    is_generate = kind in ("generate", "group_generate")
    if is_generate and inspect.isfunction(function) and not is_async(function):
        raise PluginError(f"{what}: it must be an `async def {function.__name__}{wanted}`")
    if kind in PLAIN and is_async(function):
        raise PluginError(f"{what}: it must be a plain `def`, not async")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a custom function has a parameter of that name."""
    return name in inspect.signature(function).parameters


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    call = type(function).__call__ if not inspect.isroutine(function) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def load_checked(spec: str, setting: str, kind: Kind) -> Callable[..., Any]:
    """`load_function` followed by `check_signature`."""
    function = load_function(spec, setting)
    check_signature(function, kind, f"{setting} = {spec!r}")
    return function


def _split(spec: str, setting: str) -> tuple[str, str]:
    where, separator, name = spec.rpartition(":")
    if not separator and not spec.endswith(".py"):
        where, separator, name = spec.rpartition(".")
    if not (where and name.isidentifier()):
        raise PluginError(
            f"{setting} = {spec!r} names no function; write module:function, module.function "
            "or file.py:function"
        )
    return where, name


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "slime":
            raise PluginError(f"{what}: {_describe(error, None)}") from None
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise PluginError(
                f"{what}: there is no module {error.name!r}; install it, or name a file as "
                "path/to/file.py:function"
            ) from None
        raise PluginError(f"{what}: importing {name} failed: {_describe(error, None)}") from error
    except Exception as error:
        # A module may raise anything while it is imported; all of it is the plugin's fault.
        raise PluginError(f"{what}: importing {name} failed: {_describe(error, None)}") from error


def _load_file(path: Path, what: str) -> ModuleType:
    path = path.expanduser().resolve()
    try:
        stat = path.stat()
    except OSError:
        raise PluginError(f"{what}: there is no file {path}{_nearest_file(path)}") from None
    stamp = (stat.st_mtime_ns, stat.st_size)
    known = _loaded.get(path)
    if known is not None and known[0] == stamp:
        return known[1]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"sluice_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{what}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Known under its name while it runs, as dataclasses and pickle expect.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"{what}: running {path} failed: {_describe(error, path)}") from error
    _loaded[path] = (stamp, module)
    return module


def _describe(error: Exception, path: Path | None) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename} line {error.lineno})"
    if isinstance(error, ModuleNotFoundError) and error.name == "slime":
        return f"{error}; set compat.slime = true to have slime's names without it"
    frames = traceback.extract_tb(error.__traceback__)
    at = [f.lineno for f in frames if path is not None and f.filename == str(path)]
    return f"{type(error).__name__}: {error}" + (f" (line {at[-1]})" if at else "")


def _nearest(module: ModuleType, name: str) -> str:
    names = [
        n
        for n, v in vars(module).items()
        if inspect.isroutine(v) and v.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it has {', '.join(map(repr, names))}" if names else "; it has no functions"


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor its folder {path.parent}"
    names = [p.name for p in path.parent.glob("*.py")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
