"""What `sluice convert` does: weights from one form of storage to another."""

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flows.commands.inspect import out, print_json
from rlcore.errors import ConfigError
from rlcore.opening import existing_config, open_store
from rlcore.scratch import make_scratch

if TYPE_CHECKING:
    from rlcore.conversion.convert import Conversion
    from rlcore.train.trainer import DType

SHOWN = 3
"""How many of the tensors that are left out are named."""


def convert(
    source: str,
    target: Path,
    *,
    model: Path | None,
    iteration: int | None,
    dtype: "DType | None",
    padded_vocab_size: int | None,
    quantize: Literal["fp8"] | None = None,
    to: Literal["torch_dist"] | None = None,
    root: str,
    as_json: bool,
) -> None:
    """Convert and say what was written.

    Args:
        source: a Hugging Face folder, a Megatron checkpoint, or a run of `root`.
        target: must not exist.
        model: the Hugging Face folder whose config and tokenizer a Megatron checkpoint has.
        iteration: of a run, whose state it is; None: the newest that is kept.
        dtype: of weights that are written; None: as they are stored.
        padded_vocab_size: rows of a Megatron checkpoint's embedding.
        quantize: write a Hugging Face folder in fp8 blocks of another one.
        to: a Megatron checkpoint of a run's state; None: a Hugging Face folder.
        root: of the runs.
        as_json: all of it as JSON.

    Raises:
        ConfigError: an option does not go with the source.
    """
    from rlcore.conversion import convert as conversions
    from rlcore.conversion.fp8 import hf_to_fp8
    from rlcore.conversion.torch_dist import checkpoint_folder

    folder = Path(source)
    if quantize is not None:
        _refuse(
            "--quantize",
            model=model,
            iter=iteration,
            dtype=dtype,
            padded_vocab_size=padded_vocab_size,
            to=to,
        )
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{source}: --quantize takes a Hugging Face folder")
        done = hf_to_fp8(folder, target)
    elif (folder / "config.json").is_file():
        _refuse("a Hugging Face folder", model=model, iter=iteration, dtype=dtype, to=to)
        done = conversions.hf_to_torch_dist(folder, target, padded_vocab_size)
    elif checkpoint_folder(folder) is not None:
        _refuse("a Megatron checkpoint", iter=iteration, padded_vocab_size=padded_vocab_size, to=to)
        if model is None:
            raise ConfigError(
                f"{source} is a Megatron checkpoint, which has neither config.json nor tokenizer: "
                "name a Hugging Face folder of the same architecture by --model"
            )
        done = conversions.torch_dist_to_hf(folder, target, model, dtype)
    elif folder.exists():
        raise ConfigError(
            f"{source} is neither a Hugging Face folder (it has no config.json) nor a torch_dist "
            "checkpoint of Megatron"
        )
    elif "/" in source:
        raise ConfigError(f"{source} does not exist")
    else:
        _refuse("a run", model=model)
        if to is None:
            _refuse("a run without --to torch_dist", padded_vocab_size=padded_vocab_size)
        done = _of_run(source, iteration, target, dtype, to, padded_vocab_size, root)
    _show(done, as_json=as_json)


def _refuse(source: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning for {source}; remove it")


def _of_run(
    run_id: str,
    iteration: int | None,
    target: Path,
    dtype: "DType | None",
    to: Literal["torch_dist"] | None,
    padded_vocab_size: int | None,
    root: str,
) -> "Conversion":
    from rlcore.conversion.run import convert_run

    config = existing_config(root, run_id)
    scratch = make_scratch(run_id)
    try:
        return convert_run(
            config,
            open_store(config),
            iteration,
            target,
            dtype,
            scratch,
            to or "huggingface",
            padded_vocab_size,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _show(done: "Conversion", *, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    speed = done.bytes / max(done.seconds, 1e-9) / 1e9
    out.print(
        f"[bold]{done.target}[/bold]: {done.tensors} tensors, {done.bytes / 1e9:.3f} GB in "
        f"{done.seconds:.1f} s ({speed:.2f} GB/s)"
    )
    if done.left_out:
        more = len(done.left_out) - SHOWN
        named = ", ".join(done.left_out[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        out.print(f"left out, as no part of the decoder: {named}")
    out.print(f"[dim]conversion.json {done.sha256}[/dim]")
