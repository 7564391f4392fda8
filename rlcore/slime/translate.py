"""From a launch line of slime to a configuration."""

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.config.ahead import AGAINST_STALENESS, AHEAD
from rlcore.config.algorithm import OF_A_PART
from rlcore.config.engines import OWN_ARGUMENTS
from rlcore.config.load import put
from rlcore.config.section import Scalar
from rlcore.config.tree import WITHOUT_ENGINES
from rlcore.errors import ConfigError
from rlcore.slime.architecture import match_architecture
from rlcore.slime.convert import BUILT_IN_FILTERS, LOSSES
from rlcore.slime.megatron import (
    BALANCING,
    BALANCING_TYPE,
    CONTEXT,
    LAID_OUT,
    OPTIONS,
    RUN_LENGTH,
    SEQUENCE,
    setting,
)
from rlcore.slime.rules import Argument, Held, Refused, Setting
from rlcore.slime.table import BY_NAME
from rlcore.train.megatron.table import BALANCING as BALANCING_LOSSES

PASSED_ON = "sglang-"
ROUTER = "router-"
EVAL_SETTINGS = (
    "eval-input-key",
    "eval-label-key",
    "eval-tool-key",
    "eval-top-k",
    "eval-max-prompt-len",
    "eval-min-new-tokens",
)
"""Arguments that are settings of each evaluation set, of the same name."""
BUILT_IN_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
BUILT_IN_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
ASYNC_SCRIPT = "train_async.py"
SCRIPTS = ("train.py", ASYNC_SCRIPT)
PLUGINS = (
    "buffer-filter-path",
    "custom-advantage-function-path",
    "custom-generate-function-path",
    "custom-loss-function-path",
    "custom-pg-loss-reducer-function-path",
    "custom-reward-post-process-path",
    "custom-rm-path",
    "custom-tis-function-path",
    "data-source-path",
    "dynamic-sampling-filter-path",
    "eval-function-path",
    "rollout-all-samples-process-path",
    "rollout-function-path",
    "rollout-sample-filter-path",
    "rollout-sample-hook-path",
)
"""Arguments that name functions, which are written for slime unless they are built in."""
READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "json": json.loads,
    "ints": int,
    "strs": str,
    "again": str,
}
Tree = dict[str, Any]


@dataclass
class Translation:
    """What a launch line comes to.

    Attributes:
        tree: the configuration, as a TOML file would hold it.
        notes: what is so here anyway, by argument as it was given.
    """

    tree: Tree = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)


def translate(tokens: Sequence[str]) -> Translation:
    """The configuration that a launch line of slime asks for.

    Args:
        tokens: all that follows `train.py`, as a shell splits it; or with it, or with
            `train_async.py`, before them.

    Raises:
        ConfigError: naming each argument that has no place here, is unknown, or lacks a value.
    """
    done = Translation()
    given: dict[str, Any] = {}
    wrong: list[str] = []
    if tokens and tokens[0].rpartition("/")[2] in SCRIPTS:
        given[tokens[0].rpartition("/")[2]], tokens = True, tokens[1:]
    for argument, value, text in read(tokens, wrong):
        if argument.takes == "again":
            value = [*given.get(argument.name, ()), value]
        given[argument.name] = value
        rule = argument.rule
        if isinstance(rule, Refused):
            wrong.append(f"{text}: {rule.why}")
        elif isinstance(rule, Held):
            if rule.only and value not in rule.only:
                allowed = " or ".join(map(str, rule.only))
                wrong.append(f"{text}: only {allowed} is possible: {rule.why}")
            else:
                done.notes.append((text, rule.why))
        elif isinstance(rule, Setting):
            try:
                put(done.tree, rule.key.split("."), rule.convert(value))
            except ConfigError as error:
                wrong.append(str(error))
    try:
        join(given, done)
    except ConfigError as error:
        wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return done


# --- reading --------------------------------------------------------------------------------------


def read(tokens: Sequence[str], wrong: list[str]) -> Iterator[tuple[Argument, Any, str]]:
    """Each argument with its value and its text; what cannot be read goes to `wrong`."""
    rest = list(tokens)
    while rest:
        head, *rest = rest
        if not head.startswith("--"):
            wrong.append(f"{head!r} belongs to no argument")
            continue
        name, equals, inline = head.removeprefix("--").partition("=")
        words = [inline] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        text = " ".join([f"--{name}", *words])
        argument, value = _argument(name), True
        if argument is None:
            wrong.append(f"--{name}: slime has no such argument{_nearest(name)}")
            continue
        try:
            value = _value(argument, name, words)
        except (ValueError, ConfigError) as error:
            wrong.append(f"{text}: {error}")
            continue
        yield argument, value, text


def _argument(name: str) -> Argument | None:
    known = BY_NAME.get(name) or OPTIONS.get(name)
    if known is None and name.startswith("no-"):
        known = BY_NAME.get(name.removeprefix("no-"))
        return known if known is not None and known.takes == "switch" else None
    if known is None and name.startswith(PASSED_ON):
        option = name.removeprefix(PASSED_ON).replace("-", "_")
        key = OWN_ARGUMENTS.get(option, f"sglang.{option}")
        rule = Setting(key, _of_sglang) if key else Refused("a run sets it by itself")
        return Argument(name, "strs", rule)
    if known is None and name.startswith(ROUTER):
        return Argument(name, "strs", Refused("requests go to the engines; there is no router"))
    return known


def _value(argument: Argument, name: str, words: list[str]) -> Any:
    if argument.takes in ("flag", "switch"):
        if words:
            raise ConfigError("it takes no value")
        return not name.startswith("no-")
    if argument.takes in ("ints", "strs"):
        return [READ[argument.takes](word) for word in words]
    if len(words) != 1:
        raise ConfigError(f"it takes one value, not {len(words)}")
    return READ[argument.takes](words[0])


def _of_sglang(words: list[str]) -> Scalar | list[Scalar]:
    """The value of an option of SGLang, or several; one without a word is a flag."""
    values = [_scalar(word) for word in words]
    return values if len(values) > 1 else values[0] if values else True


def _scalar(word: str) -> Scalar:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, [*BY_NAME, *OPTIONS], n=1)
    return f"; did you mean --{near[0]}?" if near else ""


# --- what several arguments say together ----------------------------------------------------------


def join(given: dict[str, Any], done: Translation) -> None:
    """Settings that need more than one argument, and slime's defaults where ours are others."""
    for name in ("hf-checkpoint", "prompt-data", "num-rollout", "rollout-batch-size"):
        if name not in given:
            raise ConfigError(f"--{name} is missing")
    preset = match_architecture(given, Path(given["hf-checkpoint"]))
    if preset is not None:
        _set(done, "model.preset", preset)
    _mode(given, done)
    if "rollout-max-response-len" not in given and _generates(done):
        raise ConfigError("--rollout-max-response-len is missing: slime has no default for it")
    _defaults(given, done)
    _batches(given, done)
    _backend(given, done)
    _cluster(given, done)
    _store(given, done)
    _functions(given, done)
    _algorithm(given, done)
    _evaluation(given, done)
    _without_use(done)


def _mode(given: dict[str, Any], done: Translation) -> None:
    if "debug-rollout-only" in given and "debug-train-only" in given:
        raise ConfigError("--debug-rollout-only and --debug-train-only leave nothing to do")
    learns = given.get("rollout-function-path") == SFT_ROLLOUT
    if learns != (given.get("loss-type") == "sft_loss"):
        raise ConfigError(
            f"--rollout-function-path {SFT_ROLLOUT} and --loss-type sft_loss belong together: "
            "give both or neither"
        )
    if "disable-compute-advantages-and-returns" in given and not learns:
        raise ConfigError("--disable-compute-advantages-and-returns: the policy loss needs them")
    every = given.get("update-weights-interval", 1)
    if every != 1 and ASYNC_SCRIPT not in given:
        raise ConfigError(
            f"--update-weights-interval {every}: train.py syncs after every iteration, as "
            f"run.mode = 'sync' does; for run.mode = 'async' begin the line with {ASYNC_SCRIPT}"
        )
    endless = given.get("rollout-function-path") == FULLY_ASYNC
    if endless and ASYNC_SCRIPT not in given:
        raise ConfigError(
            f"--rollout-function-path {FULLY_ASYNC} is for {ASYNC_SCRIPT}: train.py waits for each "
            "rollout; begin the line with that"
        )
    if learns:
        _set(done, "run.mode", "sft")
    elif "load-debug-rollout-data" in given:
        _set(done, "run.mode", "debug-train-only")
    elif "debug-train-only" in given:
        raise ConfigError(
            "--debug-train-only: name the stored run to train on by --load-debug-rollout-data RUN, "
            f"or learn a data set by --rollout-function-path {SFT_ROLLOUT}"
        )
    elif ASYNC_SCRIPT in given and "debug-rollout-only" not in given:
        _set(done, "run.mode", "fully-async" if endless else "async")
        _set(done, "rollout.update_weights_interval", every)
        if "use-tis" not in given and "use-rollout-logprobs" not in given:
            why = "algorithm.use_tis = true: samples are of an older policy; slime leaves it off"
            done.notes.append((ASYNC_SCRIPT, why))


def _generates(done: Translation) -> bool:
    return done.tree.get("run", {}).get("mode") not in WITHOUT_ENGINES


def _set(done: Translation, key: str, value: Any) -> None:
    put(done.tree, key.split("."), value)


def _defaults(given: dict[str, Any], done: Translation) -> None:
    legacy = given.get("train-backend") == "fsdp"
    for name, key, value in (
        ("input-key", "data.input_key", "input"),
        ("rollout-shuffle", "data.shuffle", False),
        ("rollout-seed", "run.seed", 42),
        ("n-samples-per-prompt", "rollout.n_samples_per_prompt", 1),
        ("lr", "train.lr", 2e-5 if legacy else 1e-6),
        ("lr-decay-style", "train.lr_schedule", "constant" if legacy else "linear"),
        ("weight-decay", "train.weight_decay", 0.0 if legacy else 0.01),
        ("adam-beta2", "train.adam_beta2", 0.95 if legacy else 0.999),
    ):
        if name not in given:
            _set(done, key, value)
    _set(done, "rollout.engine", "sglang")
    _set(done, "train.precision", "bfloat16")
    transport = given.get("update-weight-transport", "nccl")
    if transport not in ("nccl", "disk"):
        raise ConfigError(f"--update-weight-transport {transport}: nccl or disk")
    mode = given.get("update-weight-mode", "full")
    if mode not in ("full", "delta") or (mode == "delta" and transport != "disk"):
        raise ConfigError(
            f"--update-weight-mode {mode} --update-weight-transport {transport}: full, or delta "
            "with disk"
        )
    over_nccl = "tensor" if given.get("colocate") else "distributed"
    on_disk = "delta" if mode == "delta" else "disk"
    _set(done, "weights.transport", on_disk if transport == "disk" else over_nccl)


def _batches(given: dict[str, Any], done: Translation) -> None:
    made = given["rollout-batch-size"] * given.get("n-samples-per-prompt", 1)
    steps, size = given.get("num-steps-per-rollout"), given.get("global-batch-size")
    if size is None:
        size = made // (steps or 1)
    if steps is None:
        steps = max(1, made // size) if size else 1
    _set(done, "train.global_batch_size", size)
    _set(done, "train.num_steps_per_rollout", steps)
    begun = given.get("over-sampling-batch-size")
    if begun is None and "dynamic-sampling-filter-path" in given:
        begun = given["rollout-batch-size"]  # Dropped groups are replaced, by as many a time.
    if begun is not None:
        _set(done, "rollout.over_sampling_batch_size", begun)
    share = given.get("lr-warmup-fraction", given.get("warmup-ratio"))
    if share is not None and "lr-warmup-iters" not in given:
        _set(done, "train.lr_warmup_steps", round(share * given["num-rollout"] * steps))


def _backend(given: dict[str, Any], done: Translation) -> None:
    """Megatron where it is asked for by name; else FSDP2, whatever the layout."""
    asked = given.get("train-backend")
    _set(done, "train.backend", "megatron" if asked == "megatron" else "fsdp")
    if asked is None:
        why = "FSDP2 trains, from the same model, unless it is asked for by name"
        done.notes.append(("--train-backend megatron", why))
    tensor = given.get("tensor-model-parallel-size", 1)
    for name in LAID_OUT:
        if name not in given:
            continue
        if asked == "megatron" and name == SEQUENCE and tensor == 1:
            done.notes.append((f"--{name}", "there are no tensor-parallel ranks to share tokens"))
        elif asked == "megatron":
            _set(done, setting(name), given[name])
        elif name == CONTEXT:
            _set(done, "train.context_parallel_size", given[name])
        else:
            done.notes.append((f"--{name}", "FSDP2 shards the model over all ranks"))
    _interleaved(given, done)
    _balancing(given, done, megatron=asked == "megatron")


def _interleaved(given: dict[str, Any], done: Translation) -> None:
    """Megatron's runs of layers on a stage, by their length."""
    length, layers = given.get(RUN_LENGTH), given.get("num-layers")
    if length is None or given.get("train-backend") != "megatron":
        return
    key = "megatron.virtual_pipeline_model_parallel_size"
    stages = given.get("pipeline-model-parallel-size", 1)
    if layers is None:
        done.notes.append((f"--{RUN_LENGTH}", f"set {key}: without --num-layers it is not known"))
    else:
        _set(done, key, layers // stages // length)


def _balancing(given: dict[str, Any], done: Translation, *, megatron: bool) -> None:
    """What evens out the use of experts, which is left alone with FSDP2."""
    for name in BALANCING:
        if not given.get(name):
            continue
        if not megatron:
            raise ConfigError(
                f"--{name} {given[name]}: only 0 is possible without --train-backend megatron"
            )
        _set(done, setting(name), given[name])
    if given.get("moe-aux-loss-coeff"):
        kind = given.get(BALANCING_TYPE, "aux_loss")
        if kind not in BALANCING_LOSSES:
            raise ConfigError(f"--{BALANCING_TYPE} {kind}: there are {', '.join(BALANCING_LOSSES)}")
        _set(done, setting(BALANCING_TYPE), kind)


def _cluster(given: dict[str, Any], done: Translation) -> None:
    trainers = given.get("actor-num-nodes", 1) * given.get("actor-num-gpus-per-node", 8)
    if "actor-num-gpus-per-node" not in given:
        _set(done, "cluster.actor_num_gpus_per_node", 8)
    engines = given.get("rollout-num-gpus")
    if given.get("colocate"):
        _set(done, "cluster.colocate", True)
        for name in ("offload-train", "offload-rollout"):
            chosen = given.get(name, given.get("offload"))
            if chosen is not None:
                _set(done, f"cluster.{name.replace('-', '_')}", chosen)
        engines = engines or trainers
    if theirs := given.get("rollout-external-engine-addrs"):
        engines = engines or len(theirs) * given.get("rollout-num-gpus-per-engine", 1)
    if engines is None and _generates(done):
        raise ConfigError("--rollout-num-gpus is missing: without --colocate it has no default")
    if engines is not None:
        _set(done, "cluster.rollout_num_gpus", engines)
    host, port = (given.get(f"sglang-router-{name}") for name in ("ip", "port"))
    if (host is None) != (port is None):
        raise ConfigError(
            "--sglang-router-ip and --sglang-router-port name a router that runs already, and only "
            "one of them is there; for one that the run starts, leave both out and set "
            "rollout.use_sglang_router"
        )
    if host is not None:
        _set(done, "rollout.sglang_router_url", f"http://{host}:{port}")


def _store(given: dict[str, Any], done: Translation) -> None:
    load, save = (str(given.get(name, "")).rstrip("/") for name in ("load", "save"))
    if load and load not in (save, str(given["hf-checkpoint"]).rstrip("/")):
        raise ConfigError(
            f"--load {load}: a checkpoint of slime is not read; give the folder of --save, from "
            "which a run goes on by itself, or leave it out"
        )
    if save:
        _set(done, "storage.root", save)


def _functions(given: dict[str, Any], done: Translation) -> None:
    path = given.get("rollout-function-path", BUILT_IN_ROLLOUT)
    if path not in (BUILT_IN_ROLLOUT, SFT_ROLLOUT, FULLY_ASYNC):
        _set(done, "rollout.custom_rollout_function_path", path)
    generate = given.get("custom-generate-function-path")
    if generate == STREAMING:
        why = "a request that is cut off is answered with what it had, without streaming"
        done.notes.append((f"--custom-generate-function-path {STREAMING}", why))
    elif generate is not None:
        _set(done, "rollout.custom_generate_function_path", generate)
    if "custom-rm-path" in given:
        _set(done, "reward.custom_rm_path", given["custom-rm-path"])
        if "rm-type" in given:
            why = "--custom-rm-path comes before it, as in slime; a row's own rm_type does not"
            done.notes.append((f"--rm-type {given['rm-type']}", why))
    elif "rm-type" in given:
        _set(done, "reward.rm_type", given["rm-type"])

    source = given.get("data-source-path", BUILT_IN_SOURCE)
    if source != BUILT_IN_SOURCE:
        _set(done, "rollout.data_source_path", source)
    built_in = {BUILT_IN_ROLLOUT, SFT_ROLLOUT, FULLY_ASYNC, BUILT_IN_SOURCE, ICEPOP, STREAMING}
    built_in |= BUILT_IN_FILTERS.keys()
    named = [given[name] for name in PLUGINS if name in given]
    if any(isinstance(one, list) or one not in built_in for one in named):
        _set(done, "compat.slime", True)


def _algorithm(given: dict[str, Any], done: Translation) -> None:
    _custom_loss(given, done)
    weigh = given.get("custom-tis-function-path")
    ahead = done.tree.get("run", {}).get("mode") in AHEAD
    if weigh == ICEPOP and (ahead or given.get("use-tis")):
        _set(done, "algorithm.tis_mode", "mask")
    elif weigh not in (None, ICEPOP) and given.get("use-tis"):
        _set(done, "algorithm.custom_tis_function_path", weigh)
    elif weigh is not None:
        done.notes.append(
            (f"--custom-tis-function-path {weigh}", "without --use-tis it is not called, as there")
        )
    low = given.get("eps-clip", 0.2)
    _set(done, "algorithm.clip_low", low)
    _set(done, "algorithm.clip_high", given.get("eps-clip-high", low))
    whole = given.get("calculate-per-token-loss", False)
    _set(done, "algorithm.loss_aggregation", "token_mean" if whole else "sequence_mean")
    if given.get("use-kl-loss"):
        for name, key, value in (
            ("kl-loss-type", "algorithm.kl_loss_type", "k1"),
            ("kl-loss-coef", "algorithm.kl_loss_coef", 0.0),
        ):
            if name not in given:
                _set(done, key, value)


def _custom_loss(given: dict[str, Any], done: Translation) -> None:
    kind, path = given.get("loss-type", "policy_loss"), given.get("custom-loss-function-path")
    if kind not in (*LOSSES, "custom_loss"):
        raise ConfigError(f"--loss-type {kind}: {', '.join(LOSSES)} or custom_loss")
    if (kind == "custom_loss") != (path is not None):
        raise ConfigError(
            "--loss-type custom_loss and --custom-loss-function-path belong together: give both or "
            "neither"
        )
    if path is not None:
        _set(done, "algorithm.custom_loss_function_path", path)
    elif "loss-type" in given:
        _set(done, "algorithm.loss_type", kind)


def _evaluation(given: dict[str, Any], done: Translation) -> None:
    pairs: list[str] = given.get("eval-prompt-data", [])
    if len(pairs) == 1:
        pairs = ["aime", *pairs]
    if len(pairs) % 2:
        raise ConfigError(
            f"--eval-prompt-data {' '.join(pairs)}: it takes pairs of a name and a path"
        )
    own = given.get("eval-function-path", BUILT_IN_ROLLOUT)
    if own != BUILT_IN_ROLLOUT:
        _set(done, "eval.eval_function_path", own)
    if "eval-interval" in given:
        if not pairs and "eval-config" not in given and own == BUILT_IN_ROLLOUT:
            raise ConfigError("--eval-interval needs --eval-prompt-data or --eval-config")
        _set(done, "eval.eval_interval", given["eval-interval"])
    settings = {
        name.removeprefix("eval-").replace("-", "_"): given[name]
        for name in EVAL_SETTINGS
        if name in given
    }
    datasets = [
        {
            "name": name,
            "path": path,
            "n_samples_per_eval_prompt": given.get("n-samples-per-eval-prompt", 1),
            "temperature": given.get("eval-temperature", given.get("rollout-temperature", 1.0)),
            "top_p": given.get("eval-top-p", given.get("rollout-top-p", 1.0)),
            "max_response_len": given.get(
                "eval-max-response-len", given.get("rollout-max-response-len")
            ),
            **settings,
        }
        for name, path in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    if datasets and "eval-config" not in given:
        said = [{k: v for k, v in one.items() if v is not None} for one in datasets]
        _set(done, "eval.datasets", said)


def _without_use(done: Translation) -> None:
    """Leave out what has no effect in slime either; a configuration may not hold such settings."""
    algorithm, train = done.tree.get("algorithm", {}), done.tree["train"]
    ahead = done.tree.get("run", {}).get("mode") in AHEAD
    on = {switch for switch in OF_A_PART.values() if algorithm.get(switch)}
    if ahead and not AGAINST_STALENESS & algorithm.keys():
        on.add("use_tis")
    parts = dict(OF_A_PART)
    if not algorithm.get("kl_coef"):
        parts["kl_loss_type"] = "use_kl_loss"
    own = ("custom_advantage_function_path", "custom_loss_function_path")
    for key, switch in {} if any(algorithm.get(name) for name in own) else parts.items():
        if key in algorithm and switch not in on:
            del algorithm[key]
            done.notes.append((_option(key), f"without {_option(switch)} it has no effect"))
    if train.get("lr_schedule") == "constant" and train.pop("lr_min", None):
        done.notes.append(("--min-lr", "with --lr-decay-style constant it has no effect"))
    tracking = done.tree.get("tracking", {})
    if not tracking.get("tensorboard") and tracking.pop("tensorboard_dir", None):
        done.notes.append(("--tb-project-name", "without --use-tensorboard it has no effect"))


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"
