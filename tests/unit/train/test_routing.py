"""Experts that are replayed: what is chosen, what that changes, and what it does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_families
import torch

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import PackedBatch, TrainSequence, pack
from rlcore.errors import ConfigError, DataError, TrainError

FAMILIES = ["qwen3_moe", "glm4_moe", "deepseek_v3"]
SEQUENCES = [TrainSequence([5, 9, 3, 7, 2, 8], 4), TrainSequence([4, 6, 1], 1)]


def packed_of(sequences: list[TrainSequence]) -> PackedBatch:
    return pack(sequences, Totals.of(s.trainable_tokens for s in sequences), "token_mean")


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from rlcore.train.fsdp.model import load_policy

    folder = tmp_path_factory.mktemp("family")
    tiny_families.build(request.param, folder)
    made = load_policy(folder)
    made.routing.watches = made.routing.replays = True
    return made


def scored(policy: Any, packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all rows, and the experts that were chosen."""
    rows = torch.arange(len(packed.input_ids))
    log_probs, _ = policy.score(packed, rows, 1.0)
    return log_probs, policy.routing.seen()


def test_a_model_s_own_choice_given_back_changes_no_bit(policy: Any) -> None:
    packed = packed_of(SEQUENCES).inputs()
    free, chosen = scored(policy, packed)
    again, replayed = scored(policy, policy.routed(packed))
    assert torch.equal(free, again) and torch.equal(chosen, replayed)
    assert chosen.shape[:2] == (len(packed.input_ids), policy.lm.config.num_hidden_layers)


def test_another_choice_is_followed_and_its_routers_learn(policy: Any) -> None:
    packed = packed_of(SEQUENCES).inputs()
    free, chosen = scored(policy, packed)
    experts = int(policy.lm.config.get_text_config().num_experts_per_tok)
    other = torch.arange(experts, dtype=torch.int32).expand_as(chosen).contiguous()
    moved, replayed = scored(policy, replace(packed, experts=other))
    sparse = [k for k in range(chosen.shape[1]) if chosen[:, k].any()]
    assert torch.equal(replayed[:, sparse], other[:, sparse])
    assert not torch.equal(free, moved)
    policy.zero_grad()
    moved.sum().backward()
    routers = [p for n, p in policy.lm.named_parameters() if n.endswith("mlp.gate.weight")]
    assert routers
    for router in routers:
        by_expert = router.grad.abs().sum(1)
        if policy.lm.config.model_type == "qwen3_moe":
            # A softmax is over all experts, chosen or not.
            assert by_expert.ne(0).any()
        else:
            assert by_expert[:experts].ne(0).all() and by_expert[experts:].eq(0).all()


def test_a_reference_chooses_for_itself(policy: Any) -> None:
    packed = packed_of(SEQUENCES).inputs()
    free, chosen = scored(policy, packed)
    other = replace(packed, experts=torch.arange(chosen.shape[2]).expand_as(chosen))
    policy.routing.replays = False
    own, _ = scored(policy, other)
    policy.routing.replays = True
    moved, _ = scored(policy, other)
    assert torch.equal(own, free) and not torch.equal(moved, free)


def test_what_cannot_be_replayed_is_said(policy: Any) -> None:
    packed = packed_of(SEQUENCES).inputs()
    _, chosen = scored(policy, packed)
    with pytest.raises(TrainError, match=r"are all 0 in layer"):
        scored(policy, replace(packed, experts=torch.zeros_like(chosen)))
    with pytest.raises(TrainError, match=r"experts \[7, 1\] are to be replayed"):
        scored(policy, replace(packed, experts=chosen[:, :, :1].contiguous()))
    policy.routing.give(None)


def test_experts_are_packed_with_their_tokens() -> None:
    given = [
        replace(s, experts=np.full((len(s.tokens) - 1, 2, 3), 10 + i, np.int32))
        for i, s in enumerate(SEQUENCES)
    ]
    packed = packed_of(given)
    assert packed.experts is not None and packed.experts.dtype == torch.int32
    assert packed.experts[:, 0, 0].tolist() == [10] * 5 + [0] + [11] * 2 + [0]
    inputs = packed.inputs().experts
    assert inputs is not None and inputs[:, 1, 2].tolist() == [10] * 5 + [11] * 2
    assert packed_of(SEQUENCES).experts is None
    with pytest.raises(DataError, match=r"sequence 1 .* experts to replay for none of its tokens"):
        packed_of([given[0], SEQUENCES[1]])


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def moe_folder(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "model"
    return Path(toy.write_model(folder, "qwen3_moe", **MOE))


def test_later_steps_go_through_the_experts_of_the_old_policy(
    toy: Any, make_trainer: Any, moe_folder: Path
) -> None:
    """Steps so large that the routers of a free model move on."""
    batch = toy.shares(toy.random_sequences(12), 1, num_steps=3)[0]
    chosen: dict[bool, list[torch.Tensor]] = {}
    for replays in (False, True):
        trainer = make_trainer(moe_folder, lr=0.05, use_routing_replay=replays)
        trainer._policy.routing.watches = True
        routing, seen = trainer._policy.routing, chosen.setdefault(replays, [])
        score = trainer._policy.score

        def watched(*args: Any, _score: Any = score, _seen: Any = seen, _r: Any = routing) -> Any:
            out = _score(*args)
            _seen.append(_r.seen().sort(dim=2).values)
            return out

        trainer._policy.score = watched
        if not replays:
            trainer._policy.routed = lambda packed: packed
        trainer.train("start", "next", batch)
    old, later = chosen[True][:3], chosen[True][3:]
    assert all(torch.equal(a, b) for a, b in zip(old, later, strict=True))
    free_old, free_later = chosen[False][:3], chosen[False][3:]
    assert not all(torch.equal(a, b) for a, b in zip(free_old, free_later, strict=True))


def test_recomputation_and_ranks_change_nothing(
    toy: Any, make_trainer: Any, moe_folder: Path
) -> None:
    rng = np.random.default_rng(0)
    sequences = [
        replace(
            s,
            experts=rng.permuted(np.tile(np.arange(4), (len(s.tokens) - 1, 2, 1)), axis=2)[..., :2],
        )
        for s in toy.random_sequences(9)
    ]
    batch = toy.shares(sequences, 1, micro_batches=3)[0]
    plain = make_trainer(moe_folder).train("start", "next", batch).metrics
    saving = make_trainer(moe_folder, gradient_checkpointing=True)
    again = saving.train("start", "next", batch).metrics
    free = make_trainer(moe_folder).train(
        "start", "next", toy.shares(toy.random_sequences(9), 1, micro_batches=3)[0]
    )
    assert again["grad_norm"] == plain["grad_norm"] and again["loss"] == plain["loss"]
    assert free.metrics["grad_norm"] != plain["grad_norm"]
    # Every expert was given its share of the tokens.
    assert plain["moe/load_mean"] == pytest.approx(sum(len(s.tokens) - 1 for s in sequences) / 2)


def test_a_model_without_experts_has_nothing_to_replay(make_trainer: Any) -> None:
    with pytest.raises(ConfigError, match="the model has no experts"):
        make_trainer(use_routing_replay=True)
