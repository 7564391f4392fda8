"""A reference that follows the policy, by Megatron: as FSDP2's, and in the same states. Over ranks
it is tested in `test_megatron_critic.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_families
from tiny_trainers import loaded

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rlcore.config.tree import AlgorithmConfig  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.megatron.trainer import MegatronTrainer  # noqa: E402

Make = Callable[..., Any]
FIXED = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.2)
FOLLOWS = FIXED.model_copy(update={"ref_update_interval": 2})


BIASED = "glm4_moe"
"""A family with biases of routers."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in ("qwen3", BIASED):
        tiny_families.build(family, folder / family)
    return folder


@pytest.fixture
def make(process_group: None, models: Path) -> Make:
    """A loaded trainer; settings of `train.*` by keyword."""

    def trainer(
        algorithm: AlgorithmConfig = FOLLOWS,
        kind: Any = MegatronTrainer,
        family: str = "qwen3",
        megatron: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        settings |= {"num_iterations": 9}
        return loaded(kind, models / family, algorithm, megatron=megatron, **settings)

    return trainer


def train(toy: Any, trainer: Any, iterations: range) -> list[float]:
    """The divergence of each iteration, from a trainer that holds the state before the first."""
    found = []
    for i in iterations:
        batch = toy.shares(toy.random_sequences(4, seed=i), 1, iteration=i)[0]
        found.append(trainer.train(trainer.loaded, f"s{i}", batch).metrics["kl_loss"])
    return found


def weights(network: Any) -> list[Any]:
    return [p.detach().clone() for chunk in network.chunks for p in chunk.parameters()]


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_policy_becomes_the_reference_and_a_resumed_trainer_has_the_same(
    precision: str, toy: Any, make: Make, tmp_path: Path
) -> None:
    straight = make(precision=precision)
    start = weights(straight._reference)
    assert [kl == 0.0 for kl in train(toy, straight, range(3))] == [True, False, True]
    assert not equal(weights(straight._reference), start)
    straight.save_state(tmp_path / "state")
    digest = straight.digest()
    train(toy, straight, range(3, 5))
    resumed = make(precision=precision)
    assert resumed.load_state(tmp_path / "state", "s2") == digest
    train(toy, resumed, range(3, 5))
    assert resumed.digest() == straight.digest() != digest
    assert equal(weights(resumed._reference), weights(straight._reference))
    # The start is the start again.
    resumed.load(resumed._folder, "start")
    assert equal(weights(resumed._reference), start)


def test_the_reference_follows_biases_of_routers_too(toy: Any, make: Make, tmp_path: Path) -> None:
    def biases(network: Any) -> list[Any]:
        named = network.chunks[0].named_buffers()
        return [tensor.clone() for name, tensor in named if name.endswith("expert_bias")]

    moving = {"family": BIASED, "megatron": {"moe_router_bias_update_rate": 0.01}}
    straight = make(**moving)
    start = biases(straight._reference)
    train(toy, straight, range(2))
    assert equal(biases(straight._reference), biases(straight._policy))
    assert start and not equal(biases(straight._reference), start)
    train(toy, straight, range(2, 3))
    assert not equal(biases(straight._reference), biases(straight._policy))
    straight.save_state(tmp_path / "state")
    resumed = make(**moving)
    assert resumed.load_state(tmp_path / "state", "s2") == straight.digest()
    assert equal(biases(resumed._reference), biases(straight._reference))
    for one in (straight, resumed):
        train(toy, one, range(3, 5))
    assert resumed.digest() == straight.digest()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_either_backend_reads_the_other_s(
    precision: str, toy: Any, make: Make, tmp_path: Path
) -> None:
    other, own = (make(kind=k, precision=precision) for k in (FsdpTrainer, MegatronTrainer))
    for name, trainer in (("fsdp", other), ("megatron", own)):
        train(toy, trainer, range(2))
        trainer.save_state(tmp_path / name)
    digests = other.digest(), own.digest()
    assert own.load_state(tmp_path / "fsdp", "a") == digests[0]
    assert other.load_state(tmp_path / "megatron", "a") == digests[1]


def test_states_of_runs_with_and_without_are_read_by_either(
    toy: Any, make: Make, tmp_path: Path
) -> None:
    fixed, follows = make(FIXED), make(FOLLOWS)
    start = weights(fixed._policy)
    for name, trainer in (("fixed", fixed), ("follows", follows)):
        train(toy, trainer, range(2))
        trainer.save_state(tmp_path / name)
    digests = fixed.digest(), follows.digest()
    assert digests[0] != digests[1], "the reference is a part of the state"
    assert follows.load_state(tmp_path / "fixed", "a") == digests[0]
    assert equal(weights(follows._reference), start)
    assert fixed.load_state(tmp_path / "follows", "a") == digests[1]
    assert equal(weights(fixed._reference), start)
    assert fixed.digest() != digests[1]


def test_what_is_measured_is_what_a_step_does(toy: Any, make: Make) -> None:
    """For `sluice lab`."""
    batch = toy.shares(toy.random_sequences(6), 1)[0]
    trainer, other = make(FIXED, clip_grad=1e9), make(FIXED, FsdpTrainer, clip_grad=1e9)
    before = trainer.digest()
    algorithm = AlgorithmConfig(advantage_estimator="gspo", use_rollout_logprobs=True)
    measured, gradient = trainer.measure(batch, algorithm)
    assert trainer.digest() == before
    assert (trainer.loaded, trainer.dirty) == ("start", False)
    for name, value in other.measure(batch, algorithm)[0].items():
        assert measured[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    norm = sum(float(part.double().square().sum()) for part in gradient) ** 0.5
    assert norm == pytest.approx(measured["grad_norm"], rel=1e-6)
    trained = make(algorithm, clip_grad=1e9).train("start", "next", batch).metrics
    for name in ("loss", "grad_norm", "pg_clipfrac", "effective_sample_size"):
        assert measured[name] == trained[name]
