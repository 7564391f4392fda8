"""The contract of each kind of custom function, tried on small inputs of the kinds that runs meet.

A function that passes may still be wrong about what it is for; one that fails would stop a run, or
cost samples in it.
"""

import asyncio
import inspect
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config.tree import DataConfig, FilterConfig, RewardConfig, RolloutConfig
from rlcore.data import load_dataset
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.errors import PluginError, SluiceError
from rlcore.net import free_port
from rlcore.plugins import (
    BY_NAME,
    NAMED,
    PARAMETERS,
    TRAINING,
    Kind,
    check_signature,
    is_async,
    load_function,
)
from rlcore.rollout.filters.rules import make_rule
from rlcore.rollout.generate import Generator
from rlcore.rollout.limits import Limits
from rlcore.rollout.own_source import OwnSource, SourceArgs
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.rewards import Scorer
from rlcore.sample import Sample, Status
from rlcore.slime.compat import state as slime
from rlcore.store.files import file_ref
from rlcore.train.custom_check import try_training

SETTING = "the function"
TIMEOUT_S = 10.0
ENGINE_START_S = 120.0
RESPONSE_LEN = 8
SLIME_NAMES = {"data_buffer": "data_source", "group": "samples", "all_samples": "all_groups"}
"""Other names that slime's own functions have for parameters."""
Build = Callable[[Path, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried."""

    what: str
    problem: str | None = None
    """None: it is as it should be."""


def kind_of(spec: str) -> Kind:
    """What a function is for, by the names of its parameters.

    Raises:
        PluginError: it cannot be loaded, or its parameters do not tell.
    """
    function = load_function(spec, SETTING)
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = ()
    if slime.current() is not None:
        names = tuple(SLIME_NAMES.get(name, name) for name in names)
    fitting = [
        kind
        for kind, wanted in PARAMETERS.items()
        # One that takes args alone may be meant for anything.
        if kind != "megatron_init" and (kind == "data_source") == isinstance(function, type)
        if (set(wanted[1:]) <= set(names) if kind in BY_NAME else names[: len(wanted)] == wanted)
    ]
    # What begins as another does is the longer one: generate takes all that a reward takes.
    longest = max((len(PARAMETERS[kind]) for kind in fitting), default=0)
    fitting = [kind for kind in fitting if len(PARAMETERS[kind]) == longest]
    if slime.current() is not None and "batched_reward" in fitting and "filter" in fitting:
        # slime awaits its rewards and never its filters.
        fitting = ["batched_reward" if is_async(function) else "filter"]
    if "sample_hook" in fitting:
        # What a hook may be told beside is all that sets it apart from a reward.
        other = set(names).isdisjoint(NAMED["sample_hook"])
        fitting = [kind for kind in fitting if (kind == "sample_hook") != other]
    if len(fitting) != 1:
        kinds = ", ".join(fitting or PARAMETERS)
        raise PluginError(
            f"{spec}: its parameters ({', '.join(names)}) do not tell what it is for; "
            f"say which with --kind: {kinds}"
        )
    return fitting[0]


def check_plugin(
    spec: str, kind: Kind, *, reward_key: str | None = None, model: Path | None = None
) -> list[Finding]:
    """Try a custom function on what its kind meets in a run.

    Args:
        spec: `module:function` or an absolute `file.py:function`.
        kind: what it is for.
        reward_key: of a reward function that returns a dict.
        model: Hugging Face folder for a generate function, a sample hook or a source; needed for
            those alone.

    Raises:
        PluginError: it cannot be loaded, or cannot be called as its kind is.
    """
    check_signature(load_function(spec, SETTING), kind, spec)
    match kind:
        case "reward" | "batched_reward":
            return check_reward(spec, batched=kind == "batched_reward", reward_key=reward_key)
        case "filter":
            return list(check_filter(spec, reward_key))
        case "generate" | "group_generate" | "sample_hook":
            if model is None:
                raise PluginError(f"{spec}: a {kind} function is tried with a model; name one")
            return check_generate(spec, model, kind)
        case "data_source":
            if model is None:
                raise PluginError(f"{spec}: a source is tried with a tokenizer; name a model")
            return list(check_source(spec, model))
        case "build":
            return list(check_build(load_function(spec, SETTING)))
        case _ if kind in TRAINING.values():
            return [Finding(what, problem) for what, problem in try_training(spec, kind)]
        case _:
            return [Finding("its parameters")]


# --- reward ---------------------------------------------------------------------------------------


def reward_cases() -> dict[str, Sample]:
    """Samples of the kinds that a reward function meets, by what is special about them."""
    texts = {
        "a right answer": ("So it is 42.", "42"),
        "a wrong answer": ("So it is 41.", "42"),
        "an empty response": ("", "42"),
        "a response that is not ASCII": ("∑ ≤ ½ 四十二 \U0001f9ee \u202e", "42"),
        "a long response": ("(" * 20_000 + "42", "42"),
        "a label that is a number": ("So it is 42.", 42),
        "no label": ("So it is 42.", None),
    }
    cases = {
        what: Sample(
            group_index=k // 2,
            index=k,
            prompt_id=f"case-{k}",
            prompt="What is 6 x 7?",
            tokens=[1, 2, 3],
            response=response,
            response_length=2,
            label=label,
            status=Status.COMPLETED,
        )
        for k, (what, (response, label)) in enumerate(texts.items())
    }
    cut = deepcopy(cases["a right answer"])
    cut.index, cut.group_index, cut.status = len(cases), len(cases) // 2, Status.TRUNCATED
    return cases | {"a response that was cut off": cut}


def check_reward(spec: str, *, batched: bool, reward_key: str | None) -> list[Finding]:
    """A number for each case, and the same one again."""
    config = RewardConfig(
        custom_rm_path=spec,
        batched=batched,
        reward_key=reward_key,
        timeout_s=TIMEOUT_S,
        max_failed=1.0,
    )
    cases, scorer = reward_cases(), Scorer(config)
    try:
        first, again = (scorer.score_now(deepcopy(list(cases.values()))) for _ in range(2))
    finally:
        scorer.close()
    found = [Finding(what, score.error) for what, score in zip(cases, first, strict=True)]
    pairs = zip(cases, first, again, strict=True)
    other = [f"{what} ({a.reward}, then {b.reward})" for what, a, b in pairs if a != b]
    problem = "another answer for the same sample, so a repeated stage would score otherwise: "
    return [*found, Finding("the same again", problem + "; ".join(other) if other else None)]


# --- filter ---------------------------------------------------------------------------------------


def check_filter(spec: str, reward_key: str | None) -> Iterator[Finding]:
    """A verdict on each kind of group, and the same one again."""
    settings = {"reward_key": reward_key, "n_samples_per_prompt": 4}
    rule = make_rule(FilterConfig(dynamic_sampling_filter_path=spec), settings)
    for what, rewards in (
        ("a group with both rewards", [0.0, 1.0, 1.0, 0.0]),
        ("a group that is always right", [1.0] * 4),
        ("a group that is never right", [0.0] * 4),
        ("a group with rewards below 0", [-1.0, -0.5, 0.25, -3.0]),
        ("a group of two, where others failed", [0.0, 1.0]),
    ):
        group = [
            Sample(group_index=0, index=k, prompt_id="p", reward=r, status=Status.COMPLETED)
            for k, r in enumerate(rewards)
        ]
        try:
            verdicts = [rule.decide(rewards, deepcopy(group)) for _ in range(2)]
        except PluginError as error:
            yield Finding(what, str(error))
            continue
        same = verdicts[0] == verdicts[1]
        yield Finding(what, None if same else f"{verdicts[0]}, then {verdicts[1]}")


# --- generate -------------------------------------------------------------------------------------


def check_generate(spec: str, model: Path, kind: Kind) -> list[Finding]:
    """A whole sample from a real engine, the same one from the same seed, in an evaluation too.

    A sample hook is given what a plain request made.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-check-") as folder:
        port = free_port()
        engine = EngineProcess(port)
        engine.start(embedded_argv(model, port), Path(folder) / "engine.log")
        try:
            engine.wait_healthy(ENGINE_START_S)
            return asyncio.run(_generated(spec, model, engine.url, kind))
        finally:
            engine.stop()


async def _generated(spec: str, model: Path, url: str, kind: Kind) -> list[Finding]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    is_hook = kind == "sample_hook"
    config = RolloutConfig(
        custom_generate_function_path=None if is_hook else spec,
        sample_hook_paths=[spec] if is_hook else [],
        group_generate=kind == "group_generate",
        max_response_len=RESPONSE_LEN,
        n_samples_per_prompt=2,
    )
    pool = EnginePool([url], Limits.of_model(str(model), None), retries=0, timeout_s=TIMEOUT_S)
    found, made = [], []
    try:
        for what, evaluation in (
            ("two samples", False),
            ("the same again", False),
            ("an evaluation", True),
        ):
            generator = Generator(config, tokenizer, pool, evaluation=evaluation)
            try:
                made.append(await generator.run(_pending(tokenizer), 2, None))
            except SluiceError as error:
                found.append(Finding(what, str(error)))
                return found
            found.append(Finding(what))
    finally:
        await pool.close()
    first, again = ([(s.tokens, s.loss_mask, s.reward) for s in one] for one in made[:2])
    if first != again:
        problem = (
            "another sample from the same seed, so a run that is resumed generates otherwise; use "
            "the sampling_params it is given, which hold the seed"
        )
        found[1] = Finding("the same again", problem)
    return found


def _pending(tokenizer: Any) -> list[Sample]:
    text = "2="
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [
        Sample(group_index=0, index=k, prompt_id="p", prompt=text, tokens=list(ids), seed=k)
        for k in range(2)
    ]


# --- source ---------------------------------------------------------------------------------------


def check_source(spec: str, model: Path) -> Iterator[Finding]:
    """Groups of pending samples, the same from the start, and from a state what follows it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    with tempfile.TemporaryDirectory(prefix="sluice-check-") as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_text("".join(f'{{"prompt": "{k}+{k}="}}\n' for k in range(12)))
        data = DataConfig(path=str(path))
        config = RolloutConfig(n_samples_per_prompt=2, data_source_path=spec)
        args = SourceArgs(config, data, load_dataset(data, lambda: tokenizer), tokenizer, 0)
        try:
            source = OwnSource(spec, args)
            first, state = _asked(source), source.state()
            yield Finding("groups, and a state")
            again = _asked(OwnSource(spec, args)) == first
            other = "other prompts from the same start, so a rollout that is done again differs"
            yield Finding("the same again", None if again else other)
            follows = _asked(OwnSource(spec, args, state)) == _asked(source)
            other = "from its own state it goes on with other prompts than without a stop"
            yield Finding("going on from its state", None if follows else other)
        except PluginError as error:
            yield Finding("groups, and a state", str(error))


def _asked(source: OwnSource) -> list[list[int]]:
    return [sample.tokens for n in (3, 2) for group in source.take(n) for sample in group]


# --- build ----------------------------------------------------------------------------------------


def check_build(build: Build) -> Iterator[Finding]:
    """A Hugging Face folder, and the same bytes from the same seed."""
    with tempfile.TemporaryDirectory(prefix="sluice-check-") as folder:
        digests = []
        for name in ("once", "again"):
            made = Path(folder) / name
            made.mkdir()
            try:
                build(made, 0)
            except Exception as error:
                # A custom function may raise anything; all of it is its own fault.
                yield Finding("a model folder", f"it raised {type(error).__name__}: {error}")
                return
            missing = [n for n in ("config.json", "*.safetensors") if not list(made.glob(n))]
            if name == "once":
                lacks = f"it wrote no {' and no '.join(missing)}" if missing else None
                yield Finding("a model folder", lacks)
            files = [path for path in sorted(made.rglob("*")) if path.is_file()]
            digests.append({path.name: file_ref(path, path.name).sha256 for path in files})
        other = [n for n in digests[0] if digests[0][n] != digests[1].get(n)]
        problem = f"other bytes from the same seed in {', '.join(other)}" if other else None
        yield Finding("the same again", problem)
