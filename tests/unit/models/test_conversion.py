"""Conversions: bit-equal there and back, complete or refused, whole or absent, in little memory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_families

from rlcore.conversion.convert import (
    Conversion,
    hf_to_torch_dist,
    state_to_hf,
    torch_dist_to_hf,
)
from rlcore.conversion.folder import check_digests
from rlcore.conversion.sources import HfFolder
from rlcore.conversion.torch_dist import TorchDist
from rlcore.errors import ConfigError, Corrupt, DataError
from rlcore.models.hf_config import read_hf_config

torch = pytest.importorskip("torch")


def bits(folder: Path) -> dict[str, Any]:
    stored = HfFolder(folder)
    return {name: stored.read(name) for name in stored.shapes}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_there_and_back_is_bit_equal(family: str, dtype: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_families.build(family, model, dtype)
    there = hf_to_torch_dist(model, tmp_path / "dist")
    back = torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", model)
    assert same(bits(model), bits(tmp_path / "back"))
    assert (there.tensors, there.left_out) == (back.tensors, ())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype
    check_digests(tmp_path / "dist")
    check_digests(tmp_path / "back")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_families.build("qwen3", folder)
    return folder


def with_tensors(model: Path, folder: Path, change: dict[str, Any]) -> Path:
    """A copy of a model with some tensors replaced; None leaves one out."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = {k: v.clone() for k, v in {**bits(model), **change}.items() if v is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.stray.weight": torch.ones(2)}, "model.stray.weight is of no 'qwen3' model"),
        ({"model.norm.weight": torch.ones(63)}, r"norm.weight has shape \[63\], not \[64\]"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_reshaped_is_named(
    change: dict[str, Any], said: str, model: Path, tmp_path: Path
) -> None:
    broken = with_tensors(model, tmp_path / "broken", change)
    with pytest.raises(DataError, match=said):
        hf_to_torch_dist(broken, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_layers_that_predict_further_tokens_are_left_out_and_said(
    model: Path, tmp_path: Path
) -> None:
    extra = {"model.layers.2.eh_proj.weight": torch.ones(2), "lm_head.weight": torch.ones(96, 64)}
    done = hf_to_torch_dist(with_tensors(model, tmp_path / "more", extra), tmp_path / "dist")
    assert sorted(done.left_out) == sorted(extra)


def test_rows_of_padding_are_dropped_again(model: Path, tmp_path: Path) -> None:
    hf_to_torch_dist(model, tmp_path / "dist", padded_vocab_size=128)
    stored = TorchDist(tmp_path / "dist" / "release", read_hf_config(model))
    first = next(iter(stored_rules(model)))
    assert stored.read(first).shape == (128, 64)
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", model)
    assert same(bits(model), bits(tmp_path / "back"))
    with pytest.raises(ConfigError, match="the model has 96 tokens"):
        hf_to_torch_dist(model, tmp_path / "less", padded_vocab_size=64)


def stored_rules(model: Path) -> Iterator[Any]:
    from rlcore.weights.megatron import rules

    return rules(read_hf_config(model))


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_refused(
    model: Path, tmp_path: Path
) -> None:
    tiny_families.build("qwen2", tmp_path / "other")
    hf_to_torch_dist(model, tmp_path / "dist")
    with pytest.raises(DataError, match="is missing"):
        torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", tmp_path / "other")
    with pytest.raises(DataError, match="holds no torch_dist checkpoint"):
        torch_dist_to_hf(model, tmp_path / "back", model)
    file = tmp_path / "dist" / "release" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(DataError, match="does not hold"):
        torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", model)
    with pytest.raises(Corrupt, match=r"__0_0\.distcp is not the file"):
        check_digests(tmp_path / "dist")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dist", "other"]


def test_a_pickle_that_names_a_function_calls_nothing(model: Path, tmp_path: Path) -> None:
    import pickle

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    hf_to_torch_dist(model, tmp_path / "dist")
    (tmp_path / "dist" / "release" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(DataError, match="no checkpoint's metadata"):
        torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", model)
    assert not (tmp_path / "harm").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from rlcore.conversion.convert import hf_to_torch_dist
from rlcore.conversion.sources import HfFolder

reads, plain = iter(range(8)), HfFolder.read

def read(self, name, at=()):
    if next(reads, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, name, at)

HfFolder.read = read
hf_to_torch_dist(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_conversion_leaves_nothing_that_looks_whole(model: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, model, tmp_path / "dist"])
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".dist.partial"]
    hf_to_torch_dist(model, tmp_path / "dist")
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]
    with pytest.raises(ConfigError, match="exists already"):
        hf_to_torch_dist(model, tmp_path / "dist")


MEASURED = """
import sys
from pathlib import Path
from rlcore.conversion import safetensors
from rlcore.conversion.convert import hf_to_torch_dist, torch_dist_to_hf
from rlcore.conversion.torch_dist import TorchDistWriter

def anonymous():
    line = next(x for x in Path('/proc/self/status').read_text().splitlines() if 'RssAnon' in x)
    return int(line.split()[1]) * 1024

def noted(owner, name):
    plain = getattr(owner, name)
    def call(*args):
        held.append(anonymous())
        return plain(*args)
    setattr(owner, name, call)

def there_and_back(folder):
    hf_to_torch_dist(folder / 'model', folder / 'dist')
    torch_dist_to_hf(folder / 'dist', folder / 'back', folder / 'model')

there_and_back(Path(sys.argv[1]))  # imports
held = [anonymous()]
noted(TorchDistWriter, 'add')
noted(safetensors, '_write_tensor')
there_and_back(Path(sys.argv[2]))
print(max(held) - held[0])
"""


def test_memory_is_that_of_a_few_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_families.build("qwen3", tmp_path / "small" / "model")
    fields = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    monkeypatch.setitem(tiny_families.FAMILIES, "qwen3", fields)
    tiny_families.build("qwen3", tmp_path / "model")
    whole = sum(t.numel() * 4 for t in bits(tmp_path / "model").values())
    assert whole > 75e6
    argv = [sys.executable, "-c", MEASURED, tmp_path / "small", tmp_path]
    peak = int(subprocess.check_output(argv))
    assert 0 < peak < whole / 2, (peak, whole)


def test_a_trainer_s_state_becomes_a_folder(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    from rlcore.train.fsdp.shards import ShardWriter
    from rlcore.train.ranks import one_rank

    reference = tiny_families.build("glm4_moe", tmp_path / "model")
    with one_rank("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        trained = {
            f"model.{name}": DTensor.from_local(p.detach() * 2, mesh, [Shard(0)])
            for name, p in reference.named_parameters()
        }
        ShardWriter().write(tmp_path / "state", {**trained, "optimizer_steps": torch.tensor(3)})
    done = state_to_hf(tmp_path / "state", tmp_path / "out", tmp_path / "model", "bfloat16")
    assert isinstance(done, Conversion) and done.made == "huggingface"
    before, after = bits(tmp_path / "model"), bits(tmp_path / "out")
    for name, tensor in before.items():
        bias = name.endswith("e_score_correction_bias")
        expected = tensor if bias else (tensor * 2).to(torch.bfloat16)
        assert torch.equal(after[name], expected), name
    assert before.keys() == after.keys()


def test_a_state_of_adapters_becomes_the_merged_model(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    from rlcore.train.fsdp.shards import ShardWriter
    from rlcore.train.ranks import one_rank

    tiny_families.build("qwen3", tmp_path / "model", "bfloat16")
    before = bits(tmp_path / "model")
    name = "model.layers.1.self_attn.q_proj"
    out, into = before[f"{name}.weight"].shape
    a, b = torch.randn(2, into), torch.randn(out, 2)
    with one_rank("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        parts = {f"model.{name}.lora_A": a, f"model.{name}.lora_B": b}
        held = {key: DTensor.from_local(part, mesh, [Shard(0)]) for key, part in parts.items()}
        ShardWriter().write(tmp_path / "state", {**held, "optimizer_steps": torch.tensor(3)})
    state_to_hf(tmp_path / "state", tmp_path / "out", tmp_path / "model", lora_alpha=6.0)
    after = bits(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        expected = tensor.float()
        if key == f"{name}.weight":
            expected = expected + 3.0 * b @ a
            assert not torch.allclose(expected, tensor.float())
        torch.testing.assert_close(after[key], expected)


def test_a_folder_that_a_conversion_made_may_be_the_model_of_another(
    model: Path, tmp_path: Path
) -> None:
    hf_to_torch_dist(model, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", model)
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "again", tmp_path / "back")
    check_digests(tmp_path / "again")


def test_half_precision_comes_back_as_it_was(model: Path, tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in bits(model).items()}
    source = with_tensors(model, tmp_path / "half", half)
    hf_to_torch_dist(source, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", source)
    assert same(bits(source), bits(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_damaged_is_named(model: Path, tmp_path: Path, text: str) -> None:
    source = with_tensors(model, tmp_path / "m", {})
    (source / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match=r"model\.safetensors\.index\.json is no index of weights"):
        hf_to_torch_dist(source, tmp_path / "dist")


def test_a_place_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/dist cannot be written: Not a directory"):
        hf_to_torch_dist(model, tmp_path / "file" / "dist")
