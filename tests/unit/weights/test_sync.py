"""Syncs against a real engine process: both ways, and every way to fail."""

import tracemalloc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.weights import WeightsConfig
from rlcore.errors import EngineError, PluginError, SyncError
from rlcore.weights.sync import SyncSpec, WeightSync


@pytest.fixture
def spec(engine_url: str, model_folder: Path, tmp_path: Path) -> SyncSpec:
    return SyncSpec(
        urls=(engine_url,),
        version="1",
        transport="disk",
        dtype="float32",
        model_folder=model_folder,
        scratch=tmp_path / "weights",
        canary_prompts=4,
        canary_tolerance=1e-4,
        vocab_size=45,
        context_length=64,
        timeout_s=30.0,
    )


@pytest.fixture
def weight_sync() -> Iterator[WeightSync]:
    made = WeightSync(rank=0)
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_engine_holds_the_trainers_weights(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, version: Any, greedy: Any, transport: Any
) -> None:
    spec = replace(spec, transport=transport, version=f"{transport}-1")
    report = weight_sync.run(trainer, spec)
    assert report is not None and report.version == version() == f"{transport}-1"
    assert report.metrics["canary_abs_diff"] < 1e-5
    assert greedy()


def test_a_function_is_told_of_a_folder_before_the_engines_are(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, version: Any, tmp_path: Path
) -> None:
    (tmp_path / "hook.py").write_text(
        "from pathlib import Path\n"
        "def told(args, version_dir, rollout_engines):\n"
        "    assert args.transport == 'disk'\n"
        "    assert (Path(version_dir) / 'model.safetensors').is_file()\n"
        f"    Path({str(tmp_path / 'told')!r}).write_text(repr((version_dir, rollout_engines)))\n"
        "def failing(args, version_dir, rollout_engines):\n"
        "    raise OSError('the store is away')\n"
    )

    def with_hook(name: str) -> SyncSpec:
        weights = WeightsConfig(custom_update_weight_post_write_path=f"{tmp_path}/hook.py:{name}")
        return replace(spec, version=name, weights=weights)

    weight_sync.run(trainer, with_hook("told"))
    said = (str(spec.scratch / "weights-told"), list(spec.urls))
    assert (tmp_path / "told").read_text() == repr(said)
    with pytest.raises(PluginError, match=r"post_write_path = .*OSError: the store is away"):
        weight_sync.run(trainer, with_hook("failing"))
    assert version() == "told"


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_many_small_buckets(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, version: Any, transport: Any
) -> None:
    spec = replace(spec, transport=transport, version=f"small-{transport}", bucket_bytes=5000)
    report = weight_sync.run(trainer, spec)
    assert report is not None and report.metrics["canary_abs_diff"] < 1e-5
    assert version() == f"small-{transport}"


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_no_more_than_two_buckets_are_held(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, transport: Any
) -> None:
    held: list[int] = [0]
    most: list[int] = [0]

    def freed(size: int) -> None:
        held[0] -= size

    class Counted:
        """Counts the bytes of what it gives and is not given up yet."""

        log_probs = trainer.log_probs

        def named_tensors(self, dtype: Any, device: str) -> Iterator[Any]:
            for name, tensor in trainer.named_tensors(dtype, device):
                size = tensor.nbytes
                weakref.finalize(tensor, freed, size)
                held[0] += size
                most[0] = max(most[0], held[0])
                yield name, tensor
                del tensor

    limit = 20_000
    spec = replace(spec, transport=transport, version=f"2-{transport}", bucket_bytes=limit)
    tracemalloc.start()
    weight_sync.run(Counted(), spec)  # type: ignore[arg-type]
    bodies = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = max(t.nbytes for _, t in trainer.named_tensors("float32"))
    whole = sum(t.nbytes for _, t in trainer.named_tensors("float32"))
    # The tensor that did not fit into the second is there already.
    assert limit < most[0] <= 2 * limit + largest < whole
    assert held[0] == 0
    assert bodies < 4 * 2**20


def test_canary_finds_a_weight_that_did_not_travel(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, greedy: Any, engine_url: str
) -> None:
    class Forgetful:
        """A trainer that leaves one weight out of what it sends."""

        log_probs = trainer.log_probs

        def named_tensors(self, dtype: Any, device: str) -> Iterator[Any]:
            for name, tensor in trainer.named_tensors(dtype, device):
                if name != "model.layers.1.mlp.up_proj.weight":
                    yield name, tensor

    spec = replace(spec, transport="tensor", version="lossy")
    with pytest.raises(
        SyncError, match=rf"engine {engine_url} differs .* weights.canary_tolerance = 0.0001"
    ):
        weight_sync.run(Forgetful(), spec)  # type: ignore[arg-type]
    assert greedy(), "the engine must not stay paused"


def test_engine_goes_on_after_a_refused_update(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, greedy: Any, version: Any
) -> None:
    class Misnamed:
        """A trainer whose weights the engine does not know."""

        log_probs = trainer.log_probs

        def named_tensors(self, dtype: Any, device: str) -> Iterator[Any]:
            for name, tensor in trainer.named_tensors(dtype, device):
                yield f"not.{name}", tensor

    before = version()
    with pytest.raises(EngineError):
        weight_sync.run(Misnamed(), replace(spec, version="bad"))  # type: ignore[arg-type]
    assert greedy()
    assert version() == before


def test_a_dead_engine_is_named_and_the_others_go_on(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, greedy: Any
) -> None:
    dead = "http://127.0.0.1:9"
    with pytest.raises(EngineError, match=dead):
        weight_sync.run(trainer, replace(spec, urls=(*spec.urls, dead)))
    assert greedy()


def test_last_confirmed_folder_stays_until_the_next(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync
) -> None:
    for number in ("1", "2"):
        weight_sync.run(trainer, replace(spec, version=number))
        assert [p.name for p in spec.scratch.iterdir()] == [f"weights-{number}"]


def test_other_ranks_take_part_in_the_gathers(trainer: Any, spec: SyncSpec) -> None:
    seen = []

    class Watched:
        """Counts what is drawn."""

        log_probs = trainer.log_probs

        def named_tensors(self, dtype: Any, device: str) -> Iterator[Any]:
            for name, tensor in trainer.named_tensors(dtype, device):
                seen.append(name)
                yield name, tensor

    assert WeightSync(rank=1).run(Watched(), spec) is None  # type: ignore[arg-type]
    everything = len(seen)
    assert everything == len(list(trainer.named_tensors("float32")))
    failing = WeightSync(rank=0)
    with pytest.raises(EngineError):
        failing.run(Watched(), replace(spec, urls=("http://127.0.0.1:9",), transport="tensor"))  # type: ignore[arg-type]
    failing.close()
    assert len(seen) == 2 * everything
