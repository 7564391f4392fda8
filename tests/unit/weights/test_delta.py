"""Weights that reach engines as changes through the store: exact, restartable, and mended."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config.weights import WeightsConfig
from rlcore.errors import Corrupt, SyncError
from rlcore.store.deltas import delta_keys, read_head, read_index
from rlcore.store.objects import Objects
from rlcore.weights.delta import codec
from rlcore.weights.delta.mirror import Mirror
from rlcore.weights.delta.publisher import Publisher
from rlcore.weights.delta.server import MirrorServer, MirrorSpec
from rlcore.weights.sync import SyncSpec, WeightSync

RUN = "far"


def round_trip(old: Any, new: Any) -> int:
    """Bytes of the changes, once they were found to give what they are of."""
    data = b"".join(codec.encode(old, new))
    onto = np.zeros_like(new) if old is None else old.copy()
    codec.decode(memoryview(data), onto)
    assert np.array_equal(onto, new)
    return len(data)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_any_bits_come_back(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BLOCK", 1000)
    draw = np.random.default_rng(0)
    kind = f"u{width}"
    for size in (0, 1, 999, 1000, 1001, 5003):
        old = draw.integers(0, 256, size * width, np.uint8).view(kind)
        random = draw.integers(0, 256, size * width, np.uint8).view(kind)
        few = np.where(draw.random(size) < 0.002, random, old)
        for new in (old, random, few, np.zeros_like(old), ~old):
            round_trip(old, new)
            round_trip(None, new)


def test_few_changes_by_a_neighbour_are_few_bytes() -> None:
    draw = np.random.default_rng(0)
    old = draw.integers(0, 2**16, 1_000_000, np.uint16)
    step = draw.choice(np.array([1, 0xFFFF], np.uint16), len(old))
    new = old + step * (draw.random(len(old)) < 0.01)
    assert round_trip(old, new) < 0.012 * old.nbytes
    assert round_trip(old, old) < 100


@pytest.mark.parametrize("cut", [0, 5, 30, -1])
def test_damaged_changes_are_refused(cut: int) -> None:
    data = b"".join(codec.encode(None, np.arange(5000, dtype=np.uint16)))
    with pytest.raises(Corrupt, match="changes of weights"):
        codec.decode(memoryview(data[:cut] if cut >= 0 else data + b"x"), np.zeros(5000, np.uint16))
    with pytest.raises(Corrupt, match="changes of weights"):
        codec.decode(memoryview(data), np.zeros(100, np.uint16))


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects.open(tmp_path / "store")


def weights(seed: int) -> list[tuple[str, Any]]:
    """A model's tensors; of another seed, another few elements differ."""
    import torch

    base = torch.Generator().manual_seed(0)
    made = {
        "a": torch.randn(300, 40, generator=base).bfloat16(),
        "b": torch.randn(70, generator=base),
        "c": torch.zeros(5, 5, dtype=torch.bfloat16),
    }
    made["a"].view(-1)[seed * 17 :: 97] *= 1.01
    made["b"][seed] += 1.0
    return list(made.items())


def same(folder: Path, seed: int) -> bool:
    """Whether a folder holds these weights, bit for bit."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    assert json.loads((folder / "config.json").read_text()) == {"of": seed}
    return found.keys() == {"a", "b", "c"} and all(
        torch.equal(found[name], tensor) for name, tensor in weights(seed)
    )


def publisher(objects: Objects, folder: Path, interval: int = 20) -> Publisher:
    return Publisher(objects, RUN, folder, base_interval=interval, part_bytes=4000)


def publish(made: Publisher, seed: int) -> Any:
    return made.publish(str(seed), json.dumps({"of": seed}), iter(weights(seed)))


def test_a_mirror_follows_from_any_version(objects: Objects, tmp_path: Path) -> None:
    made = publisher(objects, tmp_path / "own")
    near, far = (Mirror(objects, tmp_path / name, 4000) for name in ("near", "far"))
    for seed in range(4):
        ref = publish(made, seed)
        made.confirmed()
        assert same(near.pull(ref), seed)
        near.keep_only(ref)
        assert len(list((tmp_path / "near").iterdir())) == 1
        if seed in (1, 3):
            assert same(far.pull(ref), seed), "two versions on"
    assert same(Mirror(objects, tmp_path / "new", 4000).pull(ref), 3)
    assert made.figures["delta_share"] < 0.2


def test_a_whole_version_comes_in_time_and_the_old_ones_go(
    objects: Objects, tmp_path: Path
) -> None:
    made = publisher(objects, tmp_path / "own", interval=2)
    for seed in range(5):
        ref = publish(made, seed)
        assert len(read_index(objects, ref).chain) == seed % 3
        assert publish(made, seed) == ref, "nothing is published twice"
        made.confirmed()
        versions = {key.split("/")[3] for key in objects.list("runs/far/deltas")} - {"HEAD.json"}
        assert len(versions) == seed % 3 + 1
    assert delta_keys(objects, RUN) == set(objects.list("runs/far/deltas"))


def test_another_trainer_goes_on_and_says_nothing_twice(objects: Objects, tmp_path: Path) -> None:
    first = publish(publisher(objects, tmp_path / "own"), 1)
    for folder in ("own", "elsewhere"):
        assert publish(publisher(objects, tmp_path / folder), 1) == first
    after = publish(publisher(objects, tmp_path / "own"), 2)
    assert read_head(objects, RUN) == after
    assert read_index(objects, after).chain == (first,)
    assert same(Mirror(objects, tmp_path / "mirror", 4000).pull(after), 2)


def test_a_damaged_copy_is_fetched_anew(objects: Objects, tmp_path: Path) -> None:
    made = publisher(objects, tmp_path / "own")
    mirror = Mirror(objects, tmp_path / "mirror", 4000)
    file = next(mirror.pull(publish(made, 1)).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert same(mirror.pull(publish(made, 2)), 2)


def test_what_the_store_has_lost_is_published_whole(objects: Objects, tmp_path: Path) -> None:
    made = publisher(objects, tmp_path / "own")
    first, second = publish(made, 1), publish(made, 2)
    objects.delete(read_index(objects, first).parts[0].key)
    mirror = Mirror(objects, tmp_path / "mirror", 4000)
    with pytest.raises(Corrupt, match=r"part-00000 is missing"):
        mirror.pull(second)
    assert delta_keys(objects, RUN) >= {second.key}
    whole = made.publish_whole()
    assert same(mirror.pull(whole), 2) and not read_index(objects, whole).chain
    # A trainer that finds it damaged begins anew as well.
    objects.put(whole.key, b"{}")
    again = publish(publisher(objects, tmp_path / "other"), 2)
    assert not read_index(objects, again).chain


@pytest.fixture
def mirror(objects: Objects, tmp_path: Path) -> Iterator[MirrorServer]:
    server = MirrorServer(MirrorSpec(RUN, objects.root, str(tmp_path / "mirror"), 5000))
    server.start()
    yield server
    server.stop()


def move_a_few(trainer: Any) -> None:
    """Change every 50th weight."""
    import torch

    with torch.no_grad():
        for _, parameter in trainer._held()[0].weights():
            local = parameter.to_local()
            local += 0.01 * (torch.arange(local.numel()).reshape(local.shape) % 50 == 0)


def test_engines_hold_the_trainer_s_weights(
    trainer: Any,
    engine_url: str,
    model_folder: Path,
    objects: Objects,
    mirror: MirrorServer,
    tmp_path: Path,
    version: Any,
) -> None:
    spec = SyncSpec(
        urls=(engine_url,),
        version="delta-1",
        transport="delta",
        dtype="float32",
        model_folder=model_folder,
        scratch=tmp_path / "weights",
        canary_prompts=4,
        canary_tolerance=1e-4,
        vocab_size=45,
        context_length=64,
        timeout_s=30.0,
        bucket_bytes=5000,
        weights=WeightsConfig(transport="delta"),
        run_id=RUN,
        mirrors=(mirror.url,),
    )
    sync = WeightSync(0, objects=objects)
    shares = []
    for number in range(3):
        report = sync.run(trainer, replace(spec, version=f"delta-{number}"))
        assert report is not None and version() == f"delta-{number}"
        assert report.metrics["canary_abs_diff"] < 1e-5
        shares.append(report.metrics["delta_share"])
        if number == 1:
            objects.delete_tree("runs/far/deltas")
            shutil.rmtree(tmp_path / "mirror")
        move_a_few(trainer)
    assert shares[1] < 0.1 < shares[0]
    assert shares[2] > 0.5, "what the store has lost is sent whole"
    with pytest.raises(SyncError, match=r"mirror of weights at http://127.0.0.1:9 does not answer"):
        sync.run(trainer, replace(spec, version="4", mirrors=("http://127.0.0.1:9",)))
    sync.close()


def test_a_mirror_reads_nothing_else(mirror: MirrorServer) -> None:
    import httpx

    for key in ("runs/other/deltas/1/index.json", "runs/far/deltas/../../x", "runs/far/run.json"):
        body = {"key": key, "sha256": "0" * 64}
        answer = httpx.post(f"{mirror.url}/pull", json=body, trust_env=False)
        assert answer.status_code == 409 and answer.json()["error"]
    assert httpx.post(f"{mirror.url}/pull", content=b"{", trust_env=False).status_code == 409
