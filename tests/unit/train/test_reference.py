"""A reference that follows the policy: which policy it is depends on the iteration alone, however
often the run was stopped.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.config.tree import AlgorithmConfig

FIXED = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.2)
FOLLOWS = FIXED.model_copy(update={"ref_update_interval": 2})
Weights = dict[str, Tensor]


def weights(model: Any) -> Weights:
    return {name: p.detach().full_tensor().clone() for name, p in model.weights()}


def equal(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a | b)


def batch(toy: Any, i: int) -> Any:
    return toy.shares(toy.random_sequences(5, seed=i), 1, iteration=i)[0]


def train(toy: Any, trainer: Any, iterations: range) -> list[Any]:
    """Reports of iterations, from a trainer that holds the state before the first."""
    return [trainer.train(trainer.loaded, f"s{i}", batch(toy, i)) for i in iterations]


def test_the_policy_becomes_the_reference_every_so_many_iterations(
    toy: Any, make_trainer: Any
) -> None:
    trainer = make_trainer(algorithm=FOLLOWS, num_iterations=9)
    policies = [weights(trainer._policy)]
    for i in range(5):
        assert equal(weights(trainer._reference), policies[i // 2 * 2])
        [report] = train(toy, trainer, range(i, i + 1))
        assert (report.metrics["kl_loss"] == 0.0) == (i % 2 == 0)
        policies.append(weights(trainer._policy))
    assert not equal(policies[2], policies[4])


@pytest.mark.parametrize("stopped", [2, 3])
def test_a_resumed_trainer_has_the_same_reference_bit_for_bit(
    toy: Any, make_trainer: Any, tmp_path: Path, stopped: int
) -> None:
    straight = make_trainer(algorithm=FOLLOWS, num_iterations=9)
    train(toy, straight, range(stopped))
    straight.save_state(tmp_path / "state")
    digest = straight.digest()
    train(toy, straight, range(stopped, 6))
    resumed = make_trainer(algorithm=FOLLOWS, num_iterations=9)
    train(toy, resumed, range(2))  # Whatever it held before.
    assert resumed.load_state(tmp_path / "state", f"s{stopped - 1}") == digest
    train(toy, resumed, range(stopped, 6))
    assert resumed.digest() == straight.digest() != digest
    assert equal(weights(resumed._reference), weights(straight._reference))


def test_the_start_is_the_start_again(toy: Any, make_trainer: Any, model_folder: Path) -> None:
    trainer = make_trainer(algorithm=FOLLOWS, num_iterations=9)
    before = trainer.digest()
    train(toy, trainer, range(2))
    trainer.load(model_folder, "start")
    assert trainer.digest() == before
    assert equal(weights(trainer._reference), weights(trainer._policy))


def test_states_of_runs_with_and_without_are_read_by_either(
    toy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    fixed, follows = (make_trainer(algorithm=a, num_iterations=9) for a in (FIXED, FOLLOWS))
    start = weights(fixed._policy)
    for name, trainer in (("fixed", fixed), ("follows", follows)):
        train(toy, trainer, range(2))
        trainer.save_state(tmp_path / name)
    digests = fixed.digest(), follows.digest()
    assert digests[0] != digests[1], "the reference is a part of the state"
    # A fork may have other settings: it goes on with its own, and believes the state all the same.
    assert follows.load_state(tmp_path / "fixed", "a") == digests[0]
    assert equal(weights(follows._reference), start)
    other = make_trainer(algorithm=FIXED, num_iterations=9)
    assert other.load_state(tmp_path / "follows", "a") == digests[1]
    assert equal(weights(other._reference), start)
    assert other.digest() != digests[1]


def test_two_ranks_save_what_one_reads(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path, tmp_path: Path
) -> None:
    cuts = [toy.shares(toy.random_sequences(6, seed=i), 2, iteration=i) for i in range(3)]
    two = two_ranks.run(model_folder, cuts, algorithm=FOLLOWS, save=tmp_path / "two")
    alone = make_trainer(algorithm=FOLLOWS)
    assert alone.load_state(tmp_path / "two", "a") == two[0]["saved"]
    assert not equal(weights(alone._reference), weights(alone._policy))
