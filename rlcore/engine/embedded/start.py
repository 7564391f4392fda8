"""From a command line to a serving process."""

import argparse
import logging
from pathlib import Path

import psutil
import torch
import uvicorn

from rlcore.collector import keep_loaded
from rlcore.engine.embedded.adapter import Adapters
from rlcore.engine.embedded.calibrate import calibrate
from rlcore.engine.embedded.protocol import Limits, See, blind
from rlcore.engine.embedded.rows import Rows
from rlcore.engine.embedded.runner import ModelRunner
from rlcore.engine.embedded.scheduler import Scheduler
from rlcore.engine.embedded.server import Service, build_app
from rlcore.engine.embedded.tokenizer import Tokenizer, end_tokens
from rlcore.errors import DataError, EngineError
from rlcore.images.files import read_image
from rlcore.images.layout import SequenceImages
from rlcore.images.processor import ImageProcessor

log = logging.getLogger(__name__)

CACHE_SHARE = 0.25
"""Share of the free memory that running requests may reserve for keys and values. Lanes double when
they grow, so twice as much may be held.
"""
PROMPT_CACHE_SHARE = 0.05
"""Share of the free memory for prompts that may be asked again."""


def build_service(arguments: argparse.Namespace) -> Service:
    """Load the model and its tokenizer, calibrate, and set up an unstarted scheduler."""
    path = arguments.model_path
    tokenizer = Tokenizer(path)
    try:
        runner = ModelRunner(
            path,
            arguments.dtype,
            arguments.device,
            arguments.context_length,
            routed_experts=arguments.enable_return_routed_experts,
        )
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{path} could not be loaded: {error}") from error
    calibrate(runner)
    free = _free_memory(runner.device)
    scheduler = Scheduler(
        runner,
        Rows(
            arguments.max_running_requests,
            end_tokens(path, runner.text_config, tokenizer),
            runner.vocab_size,
            tokenizer.decode,
        ),
        max_total_tokens=int(free * CACHE_SHARE) // runner.kv_shape.bytes_per_token,
        prompt_cache_bytes=int(free * PROMPT_CACHE_SHARE),
        random_seed=arguments.random_seed,
        weight_version=arguments.weight_version,
    )
    settings = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "threads": arguments.threads,
        "max_running_requests": arguments.max_running_requests,
        "random_seed": arguments.random_seed,
        "host": arguments.host,
        "port": arguments.port,
        "enable_return_routed_experts": arguments.enable_return_routed_experts,
    }
    limits = Limits(
        runner.context_length, runner.vocab_size, arguments.enable_return_routed_experts
    )
    see = image_reader(path) if runner.sees else blind
    return Service(scheduler, tokenizer, limits, str(path), settings, Adapters(path), see)


def image_reader(path: Path) -> See:
    """What places the images of a request, by the image processor of the model's folder."""
    processor = ImageProcessor(path)

    def see(ids: list[int], images: list[str]) -> tuple[list[int], SequenceImages]:
        try:
            read = [read_image(image, None) for image in images]
            whole = processor.expand(ids, read)
            return whole, processor.lay_out(whole, processor.pixels(read))
        except DataError as error:
            raise EngineError(f"image_data cannot be used: {error}.") from error

    return see


def serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    torch.set_num_threads(arguments.threads)
    service = build_service(arguments)
    service.scheduler.start()
    keep_loaded()
    log.info("serving %s on http://%s:%d", arguments.model_path, arguments.host, arguments.port)
    uvicorn.run(
        build_app(service),
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=2,
    )
    service.scheduler.stop()
    return 0


def _free_memory(device: torch.device) -> int:
    """Bytes free on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
