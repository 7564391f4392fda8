"""The same batch gives the same numbers on any number of ranks, in any packing, and in plain
torch.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import padded
from rlcore.train.determinism import make_deterministic

TOLERANCE = 1e-5


def plain_step(folder: Path, sequences: list[Any], temperature: float = 1.0) -> tuple[float, float]:
    """Loss and gradient norm by transformers on a padded batch and autograd, ratio 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    totals = Totals.of(s.trainable_tokens for s in sequences)
    batch = padded(sequences, totals, "token_mean")
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    log_probs = (logits / temperature).log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    ratio = (log_probs - log_probs.detach()).exp()
    loss = -(ratio * batch.advantages * batch.loss_weights).sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return loss.item(), norm.item()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_ranks_and_micro_batches_do_not_change_loss_or_gradient(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path, micro_batches: int
) -> None:
    sequences = toy.random_sequences(13)
    loss, norm = plain_step(model_folder, sequences)
    one = make_trainer().train(
        "start", "next", toy.shares(sequences, 1, micro_batches=micro_batches)[0]
    )
    two = two_ranks.run(model_folder, [toy.shares(sequences, 2, micro_batches=micro_batches)])
    for metrics in (one.metrics, two[0]["reports"][0], two[1]["reports"][0]):
        assert metrics["loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(norm, abs=TOLERANCE)


def test_a_rank_without_samples_keeps_up(toy: Any, two_ranks: Any, model_folder: Path) -> None:
    sequences = toy.random_sequences(1)
    loss, norm = plain_step(model_folder, sequences)
    for result in two_ranks.run(model_folder, [toy.shares(sequences, 2)]):
        assert result["reports"][0]["loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert result["reports"][0]["grad_norm"] == pytest.approx(norm, abs=TOLERANCE)


def test_a_state_saved_by_two_ranks_goes_on_in_one(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    first, second = toy.random_sequences(9, seed=1), toy.random_sequences(9, seed=2)
    folder = tmp_path / "state"
    two = two_ranks.run(model_folder, [toy.shares(first, 2)], save=folder, export=tmp_path / "hf")
    assert two[0]["saved"] == two[1]["saved"]
    one = make_trainer()
    assert one.load_state(folder, "a") == two[0]["saved"]
    alone = one.train("a", "b", toy.shares(second, 1)[0]).metrics
    on = two_ranks.run(model_folder, [toy.shares(second, 2)], restore=folder)
    assert on[0]["restored"] == two[0]["saved"]
    for name in ("loss", "grad_norm", "lr"):
        assert alone[name] == pytest.approx(on[0]["reports"][0][name], abs=TOLERANCE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert two[0]["log_probs"][0] == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_same_state_and_batch_give_the_same_bits_in_another_process(
    toy: Any, make_trainer: Any, one_rank: Any, model_folder: Path, tmp_path: Path
) -> None:
    cut = toy.shares(toy.random_sequences(9), 1, num_steps=3)
    there = one_rank.run(model_folder, [cut], save=tmp_path / "there")[0]["saved"]
    here = make_trainer()
    here.train("start", "next", cut[0])
    here.save_state(tmp_path / "here")
    assert here.digest() == there


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_norm_are_those_of_plain_torch(
    toy: Any, make_trainer: Any, model_folder: Path, temperature: float
) -> None:
    sequences = toy.random_sequences(7)
    report = make_trainer(temperature=temperature).train(
        "start", "next", toy.shares(sequences, 1)[0]
    )
    loss, norm = plain_step(model_folder, sequences, temperature)
    assert report.metrics["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert report.metrics["grad_norm"] == pytest.approx(norm, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("qwen2", {}), ("llama", {}), ("llama", {"tie_word_embeddings": False}), ("qwen3", {})],
)
def test_log_probs_are_those_of_transformers(
    toy: Any, make_trainer: Any, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = toy.write_model(tmp_path / "model", architecture, **changes)
    sequences = [[5, 9, 2, 7], [3, 4], list(range(2, 30))]
    got = make_trainer(folder, max_tokens_per_gpu=8).log_probs(sequences)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for ids, values in zip(sequences, got, strict=True):
        row = torch.tensor([ids])
        log_p = model(row).logits.log_softmax(-1)[0, :-1]
        expected = log_p.gather(-1, row[0, 1:, None])[:, 0]
        assert values == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_checkpointing_changes_nothing(toy: Any, make_trainer: Any) -> None:
    batch = toy.shares(toy.random_sequences(7), 1)[0]
    plain = make_trainer()
    saving = make_trainer(gradient_checkpointing=True)
    reports = [t.train("start", "next", batch).metrics for t in (plain, saving)]
    assert reports[0]["loss"] == reports[1]["loss"]
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-6)


def test_bfloat16_keeps_float32_master_weights(toy: Any, make_trainer: Any) -> None:
    """An update of 1e-6 is lost in bfloat16 weights of size 0.02; it must not be."""
    trainer = make_trainer(precision="bfloat16", lr=1e-6)
    before = dict(trainer.named_tensors("float32"))
    before = {name: tensor.clone() for name, tensor in before.items()}
    trainer.train("start", "next", toy.shares(toy.random_sequences(7), 1)[0])
    moved = {n: (t - before[n]).abs() for n, t in trainer.named_tensors("float32")}
    assert all(t.dtype == torch.float32 for t in moved.values())
    typical = moved["model.layers.0.mlp.up_proj.weight"].median().item()
    assert typical == pytest.approx(1e-6, rel=0.1)


def test_deterministic_kernels_change_nothing_here(
    toy: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = toy.shares(toy.random_sequences(7), 1)[0]
    usual = make_trainer().train("start", "next", batch).metrics
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")
    try:
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*deterministic.*")
            ours = make_trainer().train("start", "next", batch).metrics
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
    assert (ours["loss"], ours["grad_norm"]) == (usual["loss"], usual["grad_norm"])
