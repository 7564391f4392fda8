"""Files that could run code when they are read are not read that way."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlcore.config.tree import ModelConfig
from rlcore.errors import ConfigError
from rlcore.preflight import check_model
from rlcore.train.fsdp.model import load_policy
from rlcore.train.fsdp.shards import METADATA, ShardReader

REPO = Path(__file__).parents[2]
UNPICKLES = re.compile(
    r"pickle\.loads?\(|torch\.load\((?!.*weights_only=True\))|np\.load\(|joblib|allow_pickle|dill"
)
ALLOWED = {
    # Both ends are processes of the run, on one socket pair.
    "rlcore/rollout/rewards/protocol.py",
}


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_else_in_the_sources_unpickles() -> None:
    found = {
        str(path.relative_to(REPO))
        for part in ("rlcore", "flows", "tasks", "examples")
        for path in (REPO / part).rglob("*.py")
        if UNPICKLES.search(path.read_text())
    }
    assert found <= ALLOWED


def test_the_metadata_of_a_state_makes_nothing_but_a_plan(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(Bomb(tmp_path / "bang")))
    with pytest.raises(pickle.UnpicklingError, match="which no plan holds"):
        ShardReader(tmp_path).read_metadata()
    nested = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    (tmp_path / METADATA).write_bytes(nested)
    with pytest.raises(pickle.UnpicklingError, match="which no plan holds"):
        ShardReader(tmp_path).read_metadata()
    assert not (tmp_path / "bang").exists()


@pytest.fixture
def pickled_model(tmp_path: Path) -> Path:
    """A model folder whose weights are a pickle that would run code."""
    folder = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"x": Bomb(tmp_path / "bang")}, folder / "pytorch_model.bin")
    return folder


def test_a_model_of_pickles_is_refused(pickled_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors file; convert"):
        check_model(ModelConfig(path=str(pickled_model)))
    with pytest.raises(ConfigError, match=r"does not load .*safetensors"):
        load_policy(pickled_model)
    assert not (pickled_model.parent / "bang").exists()


def test_an_engine_refuses_a_model_of_pickles(pickled_model: Path) -> None:
    from rlcore.engine.embedded.runner import ModelRunner

    with pytest.raises(OSError, match="safetensors"):
        ModelRunner(pickled_model, "float32", "cpu")
    assert not (pickled_model.parent / "bang").exists()
