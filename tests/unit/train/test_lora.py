"""LoRA: gradients against a dense reference, ranks, the reference model, states and files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.config import build_config
from rlcore.config.tree import AlgorithmConfig, ModelConfig
from rlcore.errors import ConfigError
from rlcore.train.trainer import Lora

LORA = Lora(rank=4, alpha=8.0)
SCALE = 2.0
LINEAR = 7
"""Linear layers of a decoder layer."""


def moved(trainer: Any) -> Any:
    """The trainer with adapters that do something."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in trainer._policy.trained():
            if name.endswith("lora_B"):
                local = parameter.to_local()
                local.copy_(0.05 * torch.randn(parameter.shape)[: len(local)])
    return trainer


def gradients(trainer: Any) -> dict[str, Tensor]:
    """Adam's first moments without decay."""
    found = {k: v.full_tensor().double() for k, v in trainer._optimizer.moments()}
    return {k.removeprefix("exp_avg."): v for k, v in found.items() if k.startswith("exp_avg.")}


def dense(folder: Path, adapter: dict[str, Tensor], sequences: list[Any]) -> tuple[Any, Tensor]:
    """The merged model in float64 after a backward pass of the loss at ratio 1, and that loss."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in [n for n in adapter if n.endswith("lora_A")]:
            layer = name.removesuffix(".lora_A")
            weights[f"{layer}.weight"] += SCALE * adapter[f"{layer}.lora_B"] @ adapter[name]
    total = sum(s.trainable_tokens for s in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for s in sequences:
        ids = torch.tensor(s.tokens)
        first = len(ids) - s.response_length - 1
        mask = torch.tensor(s.loss_mask or [1] * s.response_length)
        log_p = model(ids[None], use_cache=False).logits[0, first:-1].log_softmax(-1)
        new = log_p.gather(-1, ids[first + 1 :, None])[:, 0]
        loss = loss - ((new - new.detach()).exp() * s.advantages * mask).sum() / total
    loss.backward()
    return model, loss.detach()


def test_gradients_are_those_of_the_dense_weights_through_the_factors(
    toy: Any, make_trainer: Any, model_folder: Path
) -> None:
    trainer = moved(make_trainer(lora=LORA, adam_beta1=0.0, clip_grad=1e9))
    adapter = {n: p.full_tensor().detach().double() for n, p in trainer._policy.trained()}
    assert len(adapter) == 2 * 2 * LINEAR
    sequences = toy.random_sequences(9)
    model, loss = dense(model_folder, adapter, sequences)
    metrics = trainer.train("start", "a", toy.shares(sequences, 1, micro_batches=3)[0]).metrics
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    found, square = gradients(trainer), 0.0
    assert found.keys() == adapter.keys()
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A" not in adapter:
            continue
        a, b = adapter[f"{layer}.lora_A"], adapter[f"{layer}.lora_B"]
        expected = {"lora_A": SCALE * b.T @ parameter.grad, "lora_B": SCALE * parameter.grad @ a.T}
        for part, gradient in expected.items():
            torch.testing.assert_close(found[f"{layer}.{part}"], gradient, atol=1e-6, rtol=1e-4)
            square += float(gradient.square().sum())
    assert metrics["grad_norm"] == pytest.approx(square**0.5, rel=1e-4)


def test_a_model_begins_as_it_is_and_its_weights_stay(
    toy: Any, make_trainer: Any, model_folder: Path
) -> None:
    plain, trainer = make_trainer(), make_trainer(lora=LORA)
    ids = [[5, 9, 2, 7, 30]]
    assert trainer.log_probs(ids) == plain.log_probs(ids)
    before = {n: p.full_tensor().clone() for n, p in trainer._policy.weights()}
    trainer.train("start", "a", toy.shares(toy.random_sequences(5), 1)[0])
    assert trainer.log_probs(ids) != plain.log_probs(ids)
    for name, parameter in trainer._policy.weights():
        same = torch.equal(parameter.full_tensor(), before[name])
        # The first step moves B alone: its gradient is that of A times B, which is 0.
        assert same == (not name.endswith("lora_B")), name
    moments = {name.split(".", 1)[1] for name, _ in trainer._optimizer.moments()}
    assert moments == {n for n in before if n.endswith(("lora_A", "lora_B"))}
    some = make_trainer(lora=Lora(4, 8.0, ("q_proj", "v_proj")))
    assert len(list(some._policy.trained())) == 2 * 2 * 2


def test_the_reference_is_the_model_without_its_adapters(toy: Any, make_trainer: Any) -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.5)
    trainer = make_trainer(lora=LORA, algorithm=algorithm)
    batch = toy.shares(toy.random_sequences(5), 1)[0]
    first = trainer.train("start", "a", batch).metrics
    second = trainer.train("a", "b", batch).metrics
    assert trainer._reference is None
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-7) and second["kl_loss"] > 1e-5
    for name in ("rollout/ref_log_probs", "rollout/log_probs"):
        same = first[name] == pytest.approx(second[name], abs=1e-7)
        assert same == (name == "rollout/ref_log_probs")


def test_two_ranks_train_and_write_what_one_does(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    sequences = toy.random_sequences(11)
    one = make_trainer(lora=LORA, gradient_checkpointing=True)
    batch = toy.shares(sequences, 1)[0]
    alone = [one.train(*names, batch).metrics for names in (("start", "a"), ("a", "b"))]
    cut = toy.shares(sequences, 2, max_tokens=30)
    folder = tmp_path / "state"
    two = two_ranks.run(model_folder, [cut, cut], lora=LORA, save=folder, export=tmp_path / "hf")
    for a, b in zip(alone, two[1]["reports"], strict=True):
        for name in ("loss", "grad_norm"):
            assert b[name] == pytest.approx(a[name], abs=1e-5)
    other = make_trainer(lora=LORA)
    assert other.load_state(folder, "b") == two[0]["saved"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([[5, 9, 2, 7, 30]])
    expected = merged(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert other.log_probs(ids.tolist())[0] == pytest.approx(expected.tolist(), abs=1e-5)
    # The files of the adapter, on the starting model, say the same.
    config = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert "q_proj" in config["target_modules"] and len(config["target_modules"]) == LINEAR
    adapter = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    base = load_file(model_folder / "model.safetensors")[f"{name}.weight"]
    by_hand = base + SCALE * b @ a
    torch.testing.assert_close(merged.get_submodule(name).weight, by_hand, atol=1e-6, rtol=1e-6)
    assert not torch.equal(by_hand, base)


def test_a_state_goes_on_bit_for_bit(toy: Any, make_trainer: Any, tmp_path: Path) -> None:
    one, two = (toy.shares(toy.random_sequences(5, seed=k), 1)[0] for k in (1, 2))
    straight = make_trainer(lora=LORA)
    straight.train("start", "a", one)
    straight.save_state(tmp_path / "a")
    straight.train("a", "b", two)
    resumed = make_trainer(lora=LORA)
    resumed.load_state(tmp_path / "a", "a")
    resumed.train("a", "b", two)
    assert resumed.digest() == straight.digest()
    whole = make_trainer()
    whole.save_state(tmp_path / "whole")
    sizes = [(tmp_path / n / "shard-00000.safetensors").stat().st_size for n in ("a", "whole")]
    assert sizes[0] < sizes[1], "a state holds what is trained, not the starting model"


def test_settings_that_contradict_each_other_are_refused(make_trainer: Any) -> None:
    with pytest.raises(ConfigError, match=r"no linear layer 'query'; it has down_proj, gate_proj"):
        make_trainer(lora=Lora(4, 8.0, ("query",)))
    with pytest.raises(ValueError, match=r"model.lora_alpha = 8.0 is about LoRA"):
        ModelConfig(path="/m", lora_alpha=8.0)
    tree = {
        "model": {"path": "/m", "lora_rank": 4},
        "data": {"path": "/d.jsonl"},
        "reward": {"custom_rm_path": "/r.py:f"},
        "algorithm": {"use_kl_loss": True, "ref_update_interval": 2},
    }
    with pytest.raises(ConfigError, match=r"is always the starting model; remove one of them"):
        build_config(tree)
