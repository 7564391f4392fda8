"""What slime's names stand for: thin functions over ours, with slime's signatures.

Invariant: a request to an engine goes through the run's pool, which spreads, repeats and ends it,
and refuses an answer of another policy.
"""

import asyncio
import base64
import inspect
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import PluginError
from rlcore.plugins import load_function as load
from rlcore.rollout.client import GenerateRequest, GenerateResult
from rlcore.rollout.filters.rules import nonzero_std
from rlcore.rollout.generate import OPEN, apply_result, sample_images, sampling_params
from rlcore.rollout.groups import identity_of, join_execution
from rlcore.rollout.rewards.dispatch import Dispatch
from rlcore.sample import Sample, Status
from rlcore.slime.compat import state

Params = dict[str, Any]
Samples = list[Sample]


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns: groups, and figures."""

    samples: list[Samples]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function returns of an evaluation."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """A filter's verdict over a group."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


class GenerateState:
    """What generate functions share. Made anew each time; it holds nothing of its own."""

    def __init__(self, args: Any) -> None:
        serving = state.serving()
        self.args = args
        self.tokenizer = serving.tokenizer
        self.processor = None
        self.sampling_params = sampling_params(args)
        self.semaphore = asyncio.Semaphore(serving.pool.total_concurrency)

    @property
    def aborted(self) -> bool:
        """Whether all requests are being ended."""
        return state.serving().pool.aborting


def load_function(path: str) -> Any:
    """A function by its dotted path."""
    return load(path, "load_function")


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Wait for a coroutine from plain code; it runs in the loop that has the engines.

    Raises:
        PluginError: that loop is the one that calls, and would wait for itself.
    """
    loop = state.serving().loop
    if loop is None:
        return asyncio.run(coro)
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is loop:
        coro.close()
        raise PluginError("slime.utils.async_utils.run in an async function: use await")
    return asyncio.run_coroutine_threadsafe(coro, loop).result()


# --- engines --------------------------------------------------------------------------------------


async def post(
    url: str,
    payload: Mapping[str, Any],
    max_retries: int = 3,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """POST JSON and return the answer's; an engine's /generate goes through the run's pool.

    Args:
        url: of `args.sglang_router_ip` and `args.sglang_router_port` for the engines.
        payload: for an engine, `input_ids` or `text`, and `sampling_params`.
        max_retries: of other servers; the engines' are `rollout.request_retries`.
        headers: for other servers.

    Raises:
        PluginError: the server gives no answer, or a request asks for what is not passed on.
    """
    serving = state.found()
    if serving is not None and url == f"{serving.pool.address}/generate":
        return await _through_pool(serving, payload)
    import httpx

    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        for left in reversed(range(max(1, max_retries))):
            try:
                answer = await client.post(url, json=dict(payload), headers=dict(headers or {}))
                answer.raise_for_status()
                return answer.json()
            except (httpx.HTTPError, ValueError) as error:
                if not left:
                    raise PluginError(f"POST {url}: {type(error).__name__} {error}") from error
                await asyncio.sleep(1.0)


async def _through_pool(serving: state.Serving, payload: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        "input_ids",
        "text",
        "sampling_params",
        "return_logprob",
        "return_routed_experts",
        "stream",
    }
    if other := sorted(k for k, v in payload.items() if k not in known and v):
        raise PluginError(f"a request to an engine has {', '.join(other)}, which are not passed on")
    if payload.get("stream"):
        raise PluginError("a request to an engine has stream = true; answers come whole")
    ids = payload.get("input_ids")
    if ids is None:
        ids = serving.tokenizer.encode(payload["text"], add_special_tokens=False)
    request = GenerateRequest(
        list(ids),
        dict(payload.get("sampling_params") or {}),
        routed_experts=bool(payload.get("return_routed_experts")),
    )
    [result] = await serving.pool.generate([request])
    return _reply(result, len(request.input_ids))


def _reply(result: GenerateResult, prompt_length: int) -> dict[str, Any]:
    """An answer as SGLang gives it."""
    pairs = zip(result.log_probs, result.tokens, strict=True)
    routed = result.routed_experts
    return {
        "text": result.text,
        "output_ids": result.tokens,
        "meta_info": {
            "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
            "finish_reason": result.detail or {"type": result.finish_reason},
            # There is room for one: a sample is as old as its oldest token.
            "weight_version": result.weight_versions[0],
            "prompt_tokens": prompt_length,
            "completion_tokens": len(result.tokens),
            "cached_tokens": result.cached_tokens,
            **(
                {}
                if routed is None
                else {"routed_experts": base64.b64encode(routed.tobytes()).decode()}
            ),
        },
    }


async def generate(args: Any, sample: Sample, sampling_params: Params) -> Sample:
    """One plain request: what the sample has so far, gone on with."""
    ids = sample.tokens
    if not ids:
        text = sample.prompt
        if not isinstance(text, str):
            raise PluginError("generate got a prompt of messages without tokens: set its tokens")
        ids = sample.tokens = state.serving().tokenizer.encode(text, add_special_tokens=False)
    own = dict(sampling_params)
    routed = bool(getattr(args, "use_rollout_routing_replay", False))
    request = GenerateRequest(ids, own, images=sample_images(sample), routed_experts=routed)
    [result] = await state.serving().pool.generate([request])
    apply_result(sample, result)
    return sample


generate_streaming = generate
"""slime streams so that a request that is cut off keeps its tokens; here it does without."""


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: Params, evaluation: bool = False
) -> Sample | Samples:
    """A response and its reward; one that is cut off has none.

    A function that makes several samples of one gives them all, rewarded if all are whole.
    """
    made: Sample | Samples = sample
    origin = identity_of(sample)
    if sample.status in OPEN:
        path = sample.generate_function_path or args.custom_generate_function_path
        function = load_function(path) if path else generate
        own = dict(sampling_params)
        if sample.seed is not None:
            own.setdefault("sampling_seed", sample.seed)
        more = {}
        if "evaluation" in inspect.signature(function).parameters:
            more["evaluation"] = evaluation
        made = await function(args, sample, own, **more)
    samples = made if isinstance(made, list) else [made]
    join_execution(samples, origin)
    if not args.group_rm:
        await _reward(args, samples, [s for s in samples if s.reward is None])
    return made


async def _reward(args: Any, samples: Samples, bare: Samples) -> None:
    """Rewards for `bare` ones of some samples, if all are whole."""
    if bare and all(s.status in (Status.COMPLETED, Status.TRUNCATED) for s in samples):
        for sample, reward in zip(bare, await batched_async_rm(args, bare), strict=True):
            sample.reward = reward


async def generate_and_rm_group(
    args: Any, group: Samples, sampling_params: Params, evaluation: bool = False
) -> Samples:
    """Responses and rewards of a group."""
    calls = [generate_and_rm(args, one, sampling_params, evaluation) for one in group]
    made = await asyncio.gather(*calls)
    done = [s for one in made for s in (one if isinstance(one, list) else [one])]
    if args.group_rm:
        await _reward(args, done, done)
    return done


# --- rewards and filters --------------------------------------------------------------------------


async def async_rm(args: Any, sample: Sample, **more: Any) -> Any:
    """The reward of a sample, by its own function, the run's, or a type."""
    return await _scored(args, [sample], batched=False, more=more)


async def batched_async_rm(args: Any, samples: Samples, **more: Any) -> list[Any]:
    """The rewards of samples."""
    if args.group_rm and args.custom_rm_path:
        found: list[Any] = await _scored(args, samples, batched=True, more=more)
        return found
    return list(await asyncio.gather(*(async_rm(args, one, **more) for one in samples)))


async def _scored(args: Any, samples: Samples, *, batched: bool, more: Params) -> Any:
    settings = {
        "batched": batched,
        "custom_rm_path": args.custom_rm_path,
        "rm_type": args.rm_type,
    }
    function = Dispatch(settings).function_of(samples)
    given = samples if batched else samples[0]
    if inspect.iscoroutinefunction(function):
        return await function(args, given, **more)
    # A plain one may take long, and must not keep the engines waiting.
    answer = await asyncio.to_thread(function, args, given, **more)
    return await answer if inspect.isawaitable(answer) else answer


def _answered(rm_type: str, response: str, label: Any) -> Any:
    from rlcore.rollout.rewards import builtin

    sample = Sample(response=response, label=label, status=Status.COMPLETED)
    return builtin.load(rm_type)(None, sample)


def get_deepscaler_rule_based_reward(response: str, label: Any) -> float:
    """1 for the right answer after the thoughts; the type `deepscaler`."""
    return float(_answered("deepscaler", response, label))


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last \boxed of a solution is right; the type `math`."""
    return bool(_answered("math", solution_str, ground_truth))


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score, whether right, and the answer; the type `dapo`."""
    found: dict[str, Any] = _answered("dapo", solution_str, ground_truth)
    return found


def f1_score(prediction: str, ground_truth: Any) -> float:
    """Word F1; the type `f1`."""
    return float(_answered("f1", prediction, ground_truth))


def _rewards(args: Any, samples: Sequence[Sample]) -> list[float]:
    values = [sample.get_reward_value(args.reward_key) for sample in samples]
    return [value for value in values if value is not None]


def check_reward_nonzero_std(args: Any, samples: Samples, **more: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ."""
    verdict = nonzero_std(_rewards(args, samples))
    return DynamicFilterOutput(verdict.keep, verdict.reason)


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Samples, **more: Any
) -> DynamicFilterOutput:
    """The same, but kept where others would have to be begun in their place."""
    verdict = nonzero_std(_rewards(args, samples))
    return DynamicFilterOutput(verdict.keep, verdict.reason, keep_when_insufficient=True)


# --- training -------------------------------------------------------------------------------------


def all_gather_with_cp(tensor: Any, total_length: int, response_length: int, *more: Any) -> Any:
    """Values of a response from all ranks that share it; here each response is on one rank."""
    return tensor


def slice_log_prob_with_cp(
    log_prob: Any, total_length: int, response_length: int, *more: Any, **named: Any
) -> Any:
    """This rank's part of a response's values; here a rank has the whole response."""
    return log_prob
