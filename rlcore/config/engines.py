"""What the settings of engines need of each other: GPUs, sizes, arguments of SGLang's server.

Invariant: an engine of SGLang has all of its GPUs in one tensor-parallel group, or in one for each
stage of a pipeline. Data parallelism (of attention) and expert parallelism are within that group.
Replicas of a model are engines of their own.
"""

from typing import TYPE_CHECKING

from rlcore.config.secrets import names_a_secret

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig

OWN_ARGUMENTS = {
    "model_path": "model.path",
    "model": "model.path",
    "host": "",
    "port": "",
    "tp_size": "cluster.rollout_num_gpus_per_engine",
    "tensor_parallel_size": "cluster.rollout_num_gpus_per_engine",
    "dtype": "",
    "context_length": "rollout.context_length",
    "max_running_requests": "rollout.max_running_requests",
    "weight_version": "",
    "nnodes": "",
    "node_rank": "",
    "dist_init_addr": "",
    "nccl_init_addr": "",
    "base_gpu_id": "",
    "gpu_id_step": "",
    "tokenizer_worker_num": "",
    "config": "",
}
"""Arguments of SGLang's server that a run sets by itself, and the settings that they follow."""
LONG_NAMES = {
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "ep": "ep_size",
}
"""Other names of sizes that count here."""


def check_engines(config: "RunConfig") -> None:
    """The engines' settings agree.

    Raises:
        ValueError: naming the settings.
    """
    if secret := next(filter(names_a_secret, config.sglang), None):
        raise ValueError(
            f"sglang.{secret} is a secret, and a configuration is stored and shown as it is; "
            "engines of a run ask nobody for one (docs/security.md): remove it"
        )
    if config.rollout.engine == "embedded" and config.sglang:
        raise ValueError(
            f"sglang.{next(iter(config.sglang))} is set but rollout.engine = 'embedded'; "
            "set rollout.engine = 'sglang' or remove it"
        )
    total, each = config.cluster.rollout_num_gpus, config.cluster.rollout_num_gpus_per_engine
    if total % each:
        raise ValueError(
            f"cluster.rollout_num_gpus = {total} is no multiple of "
            f"cluster.rollout_num_gpus_per_engine = {each}"
        )
    if config.rollout.engine == "embedded" and each > 1:
        raise ValueError(
            f"cluster.rollout_num_gpus_per_engine = {each} cuts an engine over GPUs, which "
            "rollout.engine = 'embedded' does not; leave it at 1, and set cluster.rollout_num_gpus "
            "to the number of engines"
        )
    if config.rollout.engine_urls:
        _check_external(config)
    _check_count(config)
    if config.rollout.engine == "sglang":
        _check_arguments(config)
        _check_draft(config)
        tensor_parallel(config)


def tensor_parallel(config: "RunConfig") -> int:
    """GPUs over which a layer of an engine of SGLang is cut.

    Raises:
        ValueError: its sizes do not go together.
    """
    each = config.cluster.rollout_num_gpus_per_engine
    sizes = {name: _size(config, name) for name in ("pp_size", "dp_size", "ep_size")}
    whole = f"cluster.rollout_num_gpus_per_engine = {each}"
    if each % sizes["pp_size"]:
        raise ValueError(
            f"sglang.pp_size = {sizes['pp_size']} does not divide {whole}: an engine has "
            "tensor-parallel size x pipeline-parallel size GPUs"
        )
    group = each // sizes["pp_size"]
    if sizes["pp_size"] > 1 and config.trains and config.weights.transport != "disk":
        raise ValueError(
            f"sglang.pp_size = {sizes['pp_size']} with weights.transport = "
            f"{config.weights.transport!r}: weights reach the first stage alone; use 'disk'"
        )
    if sizes["dp_size"] > 1 and not config.sglang.get("enable_dp_attention"):
        raise ValueError(
            f"sglang.dp_size = {sizes['dp_size']} makes copies of the model within an engine; for "
            "these raise cluster.rollout_num_gpus, which makes more engines, or set "
            "sglang.enable_dp_attention = true for data-parallel attention"
        )
    for name in ("dp_size", "ep_size"):
        if group % sizes[name]:
            raise ValueError(
                f"sglang.{name} = {sizes[name]} does not divide the {group} GPUs over which a "
                f"layer is cut ({whole}, sglang.pp_size = {sizes['pp_size']})"
            )
    return group


def _size(config: "RunConfig", name: str) -> int:
    for key, value in config.sglang.items():
        plain = key.replace("-", "_")
        if LONG_NAMES.get(plain, plain) != name:
            continue
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"sglang.{key} = {value!r}: it is a number of GPUs, 1 or more")
        return value
    return 1


def _check_count(config: "RunConfig") -> None:
    cluster, count = config.cluster, config.num_engines
    used = count * cluster.rollout_num_gpus_per_engine
    if used != cluster.rollout_num_gpus:
        urls = config.rollout.engine_urls
        said = f"rollout.engine_urls has {count}" if urls else f"rollout.num_engines = {count}"
        raise ValueError(
            f"{said} engines, which with cluster.rollout_num_gpus_per_engine = "
            f"{cluster.rollout_num_gpus_per_engine} have {used} GPUs, but cluster.rollout_num_gpus "
            f"= {cluster.rollout_num_gpus}, by which tokens a GPU are counted; set that to {used}"
        )


def _check_external(config: "RunConfig") -> None:
    urls, rollout = config.rollout.engine_urls, config.rollout
    if len(set(urls)) != len(urls):
        raise ValueError(f"rollout.engine_urls names an engine twice: {', '.join(urls)}")
    for name, value in (
        ("rollout.num_engines", rollout.num_engines),
        ("rollout.max_running_requests", rollout.max_running_requests),
        ("cluster.colocate", config.cluster.colocate),
        *((f"sglang.{key}", True) for key in config.sglang),
    ):
        if value:
            raise ValueError(
                f"{name} is about engines that the run starts itself, and rollout.engine_urls "
                "names ones that run already; remove it"
            )
    if not config.trains and config.generates:
        raise ValueError(
            f"rollout.engine_urls with run.mode = {config.run.mode!r}: no trainer gives those "
            "engines the starting model; let the run start its engines"
        )


def _check_draft(config: "RunConfig") -> None:
    given = {name.replace("-", "_"): value for name, value in config.sglang.items()}
    algorithm, transport = given.get("speculative_algorithm"), config.weights.transport
    if algorithm and config.trains and transport in ("disk", "delta"):
        raise ValueError(
            f"sglang.speculative_algorithm = {algorithm!r} with weights.transport = "
            f"{transport!r}: SGLang would read the draft model's weights from the policy's folder "
            "as well; use 'tensor' or 'distributed'"
        )


def _check_arguments(config: "RunConfig") -> None:
    seen: dict[str, str] = {}
    for name in config.sglang:
        argument = name.replace("-", "_")
        other = seen.setdefault(argument, name)
        if other != name:
            raise ValueError(f"sglang.{other} and sglang.{name} are one argument; remove one")
        setting = OWN_ARGUMENTS.get(argument)
        if setting is not None:
            advice = f"set {setting} instead" if setting else "remove it"
            raise ValueError(f"sglang.{name} is set by the run itself; {advice}")
