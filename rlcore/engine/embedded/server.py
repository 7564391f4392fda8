"""The endpoints: SGLang's native HTTP API, answered by a `Scheduler`.

The event loop only parses, waits and formats; everything that touches the model is asked of the
worker thread, so health, aborts and pauses are answered while it computes. Status codes, keys and
error shapes are those of SGLang 0.5.16 (`tests/contract/` holds its recorded answers and the few
differences).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from rlcore.engine.embedded.adapter import Adapters, Put
from rlcore.engine.embedded.groups import Groups
from rlcore.engine.embedded.output import answer
from rlcore.engine.embedded.protocol import Call, Limits, See, blind, parse_call
from rlcore.engine.embedded.runner import ModelRunner
from rlcore.engine.embedded.scheduler import Scheduler
from rlcore.engine.embedded.tokenizer import Tokenizer
from rlcore.errors import EngineError

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    "waiting requests, the operation will not be performed.)\n"
)
TAGS = frozenset(("weights", "kv_cache", "cuda_graph"))


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints work with."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    limits: Limits
    model_path: str
    settings: dict[str, Any]
    """The command line's settings, for /get_server_info."""
    adapters: Adapters
    see: See = blind
    """Places the images of a prompt."""

    def parse(self, body: dict[str, Any]) -> Call:
        """A `/generate` body as a call."""
        self.adapters.check(body.get("lora_path"))
        return parse_call(body, self.limits, self.tokenizer.encode, self.see)


class BadJson(Exception):
    """The body is no JSON; carries the parser's words."""


def build_app(service: Service) -> FastAPI:
    """The FastAPI application over a started scheduler."""
    app = FastAPI(title="Sluice embedded engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(EngineError, _refused)
    app.add_exception_handler(BadJson, _bad_json)
    _add_generation(app, service)
    _add_information(app, service)
    _add_control(app, service)
    _add_weights(app, service)
    _add_adapters(app, service)
    _add_groups(app, service)
    return app


# -- bodies and errors -----------------------------------------------------------------------------


def _json(content: Any, status: int = 200) -> Response:
    data = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    return Response(data, status_code=status, media_type="application/json")


def _error(message: str, status: int) -> Response:
    return _json({"error": {"message": message}}, status)


async def _refused(_: Request, error: Exception) -> Response:
    return _error(str(error), 400)


async def _bad_json(_: Request, error: Exception) -> Response:
    message = (
        f"1 validation error:\n  {{'type': 'json_invalid', 'msg': 'JSON decode error: {error}'}}"
    )
    return _json(
        {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400},
        400,
    )


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request; an empty body is an empty object."""
    raw = await request.body()
    try:
        body = json.loads(raw) if raw.strip() else {}
    except ValueError as error:
        raise BadJson(str(error)) from error
    if not isinstance(body, dict):
        raise EngineError(f"The body of {request.url.path} must be a JSON object.")
    return body


async def _ask(service: Service, action: Callable[[], Any], when_idle: bool = False) -> Any:
    return await asyncio.wrap_future(service.scheduler.ask(action, when_idle))


# -- generation ------------------------------------------------------------------------------------


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        started = time.perf_counter()
        body = await _body(request)
        # Images are decoded and cut up, which takes its time.
        seen = body.get("image_data")
        call = await asyncio.to_thread(service.parse, body) if seen else service.parse(body)
        refusal = _unable(service)
        if refusal is not None:
            return refusal
        if not await _finished(service, call, request):
            return Response(status_code=499)
        for one in call.requests:
            if one.finish and one.finish.get("status_code"):
                return _error(str(one.finish["message"]), 500)
        answers = [answer(one, service.tokenizer, started) for one in call.requests]
        return _json(answers if call.batched else answers[0])

    @app.get("/health")
    async def health() -> Response:
        failed = service.scheduler.failure is not None
        return Response(status_code=503 if failed else 200)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        scheduler = service.scheduler
        if scheduler.failure is not None:
            return Response(status_code=503)
        await _ask(service, lambda: None)
        if not scheduler.paused and scheduler.unable is None:
            body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            await _finished(service, service.parse(body))
        return Response(status_code=200 if scheduler.failure is None else 503)


def _unable(service: Service) -> Response | None:
    """Why nothing can be generated at present, if so."""
    scheduler = service.scheduler
    if scheduler.failure is not None:
        return _error(f"The engine failed: {scheduler.failure}", 500)
    return None if scheduler.unable is None else _error(scheduler.unable, 503)


async def _finished(service: Service, call: Call, request: Request | None = None) -> bool:
    """Run a call to its end. False when the client went away: its requests are then aborted."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell() -> None:
        loop.call_soon_threadsafe(done.set)

    call.done = tell
    service.scheduler.submit(call)
    waiter = asyncio.ensure_future(done.wait())
    if request is None:
        await waiter
        return True
    # After the body, the next message of a connection is its end.
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    await asyncio.wait((waiter, gone), return_when=asyncio.FIRST_COMPLETED)
    if done.is_set():
        gone.cancel()
        return True
    names = [one.rid for one in call.requests]
    await _ask(service, lambda: [service.scheduler.abort(name) for name in names])
    await waiter
    return False


# -- information -----------------------------------------------------------------------------------


def _add_information(app: FastAPI, service: Service) -> None:
    scheduler, runner = service.scheduler, service.scheduler.runner

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return _json(
            {
                "model_path": service.model_path,
                "tokenizer_path": service.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": scheduler.weight_version,
                "has_image_understanding": runner.sees,
                "has_audio_understanding": False,
                "model_type": runner.config.model_type,
                "architectures": runner.config.architectures,
            }
        )

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        return _json(
            {
                **service.settings,
                "model_path": service.model_path,
                "tokenizer_path": service.model_path,
                "engine": "embedded",
                "context_length": service.limits.context_length,
                "vocab_size": service.limits.vocab_size,
                "weight_version": scheduler.weight_version,
                "tp_size": 1,
                "pp_size": 1,
                "dp_size": 1,
                "paused": scheduler.paused,
                "released": sorted(scheduler.released),
                "decode_batch_sizes": list(runner.batch_sizes),
                "batched_prefill": runner.batched_prefill,
            }
        )

    @app.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": service.model_path,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sluice",
            "root": service.model_path,
            "parent": None,
            "max_model_len": service.limits.context_length,
        }
        return _json({"object": "list", "data": [model]})

    @app.get("/get_load")
    async def load() -> Response:
        running, waiting = scheduler.running, scheduler.waiting
        return _json(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": running + waiting,
                    "num_waiting_reqs": waiting,
                    "num_tokens": scheduler.tokens,
                    "num_pending_tokens": 0,
                    "ts_tic": time.perf_counter(),
                }
            ]
        )

    @app.get("/get_weight_version")
    @app.get("/weight_version")
    async def weight_version() -> Response:
        message = (
            "Endpoint '/get_weight_version' or '/weight_version' is deprecated. "
            "Please use '/model_info' instead."
        )
        content = {"object": "error", "message": message, "type": "404", "param": None, "code": 404}
        return _json(content, 404)


# -- control ---------------------------------------------------------------------------------------


def _add_control(app: FastAPI, service: Service) -> None:
    scheduler = service.scheduler

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await _body(request)
        rid = None if body.get("abort_all") else body.get("rid")
        if rid is not None and not isinstance(rid, str):
            raise EngineError(f"rid must be a string, got {rid!r}.")
        if rid is None and not body.get("abort_all"):
            raise EngineError("Either rid or abort_all=true must be given.")
        await _ask(service, lambda: scheduler.abort(rid))
        return Response(status_code=200)

    @app.post("/pause_generation")
    async def pause_generation(request: Request) -> Response:
        mode = (await _body(request)).get("mode", "abort")
        await _ask(service, lambda: scheduler.pause(mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def continue_generation() -> Response:
        await _ask(service, scheduler.resume)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        flushed = await _ask(service, scheduler.flush)
        return Response(
            FLUSHED if flushed else "Flush cache failed.\n",
            status_code=200 if flushed else 400,
            media_type="text/plain",
        )

    def memory(
        action: Callable[[frozenset[str]], None],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            named = (await _body(request)).get("tags")
            tags = (
                TAGS if named is None else frozenset(named if isinstance(named, list) else [named])
            )
            if not tags <= TAGS:
                raise EngineError(
                    f"tags must be among {', '.join(sorted(TAGS))}; got {sorted(map(str, tags))}."
                )
            await _ask(service, lambda: action(tags))
            return _json(None)

        return endpoint

    app.post("/release_memory_occupation")(memory(scheduler.release))
    app.post("/resume_memory_occupation")(memory(scheduler.reoccupy))


# -- weights ---------------------------------------------------------------------------------------


async def _update(
    service: Service, body: dict[str, Any], apply: Callable[[ModelRunner], int]
) -> Response:
    """Change weights as a request's common parameters say."""
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise EngineError(f"weight_version must be a string, got {version!r}.")
    flush = bool(body.get("flush_cache", True))
    scheduler = service.scheduler
    try:
        if body.get("abort_all_requests"):
            await _ask(service, lambda: scheduler.abort(None))
        await _ask(service, lambda: scheduler.update(apply, flush, version), when_idle=True)
    except EngineError as error:
        return _json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
    message = "Succeeded to update model weights."
    if version is not None:
        message += f" Weight version updated to {version}."
    return _json({"success": True, "message": message, "num_paused_requests": 0})


def _add_weights(app: FastAPI, service: Service) -> None:
    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> Response:
        body = await _body(request)
        folder = body.get("model_path")
        if not isinstance(folder, str):
            raise EngineError(f"model_path must be a string, got {folder!r}.")
        return await _update(service, body, lambda runner: runner.update_from_folder(Path(folder)))

    @app.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(request: Request) -> Response:
        body = await _body(request)
        blobs = body.get("serialized_named_tensors")
        if not isinstance(blobs, list) or not all(isinstance(b, str) for b in blobs) or not blobs:
            raise EngineError("serialized_named_tensors must be a list of base64 strings.")
        if body.get("load_format") != "safetensors":
            message = (
                f"load_format {body.get('load_format')!r} is not offered by this engine, which "
                "never loads pickles; send base64 of safetensors bytes with load_format "
                "'safetensors'."
            )
            return _json({"success": False, "message": message}, 400)
        if len(blobs) != 1:
            raise EngineError(
                f"serialized_named_tensors must hold 1 blob (tp_size 1), not {len(blobs)}."
            )
        return await _update(service, body, lambda runner: runner.update_from_blobs(blobs))


def _add_adapters(app: FastAPI, service: Service) -> None:
    scheduler, adapters = service.scheduler, service.adapters

    def route(path: str, change: Callable[[dict[str, Any], Put], int]) -> None:
        async def endpoint(request: Request) -> Response:
            body = await _body(request)

            def apply(runner: ModelRunner) -> int:
                return change(body, runner.update_from_tensors)

            told: dict[str, Any] = {"success": True, "error_message": None}
            try:
                await _ask(service, lambda: scheduler.update(apply, True, None), when_idle=True)
            except EngineError as error:
                told = {"success": False, "error_message": str(error)}
            loaded = {adapters.name: body.get("lora_path")} if adapters.name else {}
            status = 200 if told["success"] else 400
            return _json({**told, "loaded_adapters": loaded}, status)

        app.post(path)(endpoint)

    route("/load_lora_adapter", adapters.load)
    route("/unload_lora_adapter", adapters.unload)

    @app.post("/update_weight_version")
    async def update_weight_version(request: Request) -> Response:
        version = (await _body(request)).get("new_version")
        if not isinstance(version, str):
            raise EngineError(f"new_version must be a string, got {version!r}.")
        await _ask(service, lambda: scheduler.update(lambda runner: 0, False, version))
        message = f"Weight version updated to {version}"
        return _json({"success": True, "message": message, "new_version": version})


def _add_groups(app: FastAPI, service: Service) -> None:
    """Weights that a trainer broadcasts; nothing is generated meanwhile, as by a real server."""
    groups = Groups()

    def route(path: str, act: Callable[[dict[str, Any]], None], message: str) -> None:
        async def endpoint(request: Request) -> Response:
            body = await _body(request)
            try:
                await _ask(service, lambda: act(body))
            except EngineError as error:
                return _json({"success": False, "message": str(error)}, 400)
            return _json({"success": True, "message": message})

        app.post(path)(endpoint)

    route(
        "/init_weights_update_group",
        groups.join,
        "Succeeded to initialize custom process group.",
    )
    route(
        "/destroy_weights_update_group",
        groups.leave,
        "Succeeded to destroy custom process group.",
    )

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(request: Request) -> Response:
        body = await _body(request)
        return await _update(
            service, body, lambda runner: runner.update_from_tensors(groups.receive(body))
        )
