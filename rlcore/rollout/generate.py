"""From samples without a response to samples with one: by one plain request each, or by a custom
function.

Invariants:
- A sample's seed depends on the run, the iteration that began it, the prompt and its place in the
  group alone. So do its tokens, on an engine that is deterministic, whatever else is in the batch.
- Samples stay in their order; none is dropped. One that cannot be generated fails the whole stage.
- Where a custom function makes several samples of one, they stand in its place and share its seed
  and a `rollout_id`. All are whole: where one was cut off, the execution begins anew.
- Every engine call must have used the expected policy version.
- A sample that was cut off goes on from its tokens, with what is left of its budget; what earlier
  policies generated stays as it was. One that is finished is left alone.
"""

import asyncio
import copy
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlcore.config.tree import RolloutConfig
from rlcore.errors import DataError, EngineError, PluginError, SluiceError
from rlcore.images.files import data_uris, images_of
from rlcore.plugins import Kind, load_checked, takes
from rlcore.rollout.args import PluginArgs
from rlcore.rollout.client import GenerateRequest, GenerateResult
from rlcore.rollout.groups import identity_of, join_execution, set_identity, split_groups
from rlcore.rollout.limits import ROW_PARAMS_KEY
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.sample_hooks import SETTING as HOOKS
from rlcore.rollout.sample_hooks import SampleHooks
from rlcore.rollout.together import all_of
from rlcore.sample import FINISHED, Sample, Status
from rlcore.slime.compat import state as slime

SETTING = "rollout.custom_generate_function_path"
Params = dict[str, Any]
Ready = Callable[[Sequence[Sample]], None]
CustomGenerate = Callable[..., Awaitable[Any]]

_NUMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "tokens": ("token ids", lambda value: hasattr(value, "__index__")),
    "loss_mask": ("0 and 1", lambda value: value in (0, 1)),
    "rollout_log_probs": ("finite numbers", math.isfinite),
}
"""What the lists of a sample hold."""
OPEN = frozenset({Status.PENDING, Status.ABORTED})
"""Statuses of samples that are still to be generated, or to be gone on with."""


class GenerateArgs(PluginArgs):
    """`args` of a custom generate function.

    Every setting of the section `rollout` is an attribute (`args.max_response_len`), and beside
    them:

    Attributes:
        tokenizer: of the model.
        pool: the engines; `await args.pool.generate([GenerateRequest(ids, params), ...])`.
        limits: vocabulary and context of the model.
    """

    def __init__(self, config: RolloutConfig, tokenizer: Any, pool: EnginePool) -> None:
        own = {"tokenizer": tokenizer, "pool": pool, "limits": pool.limits}
        super().__init__(config.model_dump() | own)
        slime.serve(pool, tokenizer)

    async def generate(
        self, input_ids: list[int], sampling_params: Params, images: Sequence[str] = ()
    ) -> GenerateResult:
        """One request to an engine; failures are retried as the settings say.

        `images` are those of the prompt: `sample_images(sample)`.
        """
        routed = self.use_rollout_routing_replay
        request = GenerateRequest(input_ids, sampling_params, images=images, routed_experts=routed)
        [result] = await self.pool.generate([request])
        return result


def sample_images(sample: Sample) -> list[str]:
    """The images of a sample's prompt, as engines take them.

    Raises:
        DataError: one is broken, or was not read.
    """
    return data_uris(images_of(sample.multimodal_inputs))


def sample_seed(run_seed: int, scope: str, prompt_id: str, index_in_group: int) -> int:
    """A 31-bit sampling seed.

    Args:
        run_seed: of the run.
        scope: what sets this generation apart, such as the iteration.
        prompt_id: of the sample.
        index_in_group: of the sample.
    """
    text = f"sluice-sample:{run_seed}:{scope}:{prompt_id}:{index_in_group}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def sampling_params(config: RolloutConfig) -> Params:
    """The sampling parameters that all samples of a rollout share, by SGLang's names."""
    params: Params = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "skip_special_tokens": config.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if config.stop:
        params["stop"] = list(config.stop)
    if config.stop_token_ids:
        params["stop_token_ids"] = list(config.stop_token_ids)
    return params


class Generator:
    """Fills in responses.

    Args:
        config: the rollout section.
        tokenizer: of the model; handed to a custom function.
        pool: the engines.
        iteration: told to a sample hook that has a parameter `rollout_id`.
        evaluation: told to a custom function that has a parameter of this name.
        more: sampling parameters beside those of the section.

    Raises:
        PluginError: the custom function cannot be loaded or called.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Any,
        pool: EnginePool,
        *,
        iteration: int = 0,
        evaluation: bool = False,
        more: Params | None = None,
    ) -> None:
        self.pool = pool
        self._config = config
        self.tokenizer = tokenizer
        self._room = asyncio.Semaphore(pool.total_concurrency)
        self._params = sampling_params(config) | (more or {})
        self._args = GenerateArgs(config, tokenizer, pool)
        self._evaluation = evaluation
        self._hooks = SampleHooks(config.sample_hook_paths, iteration, evaluation=evaluation)
        self._functions: dict[tuple[str, Kind], CustomGenerate] = {}
        self._path = config.custom_generate_function_path
        if self._path is not None:
            self._function(self._path, "group_generate" if config.group_generate else "generate")

    async def run(
        self,
        samples: Sequence[Sample],
        group: int,
        version: str | None,
        ready: Ready | None = None,
    ) -> list[Sample]:
        """Generate for samples whose `tokens` hold the prompt and whose `seed` is set.

        Args:
            samples: pending or cut off; finished ones are given back as they are.
            group: neighbours that share a prompt.
            version: policy version that every engine call must report; None: any.
            ready: is given samples in their order, each once, as soon as they are done while
                others are not; those that it was not given are done at the end.

        Returns:
            The samples in their order, or in place of one the several that its execution made.
            While the pool ends all requests some may still be pending or cut off.

        Raises:
            EngineError: an engine call failed on every attempt, or used another policy.
            PluginError: the custom function failed.
        """
        slime.serve(self.pool, self.tokenizer)
        if not self.pool.goes_on:
            self.pool.version = version
        were_open = {k for k, sample in enumerate(samples) if sample.status in OPEN}
        for sample in samples:
            if sample.status in OPEN and sample.response_length and self._budget(sample) < 1:
                sample.status = Status.TRUNCATED
        todo = {k: sample for k, sample in enumerate(samples) if sample.status in OPEN}
        before = [list(sample.weight_versions) for sample in todo.values()]
        if self._path is None and not any(s.generate_function_path for s in todo.values()):
            told = ready if len(todo) == len(samples) and not self._hooks else None
            made = [[s] for s in await self._plain(list(todo.values()), group, told)]
        else:
            made = await self._customized(list(todo.values()))
        for execution, earlier in zip(made, before, strict=True):
            for sample in execution:
                _check_version(sample, earlier, version, self.pool)
        what = f"{SETTING} = {self._path!r}" if self._path else "a row's generate function"
        check_distinct([s for execution in made for s in execution], what)
        parts = dict(zip(todo, made, strict=True))
        done = [(k, s) for k, sample in enumerate(samples) for s in parts.get(k, [sample])]
        if not self._hooks:
            return [sample for _, sample in done]
        hooked = await all_of(self._hooked(sample, k in were_open) for k, sample in done)
        check_distinct(hooked, HOOKS)
        return hooked

    async def _hooked(self, sample: Sample, was_open: bool) -> Sample:
        """A sample after the hooks, if it has become whole."""
        if not was_open or sample.status in OPEN:
            return sample
        identity = identity_of(sample)
        async with self._room:
            made = await self._hooks(self._args, sample)
        set_identity(made, identity)
        check_made(made, HOOKS, self.pool.limits.vocab_size)
        return made

    def _budget(self, sample: Sample) -> int:
        """Tokens that a sample may still get; may be negative."""
        own = sample.metadata.get(ROW_PARAMS_KEY, {}).get("max_new_tokens")
        longest = self._config.max_response_len
        left = (longest if own is None else min(own, longest)) - sample.response_length
        return self.pool.limits.response_budget(len(sample.tokens), left)

    def _own_params(self, sample: Sample) -> Params:
        budget = self._budget(sample)
        if budget < 1:
            raise DataError(
                f"prompt {sample.prompt_id} has {len(sample.tokens)} tokens and leaves no room for "
                f"a response in the context of {self.pool.limits.context_length}; set "
                "data.max_prompt_len, or raise rollout.context_length"
            )
        own = {"max_new_tokens": budget, "sampling_seed": sample.seed}
        return self._params | sample.metadata.get(ROW_PARAMS_KEY, {}) | own

    async def _plain(self, samples: list[Sample], group: int, ready: Ready | None) -> list[Sample]:
        requests = [
            GenerateRequest(
                s.tokens,
                self._own_params(s),
                images=sample_images(s),
                routed_experts=self._config.use_rollout_routing_replay and not self._evaluation,
            )
            for s in samples
        ]
        ends: dict[int, int] = {}
        told = 0

        def done(start: int, results: list[GenerateResult]) -> None:
            nonlocal told
            for sample, result in zip(samples[start:], results, strict=False):
                self._apply(sample, result)
            ends[start] = start + len(results)
            while told in ends:
                start, told = told, ends[told]
                if ready is not None:
                    ready(samples[start:told])

        await self.pool.generate(requests, group=group, done=done)
        return samples

    def _apply(self, sample: Sample, result: GenerateResult) -> None:
        goes_on = sample.response_length > 0
        apply_result(sample, result)
        if goes_on:
            # A character may lie on both sides of the cut.
            sample.response = self.tokenizer.decode(
                sample.response_tokens, skip_special_tokens=self._config.skip_special_tokens
            )

    async def _customized(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """What each sample's own function, the run's, or a plain request makes of it."""

        async def one(part: list[Sample]) -> list[list[Sample]]:
            async with self._room:
                if self.pool.aborting:
                    return [[sample] for sample in part]
                if part[0].generate_function_path is None and self._path is None:
                    return [await self._plain(part, 1, None)]
                return await self._call(part)

        parts = [[sample] for sample in samples]
        if self._config.group_generate:
            own = (s.generate_function_path for s in samples)
            if found := next((path for path in own if path), None):
                raise DataError(
                    f"a row names a generate function of its own, {found!r}, which takes one "
                    "sample, but rollout.group_generate = true; use one of them"
                )
            parts = split_groups(samples)
        made = await all_of(one(part) for part in parts)
        return [execution for part in made for execution in part]

    async def _call(self, part: list[Sample]) -> list[list[Sample]]:
        """What a custom function makes of one sample, or of each of a group."""
        own, as_group = part[0].generate_function_path, self._config.group_generate
        path = own or self._path
        assert path is not None
        what = f"{SETTING if own is None else 'generate_function_path of the sample'} = {path!r}"
        function = self._function(path, "group_generate" if as_group else "generate")
        before = copy.deepcopy(part)
        extra = {"evaluation": self._evaluation} if takes(function, "evaluation") else {}
        params = [self._own_params(sample) for sample in part]
        try:
            if as_group:
                made = await function(self._args, part, params, **extra)
            else:
                made = [await function(self._args, part[0], params[0], **extra)]
        except SluiceError:
            raise
        except Exception as error:
            # A custom function may raise anything; nothing tells whether it would work again.
            raise PluginError(
                f"{what} raised {type(error).__name__}: {error} on sample {part[0].index} "
                f"(prompt {part[0].prompt_id})"
            ) from error
        if not isinstance(made, list) or len(made) != len(part):
            count = f"{len(made)} samples" if isinstance(made, list) else f"a {type(made).__name__}"
            raise PluginError(f"{what} returned {count} for a group of {len(part)}")
        pairs = zip(made, before, strict=True)
        return [self._execution(one, origin, what) for one, origin in pairs]

    def _execution(self, made: Any, origin: Sample, what: str) -> list[Sample]:
        """The samples that a custom function made of one, which was `origin` before the call."""
        several = list(made) if isinstance(made, list) else [made]
        for sample in several:
            if not isinstance(sample, Sample):
                raise PluginError(f"{what} returned a {type(sample).__name__}, not a Sample")
        if not several:
            raise PluginError(
                f"{what} returned no sample for sample {origin.index}; return one or more"
            )
        check_distinct(several, what)
        join_execution(several, identity_of(origin))
        for sample in several:
            check_made(sample, what, self.pool.limits.vocab_size)
        if len(several) > 1 and any(sample.status in OPEN for sample in several):
            # It cannot go on from several ends.
            origin.status = Status.ABORTED
            return [origin]
        return several

    def _function(self, path: str, kind: Kind) -> CustomGenerate:
        if (path, kind) not in self._functions:
            self._functions[path, kind] = load_checked(path, SETTING, kind)
        return self._functions[path, kind]


def apply_result(sample: Sample, result: GenerateResult) -> None:
    """Append an engine's answer to a sample and set its status."""
    if result.finish_reason == "abort" and not result.tokens:
        # It was ended before it began.
        sample.status = Status.ABORTED
        return
    if sample.response_length:
        sample.append_response_tokens(result.tokens, result.log_probs, text=result.text)
    else:
        # The whole response came from the model: no mask is needed, so none is stored.
        sample.tokens = [*sample.tokens, *result.tokens]
        sample.response_length = len(result.tokens)
        sample.rollout_log_probs = result.log_probs
        sample.response = result.text
    sample.weight_versions = [*sample.weight_versions, *result.weight_versions]
    # Of the whole sequence, what was there before included.
    sample.rollout_routed_experts = result.routed_experts
    call = {
        "cached_tokens": result.cached_tokens,
        "total_prompt_tokens": len(sample.tokens) - len(result.tokens),
    }
    sample.prefix_cache_info = added(sample.prefix_cache_info, call)
    sample.spec_info = added(sample.spec_info, result.speculation)
    sample.status = FINISHED.get(result.finish_reason, sample.status)


def added(counts: dict[str, Any], more: dict[str, int]) -> dict[str, Any]:
    """Counts of the calls before, and of one more."""
    return counts | {name: counts.get(name, 0) + count for name, count in more.items()}


def check_distinct(samples: Sequence[Sample], what: str) -> None:
    """Each sample is an object of its own: one in two places would be stored as the last of them.

    Raises:
        PluginError: naming the function and the sample.
    """
    seen: set[int] = set()
    for sample in samples:
        if id(sample) in seen:
            raise PluginError(
                f"{what} returned one object as two samples (of prompt {sample.prompt_id}); each "
                "sample must be an object of its own, such as copy.deepcopy makes"
            )
        seen.add(id(sample))


def check_made(sample: Sample, what: str, vocab_size: int) -> None:
    """See that what a custom function made can be stored and trained on.

    Raises:
        DataError, PluginError: naming the function and the sample.
    """
    where = f"{what} returned sample {sample.index}"
    _check_numbers(sample, where)
    try:
        sample.validate()
    except DataError as error:
        raise DataError(f"{what}: {error}") from None
    if sample.status == Status.PENDING:
        raise PluginError(
            f"{where} with status pending; set completed, truncated, aborted or failed"
        )
    if sample.status in (Status.COMPLETED, Status.TRUNCATED) and not sample.response_length:
        raise PluginError(f"{where} as {sample.status} but without response tokens")
    if sample.tokens and not 0 <= min(sample.tokens) <= max(sample.tokens) < vocab_size:
        raise PluginError(f"{where} with token ids outside the vocabulary of {vocab_size}")


def _check_numbers(sample: Sample, where: str) -> None:
    for name, (wanted, fits) in _NUMBERS.items():
        values = getattr(sample, name)
        if values is None and name != "tokens":
            continue
        try:
            good = isinstance(values, list) and all(map(fits, values))
        except (TypeError, ValueError):
            good = False
        if not good:
            raise PluginError(f"{where} with {name} that is no list of {wanted}: {values!r:.80}")


def _check_version(
    sample: Sample, earlier: list[str], version: str | None, pool: EnginePool
) -> None:
    """What was generated now came from the right policy; what was there before, from its own."""
    if version is None:
        return
    goes_on = sample.weight_versions[: len(earlier)] == earlier
    for found in sample.weight_versions[len(earlier) if goes_on else 0 :]:
        if not (pool.accepts(found) if pool.goes_on else found == version):
            raise EngineError(
                f"sample {sample.index} was generated by policy version {found!r}, but the rollout "
                f"is of version {version!r}; an engine missed a weight sync"
            )
