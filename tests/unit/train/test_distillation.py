"""On-policy distillation: the teacher's part of the advantages, and who is refused as one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import ConfigError, TrainError


@pytest.fixture(scope="module")
def teacher_folder(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary, wider than the student."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    return Path(toy.write_model(folder, hidden_size=48))


def following(folder: Path, **more: Any) -> AlgorithmConfig:
    return AlgorithmConfig(use_opd=True, opd_teacher_load=str(folder), **more)


def of_response(trainer: Any, sequences: list[Any]) -> list[list[float]]:
    rows = trainer.log_probs([list(s.tokens) for s in sequences])
    return [row[-s.response_length :] for s, row in zip(sequences, rows, strict=True)]


def test_the_distance_to_the_teacher_is_taken_off_the_advantages(
    toy: Any, make_trainer: Any, teacher_folder: Path
) -> None:
    sequences = toy.random_sequences(9)
    student, teacher = (
        of_response(make_trainer(*folder), sequences) for folder in ((), (teacher_folder,))
    )
    behind = [
        [s - t for s, t in zip(*pair, strict=True)] for pair in zip(student, teacher, strict=True)
    ]
    by_hand = [
        replace(s, advantages=[s.advantages - 0.7 * x for x in xs])
        for s, xs in zip(sequences, behind, strict=True)
    ]
    plain = make_trainer().train("start", "a", toy.shares(by_hand, 1)[0]).metrics
    trainer = make_trainer(algorithm=following(teacher_folder, opd_kl_coef=0.7))
    metrics = trainer.train("start", "a", toy.shares(sequences, 1)[0]).metrics
    assert metrics["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], abs=1e-5)
    trained = [
        x
        for s, xs in zip(sequences, behind, strict=True)
        for x, m in zip(xs, s.loss_mask or [1] * len(xs), strict=True)
        if m
    ]
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(sum(trained) / len(trained), abs=1e-6)
    assert sum(abs(x) for x in trained) > 0.1


def test_a_teacher_on_a_server_counts_as_one_that_the_trainer_holds(
    toy: Any, make_trainer: Any, teacher_folder: Path
) -> None:
    sequences = toy.random_sequences(9)
    said = of_response(make_trainer(teacher_folder), sequences)
    told = [replace(s, teacher_log_probs=row) for s, row in zip(sequences, said, strict=True)]
    held = make_trainer(algorithm=following(teacher_folder, opd_kl_coef=0.7))
    server = make_trainer(algorithm=AlgorithmConfig(use_opd=True, opd_kl_coef=0.7))
    expected = held.train("start", "a", toy.shares(sequences, 1)[0]).metrics
    batch = toy.shares(told, 1)[0]
    found = server.train("start", "a", replace(batch, teacher_log_probs=True)).metrics
    for name in ("loss", "grad_norm", "rollout/opd_reverse_kl"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6)
    with pytest.raises(TrainError, match=r"no log-probs of the teacher; set rollout\.teacher_url"):
        server.train("a", "b", batch)


def test_without_rewards_the_student_comes_to_the_teacher(
    toy: Any, make_trainer: Any, teacher_folder: Path
) -> None:
    sequences = [replace(s, advantages=0.0, loss_mask=None) for s in toy.random_sequences(6)]
    wanted = of_response(make_trainer(teacher_folder), sequences)
    trainer = make_trainer(algorithm=following(teacher_folder), lr=3e-3, num_iterations=99)

    def distance() -> float:
        pairs = zip(of_response(trainer, sequences), wanted, strict=True)
        return sum((a - b) ** 2 for xs, ys in pairs for a, b in zip(xs, ys, strict=True))

    before = distance()
    for k in range(12):
        batch = toy.shares(sequences, 1, iteration=k)[0]
        trainer.train(trainer.loaded, f"s{k}", batch)
    assert distance() < 0.3 * before


def test_a_teacher_that_reads_other_tokens_is_refused(
    toy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    other = toy.write_model(tmp_path / "other", vocab_size=toy.vocab + 1)
    with pytest.raises(ConfigError, match=r"has a vocabulary of 46 tokens, the model one of 45"):
        make_trainer(algorithm=following(other))
    with pytest.raises(ConfigError, match=r"is not a folder on the trainer's machine"):
        make_trainer(algorithm=following(tmp_path / "gone"))
