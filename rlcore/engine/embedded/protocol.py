"""The body of a `/generate` call, checked and split into one `Request` per wanted sample.

Invariants:
- Nothing of a call is started unless all of it is valid: ids inside the vocabulary, lengths inside
  the context, every key known. What ends a real SGLang server is refused here.
- Requests come out in SGLang's order: prompt by prompt, the `n` samples of one prompt side by side.
"""

import uuid
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlcore.engine.embedded.params import SamplingParams, parse_sampling_params
from rlcore.errors import EngineError
from rlcore.images.layout import SequenceImages

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = frozenset(
    ("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len",
     "top_logprobs_num", "stream", "image_data", "return_routed_experts", "lora_path")
)  # fmt: skip
See = Callable[[list[int], list[str]], tuple[list[int], SequenceImages]]
"""Ids of a prompt and its images -> ids with a placeholder for each feature, and the images."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server's model allows."""

    context_length: int
    """Prompt and answer together, in tokens."""
    vocab_size: int
    routed_experts: bool = False
    """Whether the experts of each token are recorded."""


@dataclass(slots=True)
class Request:
    """One sample to generate."""

    rid: str
    group: str
    """The id that the caller gave; differs from `rid` where n > 1. Either aborts the request."""
    tokens: list[int]
    """Prompt ids."""
    images: SequenceImages | None
    key: bytes
    """The prompt and its images as bytes: equal prompts share one prefill."""
    params: SamplingParams
    max_new_tokens: int
    seed: int | None
    """None until the scheduler draws one."""
    sample: int
    """Index among the `n` samples of its prompt."""
    return_logprob: bool
    logprob_start: int
    """First prompt position whose log-probability is wanted; the prompt's length for none."""
    top_logprobs: int
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    input_top: list[list[tuple[float, int]] | None] = field(default_factory=list)
    routed: bool = False
    """Whether the experts of its tokens are wanted."""
    experts: "list[Tensor]" = field(default_factory=list)
    """int32 [n, layers, k] that its tokens were sent to, in order."""
    cached_tokens: int = 0
    weight_version: str = ""
    """At the end."""
    earlier: list[tuple[str, int]] = field(default_factory=list)
    """Policies before it, each with how many of the tokens it chose."""
    finish: dict[str, object] | None = None

    @property
    def policies(self) -> list[tuple[str, int]]:
        """Every policy that chose tokens, with how many, in order."""
        rest = len(self.output) - sum(count for _, count in self.earlier)
        return [*self.earlier, (self.weight_version, rest)] if rest else self.earlier


@dataclass(slots=True)
class Call:
    """One HTTP call: its requests, and whom to tell when the last one has finished."""

    requests: list[Request]
    batched: bool
    """Whether the answer is a list."""
    done: Callable[[], None] = lambda: None
    pending: int = 0
    started: float = 0.0

    def finished_one(self) -> None:
        """Count one finished request; tell the waiter after the last."""
        self.pending -= 1
        if self.pending == 0:
            self.done()


def blind(ids: list[int], images: list[str]) -> tuple[list[int], SequenceImages]:
    """Stands where the model takes no images."""
    raise EngineError("image_data is given, but the model takes no images.")


def parse_call(
    body: object,
    limits: Limits,
    encode: Callable[[list[str]], list[list[int]]],
    see: See = blind,
) -> Call:
    """Check a `/generate` body; `encode` turns texts into ids, `see` places images among them.
    EngineError says what is wrong.
    """
    if not isinstance(body, Mapping):
        raise EngineError("The body of /generate must be a JSON object.")
    for key, value in body.items():
        if key not in _KEYS and value not in (None, False, [], {}):
            raise EngineError(f"'{key}' is not offered by this engine; remove it from the request.")
    if body.get("stream"):
        raise EngineError("stream=true is not offered by this engine; ask without it.")
    prompts, batched = _prompts(body, encode)
    count = len(prompts)
    prompts, images = _with_images(prompts, _images(body.get("image_data"), count, batched), see)
    params = _each_params(body.get("sampling_params"), count, batched)
    rids = _each(body, "rid", count, batched, str, None)
    wants = _each(body, "return_logprob", count, batched, bool, False)
    starts = _each(body, "logprob_start_len", count, batched, int, -1)
    tops = _each(body, "top_logprobs_num", count, batched, int, 0)
    requests: list[Request] = []
    for i, prompt in enumerate(prompts):
        budget = _check_prompt(prompt, params[i], limits)
        start = starts[i] if wants[i] and starts[i] >= 0 else len(prompt)
        if start > len(prompt):
            raise EngineError(
                f"logprob_start_len ({start}) is beyond the prompt ({len(prompt)} tokens)."
            )
        if not 0 <= tops[i] <= limits.vocab_size:
            raise EngineError(
                f"top_logprobs_num must be between 0 and the vocabulary's {limits.vocab_size}, "
                f"got {tops[i]}."
            )
        key = array("q", prompt).tobytes()
        if (seen := images[i]) is not None:
            key += seen.digest
        requests += _samples(
            prompt, seen, key, params[i], budget, rids[i], wants[i], start, tops[i]
        )
    for request in requests:
        request.routed = _wants_experts(body, limits)
    return Call(requests, batched or any(p.n > 1 for p in params), pending=len(requests))


def _wants_experts(body: Mapping[str, object], limits: Limits) -> bool:
    wanted = body.get("return_routed_experts", False)
    if type(wanted) is not bool:
        raise EngineError(f"return_routed_experts must be of type bool, got {wanted!r}.")
    if wanted and not limits.routed_experts:
        raise EngineError(
            "return_routed_experts=true, but the engine was started without "
            "--enable-return-routed-experts."
        )
    return wanted


def _prompts(
    body: Mapping[str, object], encode: Callable[[list[str]], list[list[int]]]
) -> tuple[list[list[int]], bool]:
    """(ids of every prompt, whether the call asked for a batch)."""
    text, ids = body.get("text"), body.get("input_ids")
    if text is None and ids is None:
        raise EngineError("Either text, input_ids or input_embeds should be provided.")
    if text is not None and ids is not None:
        raise EngineError("text and input_ids exclude each other; give one of them.")
    if ids is None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise EngineError("text must be a string or a list of strings.")
        if not texts:
            raise EngineError("text cannot be empty.")
        return encode(texts), not isinstance(text, str)
    if not isinstance(ids, list):
        raise EngineError("input_ids must be a list of token ids or a list of such lists.")
    if not ids:
        raise EngineError("input_ids cannot be empty.")
    batched = isinstance(ids[0], list)
    return (ids if batched else [ids]), batched


def _images(raw: object, count: int, batched: bool) -> list[list[str]]:
    """The images of every prompt: of one prompt one or a list, of several a list with one, a list
    or nothing for each.
    """
    if raw is None or raw == []:
        return [[]] * count
    each = raw if batched else [raw]
    if not isinstance(each, list) or len(each) != count:
        raise EngineError("The length of image_data should be equal to the batch size.")
    lists = [one if isinstance(one, list) else [] if one is None else [one] for one in each]
    if not all(isinstance(image, str) for one in lists for image in one):
        raise EngineError("image_data must hold images as data URIs or base64.")
    return lists


def _with_images(
    prompts: list[list[int]], images: list[list[str]], see: See
) -> tuple[list[list[int]], list[SequenceImages | None]]:
    """Prompts with placeholders for their images; samples of one prompt share what was made."""
    known: dict[tuple[tuple[int, ...], tuple[str, ...]], Any] = {}
    out: list[tuple[list[int], SequenceImages | None]] = []
    for ids, own in zip(prompts, images, strict=True):
        if not own:
            out.append((ids, None))
            continue
        what = (tuple(ids), tuple(own))
        if what not in known:
            known[what] = see(ids, own)
        out.append(known[what])
    return [ids for ids, _ in out], [seen for _, seen in out]


def _check_prompt(prompt: object, params: SamplingParams, limits: Limits) -> int:
    """How many tokens the request may generate; EngineError when the prompt or the sum is too
    long.
    """
    if not isinstance(prompt, list):
        raise EngineError("input_ids must be a list of token ids or a list of such lists.")
    if not prompt:
        raise EngineError("input_ids cannot be empty.")
    if not all(type(token) is int for token in prompt):
        raise EngineError("input_ids must hold integers only.")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        bad = next(t for t in prompt if not 0 <= t < limits.vocab_size)
        raise EngineError(
            f"Token id {bad} is outside the vocabulary of {limits.vocab_size} tokens."
        )
    length, context = len(prompt), limits.context_length
    if length >= context:
        raise EngineError(
            f"The input ({length} tokens) is longer than the model's context length "
            f"({context} tokens)."
        )
    wanted = context - length if params.max_new_tokens is None else params.max_new_tokens
    if length + wanted > context:
        raise EngineError(
            f"Requested token count exceeds the model's maximum context length of {context} "
            f"tokens. You requested a total of {length + wanted} tokens: {length} tokens from the "
            f"input messages and {wanted} tokens for the completion. Please reduce the number of "
            "tokens in the input messages or the completion to fit within the limit."
        )
    return wanted


def _samples(
    prompt: list[int],
    images: SequenceImages | None,
    key: bytes,
    params: SamplingParams,
    budget: int,
    rid: str | None,
    wants: bool,
    start: int,
    top: int,
) -> list[Request]:
    name = rid or uuid.uuid4().hex
    names = [name] if params.n == 1 else [f"{name}_{i}" for i in range(params.n)]
    one = replace(params, n=1) if params.n > 1 else params
    return [
        Request(
            rid=names[i],
            group=name,
            tokens=prompt,
            images=images,
            key=key,
            params=one,
            max_new_tokens=budget,
            seed=params.sampling_seed,
            sample=i,
            return_logprob=wants,
            logprob_start=start,
            top_logprobs=top if wants else 0,
        )
        for i in range(params.n)
    ]


def _each_params(raw: object, count: int, batched: bool) -> list[SamplingParams]:
    """One parameter set a prompt: a single set is shared, a list must have one for each."""
    if not isinstance(raw, list):
        return [parse_sampling_params(raw)] * count
    if not batched or len(raw) != count:
        raise EngineError(
            f"sampling_params holds {len(raw)} sets for {count} prompts; give one, or one a prompt."
        )
    return [parse_sampling_params(one) for one in raw]


def _each(
    body: Mapping[str, object], key: str, count: int, batched: bool, kind: type, default: object
) -> list[Any]:
    """The value of `key` for every prompt, from a scalar, a list or nothing."""
    raw = body.get(key)
    values = raw if isinstance(raw, list) else [raw] * count
    if isinstance(raw, list) and (not batched or len(raw) != count):
        raise EngineError(
            f"{key} holds {len(raw)} values for {count} prompts; give one, or one a prompt."
        )
    if key == "rid" and isinstance(raw, str) and batched:
        values = [f"{raw}_{i}" for i in range(count)]
    for value in values:
        # bool is an int to isinstance, so the exact type is asked for.
        if value is not None and type(value) is not kind:
            raise EngineError(f"{key} must be of type {kind.__name__}, got {value!r}.")
    return [default if value is None else value for value in values]
