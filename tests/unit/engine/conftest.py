"""An embedded engine inside the test process: the real scheduler and model, without HTTP."""

import runpy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY_MODEL = Path(__file__).parents[2] / "contract" / "tiny_model.py"
build_model: Callable[..., Path] = runpy.run_path(str(TINY_MODEL))["build"]


class LocalEngine:
    """Takes /generate bodies and gives what the server would answer."""

    def __init__(self, model: Path, **settings: Any) -> None:
        from rlcore.engine.embedded.__main__ import parse_arguments
        from rlcore.engine.embedded.start import build_service

        argv = ["--model-path", str(model), "--port", "0"]
        for name, value in settings.items():
            argv += [f"--{name.replace('_', '-')}", str(value)]
        self.service = build_service(parse_arguments(argv))
        self.scheduler = self.service.scheduler
        self.scheduler.start()

    def submit(self, body: dict[str, Any]) -> Callable[[], Any]:
        """Start a call; what is returned waits for its answer."""
        from rlcore.engine.embedded.output import answer
        from rlcore.engine.embedded.protocol import parse_call

        call = parse_call(body, self.service.limits, self.service.tokenizer.encode)
        done = threading.Event()
        call.done = done.set
        self.scheduler.submit(call)

        def wait() -> Any:
            assert done.wait(120), "the engine did not finish"
            answers = [answer(one, self.service.tokenizer, 0.0) for one in call.requests]
            return answers if call.batched else answers[0]

        return wait

    def generate(self, body: dict[str, Any]) -> Any:
        """The answer to a call."""
        return self.submit(body)()

    def ask(self, action: Callable[[], Any], when_idle: bool = False) -> Any:
        """Run an action in the worker."""
        return self.scheduler.ask(action, when_idle).result(timeout=120)

    def wait_running(self, count: int = 1) -> None:
        """Return once `count` requests are being generated."""
        deadline = time.monotonic() + 60
        while self.scheduler.running < count:
            assert time.monotonic() < deadline, "nothing runs"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3."""
    return build_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return build_model(tmp_path_factory.mktemp("engine") / "other", seed=1)


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> Iterator[LocalEngine]:
    """An engine whose weights no test may change."""
    engine = LocalEngine(model_folder)
    yield engine
    engine.scheduler.stop()


@pytest.fixture
def start_engine() -> Iterator[Callable[..., LocalEngine]]:
    """Starts engines on a model folder, with command-line settings, for one test."""
    engines: list[LocalEngine] = []

    def start(model: Path, **settings: Any) -> LocalEngine:
        engines.append(LocalEngine(model, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.scheduler.stop()
