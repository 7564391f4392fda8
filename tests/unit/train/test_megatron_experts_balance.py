"""What evens out the use of experts in the Megatron backend: biases of routers that move against
it, and losses of the routers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_families
from rank_processes import results, run_ranks
from tiny_trainers import loaded

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file  # noqa: E402
from torch.nn.functional import linear, one_hot  # noqa: E402

from rlcore.algorithms.packing import TrainSequence  # noqa: E402
from rlcore.config.tree import AlgorithmConfig  # noqa: E402
from rlcore.errors import ConfigError  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.megatron.trainer import MegatronTrainer  # noqa: E402

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, CP = "expert_model_parallel_size", "context_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2-sp": {TP: 2, "sequence_parallel": True},
    "pp2": {PP: 2},
    "cp2": {CP: 2},
    "ep2": {EP: 2},
}
RATE = {"moe_router_bias_update_rate": 0.01}
LOSSES = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.02,
}
BIAS = "e_score_correction_bias"
BIASED, ROUTED = "glm4_moe", "qwen3_moe"
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in (BIASED, ROUTED):
        tiny_families.build(family, folder / family)
    return folder


@pytest.fixture
def make(process_group: None, models: Path) -> Make:
    """A loaded trainer of one rank."""

    def trainer(family: str, kind: Any = MegatronTrainer, **more: Any) -> Any:
        return loaded(kind, models / family, AlgorithmConfig(), **more)

    return trainer


@pytest.fixture(scope="module")
def indifferent(toy: Any) -> list[TrainSequence]:
    """Samples that the policy is to learn nothing of."""
    return [replace(s, advantages=0.0) for s in toy.random_sequences(9)]


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, models: Path, toy: Any, indifferent: Any
) -> Path:
    """What two ranks do in each layout."""
    folder, both = tmp_path_factory.mktemp("pair"), (1, 2)
    biased = {n: toy.shares(toy.random_sequences(9), n, micro_batches=3) for n in both}
    losses = {n: toy.shares(indifferent, n, micro_batches=2) for n in both}
    cases = []
    for layout, table in LAYOUTS.items():
        cases.append(
            {
                "name": f"bias-{layout}",
                "model": models / BIASED,
                "layout": table | RATE,
                "shares": biased,
                "export": folder / f"exported-{layout}",
                "save": folder / f"saved-{layout}",
            }
        )
        cases.append(
            {
                "name": f"loss-{layout}",
                "model": models / ROUTED,
                "layout": table | LOSSES,
                "shares": losses,
                "train": {"gradient_checkpointing": True},
            }
        )
    run_ranks(folder, 2, cases)
    return folder


# --- biases ---------------------------------------------------------------------------------------


def biases(named: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in named if name.endswith(BIAS)}


@pytest.fixture
def moved(toy: Any, make: Make, models: Path) -> dict[str, Any]:
    """What biases must be after a step, by the experts that FSDP2 chooses in it."""
    fsdp = make(BIASED, FsdpTrainer)
    fsdp._policy.routing.watches = True
    fsdp.train("start", "next", toy.shares(toy.random_sequences(9), 1)[0])
    chosen = fsdp._policy.routing.seen()
    out = {}
    for name, bias in biases(load_file(models / BIASED / "model.safetensors").items()).items():
        used = one_hot(chosen[:, int(name.split(".")[2])].long(), len(bias)).sum((0, 1)).float()
        out[name] = bias + RATE["moe_router_bias_update_rate"] * (used.mean() - used).sign()
    return out


def same(got: dict[str, Any], want: dict[str, Any]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def test_biases_move_against_the_use_of_experts(
    toy: Any, make: Make, moved: Any, tmp_path: Path
) -> None:
    batch = toy.shares(toy.random_sequences(9), 1, micro_batches=3)[0]
    more = {"megatron": RATE, "gradient_checkpointing": True, "precision": "bfloat16"}
    trainer = make(BIASED, **more)
    start = trainer.digest()
    trainer.save_state(tmp_path / "start")
    trainer.train("start", "a", batch)
    assert moved and same(biases(trainer.named_tensors("bfloat16")), moved)
    trainer.save_state(tmp_path / "a")
    digest = trainer.digest()
    trainer.train("a", "b", batch)
    assert not same(biases(trainer.named_tensors("bfloat16")), moved)
    # Where they stay as they are, what was saved with them goes on, too.
    for rate in (RATE, {}):
        resumed = make(BIASED, **more | {"megatron": rate})
        assert resumed.load_state(tmp_path / "a", "a") == digest
        assert same(biases(resumed.named_tensors("float32")), moved)
        assert resumed.digest() == digest
        if rate:
            resumed.train("a", "b", batch)
            assert resumed.digest() == trainer.digest()
    assert trainer.load_state(tmp_path / "start", "start") == start
    trainer.train("start", "a", batch)
    assert trainer.digest() == digest


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_move_alike_in_every_layout(layout: str, pair: Path, moved: Any, make: Make) -> None:
    saved = results(pair, f"bias-{layout}", 2)[0]["saved"]
    exported = load_file(pair / f"exported-{layout}" / "model.safetensors")
    assert same(biases(exported.items()), moved)
    trainer = make(BIASED)
    assert trainer.load_state(pair / f"saved-{layout}", "next") == saved
    assert same(biases(trainer.named_tensors("float32")), moved)


# --- losses of the routers ------------------------------------------------------------------------


def losses_of(folder: Path, micros: Sequence[Sequence[TrainSequence]]) -> dict[str, float]:
    """Norm of their gradient, and both over the layers, by transformers: the mean over
    micro-batches, by their tokens, of E sum_e f_e P_e (arXiv 2101.03961, f the share of choices, P
    the mean score) and of the mean square of log sum exp (arXiv 2202.08906).
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gates = [layer.mlp.gate for layer in model.model.layers]
    given: list[Any] = [None] * len(gates)
    for k, gate in enumerate(gates):
        gate.register_forward_pre_hook(lambda _, args, k=k: given.__setitem__(k, args[0]))
    experts, top = model.config.num_experts, model.config.num_experts_per_tok
    tokens = sum(len(s.tokens) - 1 for micro in micros for s in micro)
    loss = torch.zeros(())
    figures = {"moe/aux_loss": 0.0, "moe/z_loss": 0.0}
    for micro in micros:
        parts: list[list[Any]] = [[] for _ in gates]
        for s in micro:
            model(torch.tensor([s.tokens[:-1]]), use_cache=False)
            for part, gate, hidden in zip(parts, gates, given, strict=True):
                part.append(linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight))
        for part in parts:
            logits = torch.cat(part)
            scores = logits.softmax(-1)
            share = one_hot(scores.topk(top).indices, experts).sum(1).float().mean(0) / top
            uneven = experts * (share * scores.mean(0)).sum()
            square = logits.logsumexp(-1).square().mean()
            weighed = LOSSES["moe_aux_loss_coeff"] * uneven + LOSSES["moe_z_loss_coeff"] * square
            loss = loss + weighed * (len(logits) / tokens)
            for name, value in zip(figures, (uneven, square), strict=True):
                figures[name] += float(value.detach()) * len(logits) / tokens / len(gates)
    loss.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return figures | {"grad_norm": float(torch.stack(norms).norm())}


def cut(toy: Any, sequences: Any, ranks: int, parts: int) -> list[Any]:
    """The micro-batches of all ranks."""
    shares = toy.shares(sequences, ranks, micro_batches=parts)
    return [micro for share in shares for micro in share.steps[0].micro_batches]


@pytest.mark.parametrize("parts", [1, 2])
def test_losses_of_routers_weigh_as_tokens_do(
    parts: int, toy: Any, make: Make, models: Path, indifferent: Any
) -> None:
    batch = toy.shares(indifferent, 1, micro_batches=parts)[0]
    got = make(ROUTED, megatron=LOSSES).train("start", "next", batch).metrics
    want = losses_of(models / ROUTED, cut(toy, indifferent, 1, parts))
    assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-4)
    assert want["grad_norm"] > 1e-3


def test_losses_of_routers_are_means_over_the_steps(
    toy: Any, make: Make, models: Path, indifferent: Any
) -> None:
    """And what is off is no metric."""
    batch = toy.shares(indifferent, 1, micro_batches=2)[0]
    twice = replace(batch, steps=(*batch.steps, *batch.steps))
    still = {"lr": 0.0, "megatron": LOSSES | {"moe_z_loss_coeff": 0.0}}
    got = make(ROUTED, **still).train("start", "next", twice).metrics
    want = losses_of(models / ROUTED, cut(toy, indifferent, 1, 2))
    assert got["moe/aux_loss"] == pytest.approx(want["moe/aux_loss"], rel=1e-4)
    assert "moe/z_loss" not in got


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_routers_are_the_same_in_every_layout(
    layout: str, pair: Path, toy: Any, models: Path, indifferent: Any
) -> None:
    ranks = 2 if layout in ("dp2", "ep2") else 1
    want = losses_of(models / ROUTED, cut(toy, indifferent, ranks, 2))
    for got in results(pair, f"loss-{layout}", 2):
        found = {name: got["metrics"][name] for name in want}
        assert found == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (RATE, "this model's have none"),
        ({"moe_aux_loss_coeff": 0.1}, "has no effect without"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "must be one of none, aux_loss"),
    ],
)
def test_what_evens_out_nothing_is_said(table: Any, words: str, make: Make) -> None:
    with pytest.raises(ConfigError, match=words):
        make(ROUTED, megatron=table)
