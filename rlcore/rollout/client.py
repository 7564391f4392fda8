"""SGLang's HTTP API as async calls, the same for a real server and for the embedded engine.

Invariants:
- A batch of requests is one HTTP call, with a sampling-parameter set each.
- Nothing is sent that `limits.check_request` refuses.
- Tokens and log-probs come from the engine's reply and are never made again from text.
- Every failure is an `EngineError` naming the address, the status and what the server said. Where
  trying again, here or elsewhere, may help, it is an `EngineUnavailable`.
"""

import asyncio
import base64
import contextlib
import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx
import orjson

from rlcore.errors import EngineError
from rlcore.images.layout import collapse
from rlcore.rollout.blobs import Blob, with_blobs
from rlcore.rollout.limits import Limits, check_request

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
ADAPTER = "policy"
"""Name of the adapter at engines that add one to the starting model's weights."""


def adapter_of(version: str | None) -> str | None:
    """The adapter that a policy version is, where policies are adapters; 0 is the model alone."""
    return None if version in (None, "0") else ADAPTER


class EngineUnavailable(EngineError):
    """The engine did not answer, or answered that it cannot now: another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue.

    Attributes:
        input_ids: prompt, or prompt and the response so far; of an image, a placeholder for each
            of its features.
        sampling_params: by SGLang's names.
        rid: name under which `abort` finds it.
        images: of the prompt, as data URIs.
        routed_experts: whether the experts of each token are asked for.
    """

    input_ids: list[int]
    sampling_params: dict[str, Any]
    rid: str | None = None
    images: Sequence[str] = ()
    routed_experts: bool = False


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What the engine made of a request.

    Attributes:
        tokens: ids generated, a final end-of-sequence id included.
        log_probs: one a token, at the sampling temperature.
        finish_reason: `stop`, `length` or `abort`.
        text: decoded tokens.
        weight_version: of the policy that generated the last token.
        earlier_versions: of the policies before it, where weights changed under way and the engine
            says so, in order.
        cached_tokens: prompt tokens found in the engine's cache.
        speculation: tokens drafted and accepted, by the names of `Sample.spec_info`; empty where
            the engine does not speculate.
        detail: the whole finish reason as the engine gave it.
        routed_experts: int32 [tokens of prompt and answer - 1, layers, k], where they were asked
            for.
    """

    tokens: list[int]
    log_probs: list[float]
    finish_reason: str
    text: str = ""
    weight_version: str = ""
    cached_tokens: int = 0
    speculation: dict[str, int] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    earlier_versions: list[str] = field(default_factory=list)
    routed_experts: "npt.NDArray[np.int32] | None" = None

    @property
    def weight_versions(self) -> list[str]:
        """Of all policies that generated, in order."""
        return [*self.earlier_versions, self.weight_version]


class EngineClient:
    """Talks to one engine. Use it within one event loop and close it there.

    Args:
        url: such as `http://127.0.0.1:30000`.
        limits: of the model; None leaves ids and lengths to the server.
        timeout_s: seconds until a request counts as failed.
    """

    def __init__(self, url: str, limits: Limits | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.limits = limits
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The engine drops requests that still run."""
        await self._http.aclose()

    # --- generation -------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[GenerateRequest], adapter: str | None = None
    ) -> list[GenerateResult]:
        """Continue prompts in one HTTP call.

        Args:
            requests: any number.
            adapter: that the engine adds to its weights; see `adapter_of`.

        Returns:
            One result a request, in order.

        Raises:
            EngineUnavailable: the engine is not there or failed.
            EngineError: a request is not acceptable, or the reply makes no sense.
        """
        if not requests:
            return []
        content = await self._send("POST", "/generate", self._body(requests, adapter))
        with no_collection():
            replies = self._read("/generate", content)
            if not isinstance(replies, list) or len(replies) != len(requests):
                got = len(replies) if isinstance(replies, list) else type(replies).__name__
                raise EngineError(
                    f"{self.url}/generate answered {got} for {len(requests)} requests"
                )
            return [self._result(reply, r) for reply, r in zip(replies, requests, strict=True)]

    def _body(self, requests: Sequence[GenerateRequest], adapter: str | None) -> dict[str, Any]:
        """Of a request for all of them."""
        for request in requests:
            check_request(request.input_ids, request.sampling_params, self.limits)
        body: dict[str, Any] = {
            "input_ids": [self._placeholders(r) for r in requests],
            "sampling_params": [r.sampling_params for r in requests],
            "return_logprob": True,
        }
        if any(r.images for r in requests):
            body["image_data"] = [list(r.images) for r in requests]
        if any(r.routed_experts for r in requests):
            body["return_routed_experts"] = True
        if adapter is not None:
            body["lora_path"] = adapter
        if all(r.rid is not None for r in requests):
            body["rid"] = [r.rid for r in requests]
        return body

    async def _generate_alone(
        self, request: GenerateRequest, adapter: str | None
    ) -> GenerateResult:
        """`generate` of one, without the lists of a batch."""
        body = self._body([request], adapter)
        alone = {k: one[0] if isinstance(one, list) else one for k, one in body.items()}
        return self._result(await self._json("POST", "/generate", alone), request)

    async def prompt_log_probs(
        self, sequences: Sequence[list[int]], adapter: str | None = None
    ) -> list[list[float]]:
        """Log-probs of the tokens of given sequences, all but each one's first, at temperature 1.

        Args:
            sequences: token ids.
            adapter: that the engine adds to its weights.

        Returns:
            For each sequence of n ids, n - 1 log-probs.
        """
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 0}
        for sequence in sequences:
            check_request(sequence, params, self.limits)
        body = {
            "input_ids": list(sequences),
            "sampling_params": [params] * len(sequences),
            "return_logprob": True,
            "logprob_start_len": [0] * len(sequences),
        }
        if adapter is not None:
            body["lora_path"] = adapter
        replies = await self._json("POST", "/generate", body)
        out = []
        for sequence, reply in zip(sequences, replies, strict=True):
            entries = reply["meta_info"].get("input_token_logprobs") or []
            if [entry[1] for entry in entries] != sequence:
                raise EngineError(
                    f"{self.url}/generate answered log-probs of {len(entries)} tokens that are not "
                    f"the {len(sequence)} asked for"
                )
            out.append([float(entry[0]) for entry in entries[1:]])
        return out

    def _placeholders(self, request: GenerateRequest) -> list[int]:
        """Ids as an engine takes them, which repeats the placeholder of an image itself."""
        if not request.images:
            return request.input_ids
        if self.limits is None or self.limits.image_token is None:
            raise EngineError(
                "a request has images, but the model takes none (its config.json has no "
                "image_token_id)"
            )
        return collapse(request.input_ids, len(request.images), self.limits.image_token)

    def _result(self, reply: dict[str, Any], request: GenerateRequest) -> GenerateResult:
        try:
            meta = reply["meta_info"]
            read = meta["prompt_tokens"] if request.images else len(request.input_ids)
            reason = meta["finish_reason"]
            entries = meta.get("output_token_logprobs") or []
            tokens = reply["output_ids"]
            log_probs = list(map(itemgetter(0), entries))
            result = GenerateResult(
                tokens=tokens,
                log_probs=log_probs,
                finish_reason=reason["type"],
                text=reply.get("text", ""),
                weight_version=str(meta.get("weight_version", "")),
                cached_tokens=int(meta.get("cached_tokens") or 0),
                speculation=speculation(meta),
                detail=reason,
                earlier_versions=_earlier(meta),
                routed_experts=self._routed(meta, len(request.input_ids) + len(tokens))
                if request.routed_experts and tokens
                else None,
            )
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(
                f"{self.url}/generate answered something else than SGLang does: "
                f"{type(error).__name__} {error} in {str(reply)[:200]}"
            ) from None
        # What was ended before it began may have been read by nobody.
        if tokens and read != len(request.input_ids):
            raise EngineError(
                f"{self.url}/generate read a prompt with {len(request.images)} images as {read} "
                f"tokens, not {len(request.input_ids)}: its image processor is another than that "
                "of the model's folder (preprocessor_config.json)"
            )
        if list(map(itemgetter(1), entries)) != tokens:
            raise EngineError(
                f"{self.url}/generate answered {len(tokens)} tokens, but log-probs of other "
                f"{len(entries)}"
            )
        if not set(map(type, log_probs)) <= {float} or not all(map(math.isfinite, log_probs)):
            raise EngineError(
                f"{self.url}/generate answered log-probs that are no finite numbers; the engine's "
                "weights are broken"
            )
        return result

    def _routed(self, meta: Mapping[str, Any], tokens: int) -> "npt.NDArray[np.int32]":
        """The experts that an answer tells, of so many tokens but the last."""
        import numpy as np

        told, routes = meta.get("routed_experts"), self.limits and self.limits.routes
        if not isinstance(told, str) or not routes:
            raise EngineError(
                f"{self.url}/generate tells no routed experts: "
                + (
                    "start the engine with --enable-return-routed-experts"
                    if routes
                    else "the model has none; set rollout.use_rollout_routing_replay = false"
                )
            )
        flat, shape = np.frombuffer(base64.b64decode(told), np.int32), (tokens - 1, *routes)
        if flat.size != math.prod(shape):
            raise EngineError(
                f"{self.url}/generate tells {flat.size} routed experts for {tokens} tokens of "
                f"{routes[0]} layers with {routes[1]} each, not {math.prod(shape)}"
            )
        return flat.reshape(shape)

    # --- control ----------------------------------------------------------------------------------

    async def health(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers."""
        try:
            reply = await self._http.get(f"{self.url}/health", timeout=timeout_s)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    async def model_info(self) -> dict[str, Any]:
        """Model path, weight version and the like."""
        info: dict[str, Any] = await self._json("GET", "/model_info")
        return info

    async def weight_version(self) -> str:
        """Version of the weights that the engine holds."""
        return str((await self.model_info())["weight_version"])

    async def server_info(self) -> dict[str, Any]:
        """The server's arguments and state."""
        info: dict[str, Any] = await self._json("GET", "/get_server_info")
        return info

    async def pause(self, mode: str = "abort") -> None:
        """Stop generating. `abort` ends running requests, `in_place` keeps them where they are."""
        await self._json("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._json("POST", "/continue_generation", {})

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them; each is answered with what it has so far."""
        await self._send("POST", "/abort_request", {"rid": rid or "", "abort_all": rid is None})

    async def flush_cache(self, timeout_s: float = 60.0) -> None:
        """Empty the KV cache. Waits for requests to end, since a server refuses while any runs.

        Raises:
            EngineError: it still refused after `timeout_s` seconds.
        """
        deadline, wait = time.monotonic() + timeout_s, 0.02
        while True:
            try:
                await self._send("POST", "/flush_cache", {})
                return
            except EngineError:
                if time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait)
            wait = min(1.0, wait * 2)

    async def update_weights_from_disk(
        self, path: str, version: str, *, flush_cache: bool = True
    ) -> None:
        """Load the weights of a Hugging Face folder that the engine can read."""
        body = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        await self._update("/update_weights_from_disk", body)

    async def update_adapter(self, folder: str, version: str) -> None:
        """Replace the adapter by that of a folder in PEFT's format; of version 0 there is none."""
        # The first time there is none to take away.
        with contextlib.suppress(EngineError):
            await self._update("/unload_lora_adapter", {"lora_name": ADAPTER})
        if name := adapter_of(version):
            await self._update("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        body = {"new_version": version, "abort_all_requests": False}
        await self._update("/update_weight_version", body)

    async def update_weights_from_tensor(
        self,
        blobs: Sequence[Blob],
        version: str,
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> None:
        """Send tensors over the wire, piece by piece: no copy of them is made.

        Args:
            blobs: one for each tensor-parallel rank of the engine: text as it is, bytes or parts of
                them as base64.
            version: of the weights once they are in.
            load_format: how the blobs are packed, where the server must be told.
            flush_cache: empty the KV cache, which belongs to the old weights.
        """
        body: dict[str, Any] = {"weight_version": version, "flush_cache": flush_cache}
        # Else SGLang loads them into the draft model of speculative decoding too.
        body["disable_draft_model"] = True
        if load_format is not None:
            body["load_format"] = load_format
        path = "/update_weights_from_tensor"
        self._check_updated(path, await self._json("POST", path, body, blobs))

    async def init_weights_update_group(self, body: dict[str, Any]) -> None:
        """Have the engine's ranks join a group for weights, from the rank `rank_offset` on.

        Args:
            body: of the request: master_address, master_port, rank_offset, world_size, group_name
                and backend.
        """
        await self._update("/init_weights_update_group", body)

    async def update_weights_from_distributed(
        self, tensors: Sequence[tuple[str, str, list[int]]], group_name: str, version: str
    ) -> None:
        """Have the engine take tensors that rank 0 of a group broadcasts, and keep its cache.

        Args:
            tensors: name, dtype and shape of each, in the order in which they come.
            group_name: of the group.
            version: of the weights once they are in.
        """
        body = {
            "names": [name for name, _, _ in tensors],
            "dtypes": [dtype for _, dtype, _ in tensors],
            "shapes": [shape for _, _, shape in tensors],
            "group_name": group_name,
            "flush_cache": False,
            "weight_version": version,
        }
        await self._update("/update_weights_from_distributed", body)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        """Have the engine leave a group."""
        await self._update("/destroy_weights_update_group", {"group_name": group_name})

    async def release_memory(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None:
        """Give GPU memory back until `resume_memory`."""
        await self._send("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory that `release_memory` gave back."""
        await self._send("POST", "/resume_memory_occupation", {"tags": list(tags)})

    # --- HTTP -------------------------------------------------------------------------------------

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        self._check_updated(path, await self._json("POST", path, body))

    def _check_updated(self, path: str, reply: Any) -> None:
        # A server may say 200 and yet have failed: only the body counts.
        if not (isinstance(reply, dict) and reply.get("success")):
            raise EngineError(f"{self.url}{path} failed: {_said(reply)}")

    async def _json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        blobs: Sequence[Blob] | None = None,
    ) -> Any:
        return self._read(path, await self._send(method, path, body, blobs))

    def _read(self, path: str, content: bytes) -> Any:
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            raise EngineUnavailable(
                f"{self.url}{path} answered no JSON: {content[:200].decode(errors='replace')!r}"
            ) from None

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        blobs: Sequence[Blob] | None = None,
    ) -> bytes:
        content: Any = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        if blobs is not None:
            content, length = with_blobs(content, "serialized_named_tensors", blobs)
            headers["Content-Length"] = str(length)
        try:
            reply = await self._http.request(
                method, f"{self.url}{path}", content=content, headers=headers
            )
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"{self.url}{path} did not answer: {type(error).__name__} {error}".rstrip()
            ) from None
        if reply.status_code == 200:
            return reply.content
        kind = (
            EngineUnavailable
            if reply.status_code in (408, 429) or reply.status_code >= 500
            else EngineError
        )
        raise kind(f"{self.url}{path} answered {reply.status_code}: {_said(reply.content)}")


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from looking for garbage meanwhile.

    An answer holds a list for each token. To look through them again and again takes longer than to
    read them, and they hold no cycles.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _earlier(meta: Mapping[str, Any]) -> list[str]:
    """Policies before the last one, of an engine that tells them."""
    told = [str(version) for version, _ in meta.get("weight_versions") or []]
    last = str(meta.get("weight_version", ""))
    return [version for version in told if version != last]


def _said(reply: Any) -> str:
    """The message within an error reply, which SGLang wraps in several ways."""
    if isinstance(reply, bytes):
        try:
            reply = orjson.loads(reply)
        except orjson.JSONDecodeError:
            return reply.decode(errors="replace")[:500].strip()
    if isinstance(reply, dict):
        inner = reply.get("error", reply.get("message", reply.get("detail", reply)))
        return _said(inner) if isinstance(inner, dict) and inner is not reply else str(inner)[:500]
    return str(reply)[:500]


def speculation(meta: Mapping[str, Any]) -> dict[str, int]:
    """What an answer's `meta_info` says of speculative decoding; empty where it says nothing."""
    found = {
        own: int(meta[theirs])
        for own, theirs in (
            ("accept_token_num", "spec_num_correct_drafts"),
            ("draft_token_num", "spec_num_proposed_drafts"),
            ("verify_ct", "spec_verify_ct"),
        )
        if meta.get(theirs) is not None
    }
    return found and found | {"completion_token_num": int(meta.get("completion_tokens") or 0)}
