"""What `sluice plan` prints: memory, traffic and time of training, before anything starts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from flows.commands.inspect import out, print_json, table_of
from flows.exit_codes import DONE, FAILED
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture
from rlcore.models.hf_config import read_hf_config
from rlcore.models.megatron_layout import MegatronLayout
from rlcore.models.megatron_plan import plan_megatron
from rlcore.models.plan import GPUS, Gpu, Plan, Work
from rlcore.models.plan import plan as count
from rlcore.models.presets import read_preset
from rlcore.train.megatron.table import check_table, installed

ENGINE_SHARE = 0.85
"""Of a GPU's memory, that SGLang takes where sglang.mem_fraction_static does not say."""
MOST_RANKS = 4096
GB = 1e9
WHOLE = MegatronLayout()
"""Nothing is divided."""


def plan(
    config: RunConfig, gpu: str, megatron: Mapping[str, object] | None = None, *, as_json: bool
) -> int:
    """Count and print.

    Args:
        config: a run's.
        gpu: a name of `GPUS`.
        megatron: the layout by Megatron's names, over that of the run; FSDP2's where neither has
            a value and the run's backend is FSDP2.
        as_json: all figures as JSON.

    Returns:
        The exit code: 1 where the memory does not suffice.

    Raises:
        ConfigError: the architecture is not known here, or the kind of GPU, or the model cannot be
            laid out like that.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: there are {', '.join(GPUS)}")
    layout = _layout(config, megatron or {})
    arch, work = architecture_of(config), work_of(config, layout or WHOLE)
    found = _counted(arch, work, layout, GPUS[gpu])
    enough = found.fits or enough_ranks(arch, work, GPUS[gpu], layout)
    if as_json:
        print_json(
            {
                **dataclasses.asdict(found),
                "work": dataclasses.asdict(work),
                "megatron": layout and dataclasses.asdict(layout),
                "gpu": gpu,
                "fits": found.fits,
                "seconds": found.seconds,
                "enough_ranks": work.ranks if found.fits else enough,
            }
        )
    else:
        _show(found, work, gpu, layout, None if found.fits else enough)
    return DONE if found.fits else FAILED


def _layout(config: RunConfig, megatron: Mapping[str, object]) -> MegatronLayout | None:
    """Megatron's layout, where it is asked for by the run or beside it."""
    given = {name: value for name, value in megatron.items() if value is not None}
    if config.train.backend != "megatron":
        return MegatronLayout.of(given) if given else None
    if installed() is not None:
        check_table(config.megatron)
    whole = {"recompute_granularity": "full"} if config.train.gradient_checkpointing else {}
    return MegatronLayout.of(whole | config.megatron | given)


def architecture_of(config: RunConfig) -> Architecture:
    """Of the model's folder, or of the preset where there is none here."""
    model = config.model
    if model.path and (Path(model.path) / "config.json").is_file():
        return read_hf_config(Path(model.path))
    if model.preset:
        return read_preset(model.preset).architecture
    raise ConfigError(
        f"the model of {model.path or model.build} is not here to be read: name its architecture "
        "by model.preset"
    )


def work_of(config: RunConfig, layout: MegatronLayout = WHOLE) -> Work:
    """What the trainer of a run does, with every sequence as long as it may be.

    Args:
        config: the run's.
        layout: context-parallel ranks have a part of each sequence.
    """
    rollout, train, algorithm = config.rollout, config.train, config.algorithm
    longest = rollout.max_response_len + (config.data.max_prompt_len or 0)
    longest = rollout.context_length or longest
    shares = config.cluster.colocate and rollout.engine == "sglang" and not config.offloads_rollout
    told = config.sglang.get("mem_fraction_static")
    share = told if isinstance(told, int | float) else ENGINE_SHARE
    return Work(
        ranks=config.world_size,
        ranks_per_node=config.cluster.actor_num_gpus_per_node,
        # A sequence that is longer has a micro-batch of its own.
        tokens_per_micro_batch=max(
            train.max_tokens_per_gpu, ceil(longest / layout.context_parallel_size)
        ),
        tokens_per_step=train.global_batch_size * longest,
        steps=train.num_steps_per_rollout,
        sequence=longest,
        bytes_of_numbers=2 if train.precision == "bfloat16" else 4,
        recomputes=train.gradient_checkpointing,
        frozen=int(algorithm.needs_reference) + bool(algorithm.opd_teacher_load),
        shared=int(algorithm.needs_reference and config.model.lora_rank is not None),
        critic=algorithm.has_critic,
        lora_rank=config.model.lora_rank,
        lora_targets=tuple(config.model.lora_target_modules),
        offloads=train.optimizer_cpu_offload,
        engine_share=share if shares else 0.0,
    )


def enough_ranks(
    arch: Architecture, work: Work, gpu: Gpu, layout: MegatronLayout | None = None
) -> int | None:
    """The smallest doubling of ranks whose memory suffices; None: no number does."""
    ranks = work.ranks
    while ranks <= MOST_RANKS:
        if _counted(arch, replace(work, ranks=ranks), layout, gpu).fits:
            return ranks
        ranks *= 2
    return None


def _counted(arch: Architecture, work: Work, layout: MegatronLayout | None, gpu: Gpu) -> Plan:
    return count(arch, work, gpu) if layout is None else plan_megatron(arch, work, layout, gpu)


def _show(
    found: Plan, work: Work, gpu: str, layout: MegatronLayout | None, enough: int | None
) -> None:
    cut = "FSDP2" if layout is None else f"Megatron, {layout}"
    out.print(
        f"[bold]{found.parameters / GB:.2f} billion parameters[/bold], {work.ranks} x {gpu}, "
        f"{work.sequence} tokens a sequence, {cut}"
    )
    rows: list[dict[str, Any]] = [
        {"of a rank": kind, "GB": round(size / GB, 2)} for kind, size in found.memory.items()
    ]
    rows.append({"of a rank": "together", "GB": round(found.needed / GB, 2)})
    rows.append({"of a rank": "there is", "GB": round(found.available / GB, 2)})
    out.print(table_of(rows))
    sent = ", ".join(f"{kind} {size / GB:.3g}" for kind, size in found.traffic.items() if size)
    out.print(f"a rank sends in an iteration, in GB: {sent or 'nothing'}")
    out.print(
        f"training an iteration: {found.seconds:.3g} s ({found.compute_s:.3g} s computing, "
        f"{found.traffic_s:.3g} s of traffic beside it"
        + (f", {found.waiting_s:.3g} s of traffic that it waits for)" if found.waiting_s else ")")
    )
    if not found.fits:
        out.print(f"[bold red]does not fit[/bold red]: {_advice(work, layout, enough)}")


def _advice(work: Work, layout: MegatronLayout | None, enough: int | None) -> str:
    """What would make it fit."""
    ways = [f"{enough} ranks"] if enough else []
    if layout is None and not work.recomputes:
        ways.append("train.gradient_checkpointing = true")
    if layout is not None and layout.recompute_granularity != "full":
        ways.append("--recompute full")
    if layout is not None:
        ways.append("more tensor, pipeline or expert parallel ranks")
    if not work.offloads:
        ways.append("train.optimizer_cpu_offload = true")
    more = "" if enough else "; more ranks alone do not"
    return f"{', '.join(ways)}, or a lower train.max_tokens_per_gpu would help{more}"
