"""What a trainer refuses, what it leaves untouched, and what it reports."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import ConfigError, Corrupt, TrainError


def with_advantages(toy: Any, value: float, number: int = 6, **cut: Any) -> Any:
    sequences = [replace(s, advantages=value) for s in toy.random_sequences(number)]
    return toy.shares(sequences, 1, **cut)[0]


def test_trains_only_from_the_state_it_holds(toy: Any, make_trainer: Any) -> None:
    trainer = make_trainer()
    batch = toy.shares(toy.random_sequences(5), 1)[0]
    with pytest.raises(TrainError, match=r"holds state 'start', not 'other'"):
        trainer.train("other", "next", batch)
    report = trainer.train("start", "next", batch)
    assert (trainer.loaded, trainer.dirty, report.optimizer_step) == ("next", False, 1)
    with pytest.raises(TrainError, match="not 'start'"):
        trainer.train("start", "next", batch)


def test_nothing_is_applied_of_a_step_that_is_not_finite(toy: Any, make_trainer: Any) -> None:
    trainer = make_trainer()
    before = trainer.digest()
    with pytest.raises(TrainError, match=r"iteration 0, optimizer step 1 of 1: the loss is nan"):
        trainer.train("start", "next", with_advantages(toy, math.nan))
    assert trainer.digest() == before
    assert (trainer.loaded, trainer.dirty) == ("start", False)
    good = toy.shares(toy.random_sequences(5), 1)[0]
    again = trainer.train("start", "next", good).metrics
    assert again["grad_norm"] == make_trainer().train("start", "next", good).metrics["grad_norm"]


def test_a_failure_after_the_first_step_leaves_the_trainer_dirty(
    toy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.save_state(tmp_path / "start")
    good, bad = (
        toy.random_sequences(4),
        [replace(s, advantages=math.inf) for s in toy.random_sequences(4)],
    )
    batch = toy.shares(good + bad, 1, num_steps=2)[0]
    with pytest.raises(TrainError, match="optimizer step 2 of 2"):
        trainer.train("start", "next", batch)
    with pytest.raises(TrainError, match="middle of a batch"):
        trainer.train("start", "next", batch)
    with pytest.raises(TrainError, match="middle of a batch"):
        trainer.save_state(tmp_path / "bad")
    trainer.load_state(tmp_path / "start", "start")
    fresh = make_trainer()
    assert trainer.digest() == fresh.digest()
    reports = [t.train("start", "next", toy.shares(good, 1)[0]).metrics for t in (trainer, fresh)]
    assert reports[0]["grad_norm"] == reports[1]["grad_norm"]
    assert trainer.digest() == fresh.digest()


def test_a_saved_state_goes_on_bit_for_bit(toy: Any, make_trainer: Any, tmp_path: Path) -> None:
    one, two = (toy.shares(toy.random_sequences(6, seed=s), 1)[0] for s in (1, 2))
    straight = make_trainer(lr_schedule="cosine", lr_warmup_steps=1)
    straight.train("start", "a", one)
    straight.save_state(tmp_path / "a")
    digest = straight.digest()
    straight.train("a", "b", two)
    resumed = make_trainer(lr_schedule="cosine", lr_warmup_steps=1)
    assert resumed.load_state(tmp_path / "a", "a") == digest
    resumed.train("a", "b", two)
    assert resumed.digest() == straight.digest()
    assert resumed.digest() != digest


def test_a_damaged_state_is_named(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save_state(tmp_path / "state")
    part = next((tmp_path / "state").glob("shard-*"))
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(Corrupt, match="state does not load"):
        trainer.load_state(tmp_path / "state", "start")
    assert trainer.loaded is None


def test_log_prob_gap_is_measured_and_gated(toy: Any, make_trainer: Any) -> None:
    batch = toy.shares(toy.random_sequences(5), 1)[0]
    gap = make_trainer().train("start", "next", batch).metrics["train_rollout_logprob_abs_diff"]
    assert 0 < gap < 1
    strict = make_trainer(algorithm=AlgorithmConfig(max_logprob_gap=gap / 2))
    before = strict.digest()
    with pytest.raises(TrainError, match=r"algorithm\.max_logprob_gap"):
        strict.train("start", "next", batch)
    assert strict.digest() == before and not strict.dirty
    two_steps = toy.shares(toy.random_sequences(5), 1, num_steps=2)[0]
    with pytest.raises(TrainError, match=r"algorithm\.max_logprob_gap"):
        strict.train("start", "next", two_steps)
    assert strict.digest() == before and not strict.dirty


def test_settings_that_need_the_engines_log_probs_say_so(toy: Any, make_trainer: Any) -> None:
    sequences = [replace(s, rollout_log_probs=None) for s in toy.random_sequences(5)]
    batch = replace(toy.shares(sequences, 1)[0], rollout_log_probs=False)
    trainer = make_trainer(algorithm=AlgorithmConfig(use_rollout_logprobs=True))
    with pytest.raises(TrainError, match=r"algorithm\.use_rollout_logprobs needs"):
        trainer.train("start", "next", batch)
    metrics = make_trainer().train("start", "next", batch).metrics
    assert "train_rollout_logprob_abs_diff" not in metrics


def test_old_log_probs_come_from_before_the_first_step(toy: Any, make_trainer: Any) -> None:
    """The same samples in both steps: the second sees how far the first went."""
    sequences = toy.random_sequences(6)
    batch = toy.shares(sequences + sequences, 1, num_steps=2)[0]
    metrics = make_trainer(lr=1e-3).train("start", "next", batch).metrics
    assert metrics["ratio_max"] > 1.0001
    one = toy.shares(sequences, 1)[0]
    assert make_trainer(lr=1e-3).train("start", "next", one).metrics["ratio_max"] == 1.0


def test_rollout_log_probs_as_old_ones(toy: Any, make_trainer: Any) -> None:
    trainer = make_trainer(algorithm=AlgorithmConfig(use_rollout_logprobs=True))
    metrics = trainer.train("start", "next", toy.shares(toy.random_sequences(5), 1)[0]).metrics
    assert metrics["log_ratio_abs_max"] == pytest.approx(
        metrics["train_rollout_logprob_abs_diff_max"], rel=1e-5
    )


def test_kl_is_against_the_starting_model(toy: Any, make_trainer: Any) -> None:
    trainer = make_trainer(algorithm=AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.5))
    batch = toy.shares(toy.random_sequences(5), 1)[0]
    first = trainer.train("start", "a", batch).metrics
    second = trainer.train("a", "b", batch).metrics
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert second["kl_loss"] > 1e-3
    assert second["loss"] == pytest.approx(second["pg_loss"] + 0.5 * second["kl_loss"], abs=1e-6)


def test_report_has_what_a_run_shows(toy: Any, make_trainer: Any) -> None:
    metrics = make_trainer().train("start", "a", toy.shares(toy.random_sequences(5), 1)[0]).metrics
    wanted = "loss pg_loss pg_clipfrac ppo_kl entropy grad_norm lr tokens samples tokens_per_s"
    assert set(wanted.split()) <= metrics.keys()
    phases = [metrics[f"seconds_{p}"] for p in ("forward_backward", "optimizer")]
    assert sum(phases) <= metrics["seconds_train"]


def test_a_model_with_another_output_is_refused(
    toy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    folder = toy.write_model(tmp_path / "granite", "granite", logits_scaling=2.0)
    with pytest.raises(ConfigError, match="'granite', whose log-probs"):
        make_trainer(folder)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        make_trainer(tmp_path)


def test_a_model_that_lacks_weights_is_refused(toy: Any, make_trainer: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = toy.write_model(tmp_path / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        make_trainer(folder)


def test_exported_weights_are_the_trainers(toy: Any, make_trainer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer()
    trainer.train("start", "next", toy.shares(toy.random_sequences(5), 1)[0])
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        trainer.export_hf(folder, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == getattr(torch, dtype)
        assert (folder / "tokenizer_config.json").is_file()
        weights = dict(model.named_parameters())
        for name, tensor in trainer.named_tensors(dtype):
            assert torch.equal(weights.pop(name), tensor)
        assert not weights


def test_updates_that_vanish_in_bfloat16_reach_the_master_weights(
    toy: Any, make_trainer: Any
) -> None:
    """Half of bfloat16's spacing at 0.02 is six times a step of 1e-5."""

    def matrices(trainer: Any) -> dict[str, torch.Tensor]:
        named = trainer.named_tensors("float32")
        return {n: t.detach().clone() for n, t in named if t.dim() == 2}

    trainer = make_trainer(lr=1e-5, precision="bfloat16")
    before = matrices(trainer)
    states = ["start", "a", "b", "c"]
    for seed, (old, new) in enumerate(pairwise(states)):
        trainer.train(old, new, toy.shares(toy.random_sequences(6, seed=seed), 1)[0])
    after = matrices(trainer)
    assert share_moved(before, after) > 0.99

    # The same direction three times, in weights that are bfloat16 themselves.
    pure = {n: t.to(torch.bfloat16, copy=True) for n, t in before.items()}
    rounded = {n: t.clone() for n, t in pure.items()}
    optimizer = torch.optim.AdamW(pure.values(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0)
    for _ in range(3):
        for name, weight in pure.items():
            weight.grad = (before[name] - after[name]).to(torch.bfloat16)
        optimizer.step()
    assert share_moved(rounded, pure) < 0.25


def share_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Weights that differ, of all."""
    moved = sum(int((before[name] != after[name]).sum()) for name in before)
    return moved / sum(tensor.numel() for tensor in before.values())
