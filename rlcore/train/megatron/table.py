"""The table `megatron` of a configuration, checked before anything starts: names, types and what
goes together.

What megatron-core knows is read from its source, since importing it takes seconds, and torch with
it.

Invariant: nothing here imports torch or megatron-core.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.config.section import MegatronTable
from rlcore.errors import ConfigError
from rlcore.train.megatron.refused import ADAM, reason

OF_LAYOUT = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallel": "sequence_parallel",
}
OF_COPIES = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "grad_reduce_in_fp32": True,
    "ddp_bucket_size": None,
    "pad_buckets_for_high_nccl_busbw": False,
    "reduce_scatter_with_fp32_accumulation": False,
}
"""What is of `DistributedDataParallelConfig`, and what it is unless it is set."""
NEEDS = (
    ("overlap_param_gather", "overlap_grad_reduce"),
    ("overlap_param_gather", "use_distributed_optimizer"),
    ("reduce_scatter_with_fp32_accumulation", "use_distributed_optimizer"),
)
"""What is on only where the other is."""

MODEL = ("model_parallel_config.py", "transformer/transformer_config.py")
OTHERS = ("distributed/distributed_data_parallel_config.py", "optimizer/optimizer_config.py")
"""Where megatron-core's configurations are."""
FROM_ONE = (
    *(name for name in OF_LAYOUT if name != "sequence_parallel"),
    "ddp_bucket_size",
    "recompute_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "microbatch_group_size_per_vp_stage",
)
FROM_ZERO = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
BALANCING = ("none", "aux_loss", "seq_aux_loss")
"""Losses of an uneven use of experts, counted over a micro-batch."""
NO_LORA = (
    "model.lora_rank is not there with train.backend = 'megatron'; use 'fsdp', or leave it out"
)
PLAIN = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a word"}


def check_table(table: MegatronTable) -> None:
    """Whether megatron-core and this backend take what the table says.

    Raises:
        ConfigError: naming the setting that is not taken, why, and what would mend it.
    """
    known = {**fields_of(MODEL), **dict.fromkeys(OF_COPIES, "bool")} | {"ddp_bucket_size": "int"}
    others = frozenset(fields_of(OTHERS))
    for name, value in table.items():
        if why := reason(name, frozenset(known)):
            raise ConfigError(f"megatron.{name} {why}")
        if name not in known:
            if name in others:
                raise ConfigError(f"megatron.{name} has no meaning here: {ADAM}; leave it out")
            near = get_close_matches(name, known, 1)
            hint = f"; do you mean megatron.{near[0]}?" if near else ""
            raise ConfigError(f"megatron.{name}: megatron-core has no such setting{hint}")
        if wanted := _misfit(name, known[name], value):
            raise ConfigError(f"megatron.{name} = {value!r} must be {wanted}")
    for name, other in NEEDS:
        if table.get(name) and not table.get(other, OF_COPIES[other]):
            raise ConfigError(f"megatron.{name} = true needs megatron.{other} = true")
    stages = "pipeline_model_parallel_size"
    if table.get(f"virtual_{stages}") and table.get(stages, 1) == 1:
        raise ConfigError(f"megatron.virtual_{stages} needs megatron.{stages} above 1")
    if "recompute_modules" in table and table.get("recompute_granularity") != "selective":
        raise ConfigError(
            "megatron.recompute_modules needs megatron.recompute_granularity = 'selective'"
        )


def fields_of(files: tuple[str, ...]) -> dict[str, str]:
    """Names and annotations of configurations of the installed megatron-core.

    Raises:
        ConfigError: it is not installed.
    """
    return {name: kind for file in files for name, kind in _fields(file)}


@cache
def _fields(file: str) -> tuple[tuple[str, str], ...]:
    if (folder := installed()) is None:
        raise ConfigError(
            "train.backend = 'megatron', but megatron-core is not installed here; install the "
            "extra `megatron`, or use 'fsdp'"
        )
    return tuple(_annotated(ast.parse((folder / file).read_text(encoding="utf-8"))))


def installed() -> Path | None:
    """The folder of megatron-core, where it is installed."""
    # A namespace, of which nothing is run.
    found = find_spec("megatron")
    folders = (Path(name) / "core" for name in (found and found.submodule_search_locations) or ())
    return next((folder for folder in folders if folder.is_dir()), None)


def _annotated(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, ast.unparse(field.annotation)


def _misfit(name: str, annotation: str, value: Any) -> str | None:
    """What a value should be instead."""
    if name in FROM_ONE:
        fits = type(value) is int and value >= 1
        return None if fits else "a whole number from 1 on"
    if name in FROM_ZERO:
        fits = type(value) in (int, float) and value >= 0
        return None if fits else "a number from 0 on"
    kinds = ast.parse(annotation, mode="eval").body
    words = [n.value for n in ast.walk(kinds) if isinstance(n, ast.Constant)]
    names = {n.id for n in ast.walk(kinds) if isinstance(n, ast.Name)}
    if "Literal" in names:
        chosen = [word for word in words if isinstance(word, str)]
        return None if value in chosen else f"one of {', '.join(chosen)}"
    plain = [kind for kind in PLAIN if kind in names]
    if not plain:
        return "left out: a table cannot say it"
    said = " or ".join(PLAIN[kind] for kind in plain)
    of_lists = re.sub(r"[Ll]ist\[\w+\]", "", annotation)
    if of_lists != annotation:
        alone = any(kind in of_lists for kind in plain)
        if isinstance(value, list) or not alone:
            fits = isinstance(value, list) and all(_is(one, plain) for one in value)
            return None if fits else f"a list, each of it {said}"
    return None if _is(value, plain) else said


def _is(value: Any, kinds: list[str]) -> bool:
    kind = type(value).__name__
    return kind in kinds or (kind == "int" and "float" in kinds)
