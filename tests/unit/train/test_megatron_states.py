"""States of models with experts: either backend goes on from the other's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_families

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing  # noqa: E402

from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.conversion.convert import state_to_hf, state_to_torch_dist  # noqa: E402
from rlcore.models.hf_config import read_hf_config  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.megatron.cpu import without_cuda  # noqa: E402
from rlcore.train.megatron.model import Layout, build_model  # noqa: E402
from rlcore.train.megatron.trainer import MegatronTrainer  # noqa: E402
from rlcore.train.megatron.weights import named_weights  # noqa: E402

KINDS = {"fsdp": FsdpTrainer, "megatron": MegatronTrainer}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families") / "qwen3_moe"
    tiny_families.build("qwen3_moe", folder)
    return folder


@pytest.fixture
def make(process_group: None, model: Path) -> Callable[[str], Any]:
    def trainer(kind: str) -> Any:
        made: Any = KINDS[kind](
            TrainConfig(lr=1e-3, num_iterations=4),
            AlgorithmConfig(),
            temperature=1.0,
            seed=0,
            device="cpu",
        )
        made.load(model, "start")
        return made

    return trainer


@pytest.mark.parametrize(("first", "second"), [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_the_other_goes_on(
    first: str, second: str, toy: Any, make: Any, model: Path, tmp_path: Path
) -> None:
    batches = [toy.shares(toy.random_sequences(8, seed=n), 1)[0] for n in (1, 2)]
    straight, other = make(first), make(second)
    straight.train("start", "one", batches[0])
    straight.save_state(tmp_path / "state")
    assert other.load_state(tmp_path / "state", "one") == straight.digest()
    want = straight.train("one", "two", batches[1]).metrics
    got = other.train("one", "two", batches[1]).metrics
    for name in ("loss", "grad_norm", "rollout/log_probs"):
        assert got[name] == pytest.approx(want[name], rel=1e-4), name
    assert not state_to_hf(tmp_path / "state", tmp_path / "hf", model).left_out


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_itself_reads_a_state_that_is_converted(
    kind: str, toy: Any, make: Any, model: Path, tmp_path: Path
) -> None:
    trainer = make(kind)
    trainer.train("start", "one", toy.shares(toy.random_sequences(8), 1)[0])
    trainer.save_state(tmp_path / "state")
    padded = state_to_torch_dist(
        tmp_path / "state", tmp_path / "dist", model, "bfloat16", padded_vocab_size=128
    )
    assert padded.made == "torch_dist"
    arch = read_hf_config(model)
    want = dict(trainer.named_tensors("bfloat16"))
    make("megatron")  # Sets its groups of ranks up.
    with torch.no_grad(), without_cuda():
        fresh = build_model(arch, Layout(), "bfloat16")
        stored = dist_checkpointing.load(
            fresh.sharded_state_dict(), str(tmp_path / "dist" / "release")
        )
        fresh.load_state_dict(stored, strict=False)
        got = dict(named_weights(fresh, arch))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
