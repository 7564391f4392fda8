"""A mixture of experts in the trainer: gradients, ranks, what is exported, and how experts are
used.
"""

import base64
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.errors import ConfigError

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def moe_folder(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: experts, a dense one, experts."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    made = toy.write_model(folder, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], **EXPERTS)
    return Path(made)


def plain_step(folder: Path, sequences: list[Any]) -> tuple[float, float]:
    """Loss and gradient norm by transformers, a sample at a time, ratio 1."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = sum(s.trainable_tokens for s in sequences)
    loss = torch.zeros(())
    for s in sequences:
        ids = torch.tensor(s.tokens)
        first = len(ids) - s.response_length - 1
        mask = torch.tensor(s.loss_mask or [1] * s.response_length)
        log_p = model(ids[None], use_cache=False).logits[0, first:-1].log_softmax(-1)
        new = log_p.gather(-1, ids[first + 1 :, None])[:, 0]
        loss = loss - ((new - new.detach()).exp() * s.advantages * mask).sum() / total
    loss.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


def test_loss_and_gradient_are_those_of_plain_torch_on_one_rank_and_on_two(
    toy: Any, make_trainer: Any, two_ranks: Any, moe_folder: Path
) -> None:
    sequences = toy.random_sequences(11)
    loss, norm = plain_step(moe_folder, sequences)
    batch = toy.shares(sequences, 1, micro_batches=3)[0]
    one = make_trainer(moe_folder).train("start", "next", batch).metrics
    saving = make_trainer(moe_folder, gradient_checkpointing=True)
    again = saving.train("start", "next", batch).metrics
    two = two_ranks.run(moe_folder, [toy.shares(sequences, 2, max_tokens=30)])
    for metrics in (one, again, two[0]["reports"][0], two[1]["reports"][0]):
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, abs=1e-5)
        for name in (name for name in one if name.startswith("moe/")):
            assert metrics[name] == pytest.approx(one[name], abs=1e-12)


def test_a_rank_without_samples_counts_no_token(
    toy: Any, make_trainer: Any, two_ranks: Any, moe_folder: Path
) -> None:
    sequences = toy.random_sequences(1)
    one = make_trainer(moe_folder).train("start", "a", toy.shares(sequences, 1)[0]).metrics
    two = two_ranks.run(moe_folder, [toy.shares(sequences, 2)])
    for name in ("loss", "grad_norm", "moe/load_mean", "moe/load_max", "moe/dead_experts"):
        assert two[1]["reports"][0][name] == pytest.approx(one[name], abs=1e-5)


def test_the_use_of_experts_is_counted_by_layer(
    toy: Any, make_trainer: Any, moe_folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    sequences = toy.random_sequences(3)
    model: Any = AutoModelForCausalLM.from_pretrained(moe_folder, dtype=torch.float32)
    used: list[Counter[int]] = [Counter(), Counter()]
    for s in sequences:
        # The last token predicts nothing and is not passed through.
        ids = torch.tensor([s.tokens[:-1]])
        routed = model(ids, output_router_logits=True, use_cache=False).router_logits
        for layer, logits in zip(used, routed, strict=True):
            layer.update(logits.topk(2).indices.flatten().tolist())
    metrics = make_trainer(moe_folder).train("start", "a", toy.shares(sequences, 1)[0]).metrics
    tokens = sum(len(s.tokens) - 1 for s in sequences)
    mean = 2 * tokens / 4
    assert metrics["moe/load_mean"] == mean
    for k, layer in enumerate(used):
        assert metrics[f"moe/layer_{k}/load_max"] == max(layer.values()) / mean
        assert metrics[f"moe/layer_{k}/dead_experts"] == (4 - len(layer)) / 4
    assert metrics["moe/load_max"] == max(max(layer.values()) for layer in used) / mean
    plain = make_trainer().train("start", "a", toy.shares(sequences, 1)[0]).metrics
    assert not any(name.startswith("moe/") for name in plain)


def test_experts_travel_under_the_names_that_they_came_with(
    toy: Any, make_trainer: Any, two_ranks: Any, moe_folder: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save

    from rlcore.engine.embedded.runner import ModelRunner

    batch = toy.shares(toy.random_sequences(5), 2)
    two_ranks.run(moe_folder, [batch], export=tmp_path / "hf", save=tmp_path / "state")
    names = []
    for folder in (moe_folder, tmp_path / "hf"):
        with safe_open(folder / "model.safetensors", framework="pt") as opened:
            names.append(set(opened.keys()))
    assert names[0] == names[1]
    assert "model.layers.2.mlp.experts.3.gate_proj.weight" in names[0]
    trainer = make_trainer(moe_folder)
    trainer.load_state(tmp_path / "state", "a")
    ids = [5, 9, 2, 7, 30]
    expected = trainer.log_probs([ids])[0]
    for way in ("folder", "blobs", "released"):
        engine = ModelRunner(moe_folder, "float32", "cpu")
        if way == "released":
            engine.release()
            engine.resume()
        if way == "blobs":
            for name, tensor in trainer.named_tensors("float32"):
                blob = save({name: tensor.contiguous()})
                engine.update_from_blobs([base64.b64encode(blob).decode()])
        else:
            engine.update_from_folder(tmp_path / "hf")
        logits = engine.model.eval()
        engine.model.set_attn_implementation("eager")
        with torch.no_grad():
            log_p = logits(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        got = log_p.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert got == pytest.approx(expected, abs=1e-5)


def test_a_state_goes_on_bit_for_bit(
    toy: Any, make_trainer: Any, moe_folder: Path, tmp_path: Path
) -> None:
    one, two = (toy.shares(toy.random_sequences(5, seed=k), 1)[0] for k in (1, 2))
    straight = make_trainer(moe_folder)
    straight.train("start", "a", one)
    straight.save_state(tmp_path / "a")
    straight.train("a", "b", two)
    resumed = make_trainer(moe_folder)
    resumed.load_state(tmp_path / "a", "a")
    resumed.train("a", "b", two)
    assert resumed.digest() == straight.digest()


def test_experts_of_other_names_are_refused(toy: Any, make_trainer: Any, tmp_path: Path) -> None:
    folder = toy.write_model(
        tmp_path / "mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2
    )
    with pytest.raises(ConfigError, match="names its experts in a way"):
        make_trainer(folder)


def test_the_bias_of_routers_travels_too(make_trainer: Any, tmp_path: Path) -> None:
    """Nothing trains it, and without it an exported model would choose other experts."""
    import tiny_families
    from safetensors.torch import load_file

    tiny_families.build("glm4_moe", tmp_path / "model")
    make_trainer(tmp_path / "model").export_hf(tmp_path / "hf", "float32")
    came, went = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "hf"))
    assert came.keys() == went.keys()
    assert any(name.endswith("e_score_correction_bias") for name in went)
    assert all(torch.equal(came[name], went[name]) for name in came)
