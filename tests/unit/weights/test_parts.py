"""Canary and files on their own."""

import json
import math
from pathlib import Path

import pytest
import torch

from rlcore.errors import SyncError
from rlcore.weights.canary import canary_sequences, check
from rlcore.weights.export import buckets, buckets_and_last, write_hf_folder, write_tensors
from rlcore.weights.wire import safetensors_parts


def test_canary_sequences_are_fixed_and_fit() -> None:
    first = canary_sequences(4, 45, 64)
    assert first == canary_sequences(4, 45, 64)
    assert {len(s) for s in first} == {32}
    assert all(0 <= token < 45 for s in first for token in s)
    assert {len(s) for s in canary_sequences(2, 45, 10)} == {9}


def test_canary_judges_by_the_mean() -> None:
    assert check("u", [[0.0, 1.0]], [[0.5, 1.0]], 0.3) == 0.25
    with pytest.raises(SyncError, match=r"engine u differs .* by 0\.25 "):
        check("u", [[0.0, 1.0]], [[0.5, 1.0]], 0.2)
    with pytest.raises(SyncError, match="by nan"):
        check("u", [[0.0]], [[math.nan]], 0.2)
    with pytest.raises(SyncError, match="different numbers"):
        check("u", [[0.0]], [[0.0, 1.0]], 0.2)


def test_buckets_are_bounded_and_lose_nothing() -> None:
    tensors = [(str(k), torch.ones(n)) for k, n in enumerate((3, 3, 10, 1, 1))]
    cut = [list(bucket) for bucket in buckets(iter(tensors), 24)]
    assert cut == [["0", "1"], ["2"], ["3", "4"]]
    assert list(buckets(iter([]), 24)) == []
    assert [last for _, last in buckets_and_last(iter(tensors), 24)] == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_on_the_wire_are_a_safetensors_file(dtype: torch.dtype) -> None:
    from safetensors.torch import load

    tensors = {"a": torch.randn(3, 5).to(dtype), "b.weight": torch.randn(7).to(dtype)}
    parts = safetensors_parts(tensors)
    assert parts[1].nbytes == tensors["a"].nbytes
    read = load(b"".join(parts))
    assert {name: value.shape for name, value in read.items()} == {
        name: value.shape for name, value in tensors.items()
    }
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_large_models_are_split_with_an_index(tmp_path: Path, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    write_hf_folder(tmp_path / "out", model_folder, weights, "float32")
    (tmp_path / "out" / "model.safetensors").unlink()
    write_tensors(tmp_path / "out", weights, shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, before), after in zip(weights, again.parameters(), strict=True):
        assert torch.equal(before, after), name


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, model_folder: Path) -> None:
    def failing() -> object:
        yield "a", torch.ones(2)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError):
        write_hf_folder(tmp_path / "out", model_folder, failing(), "float32")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
