"""PPO: the critic beside the policy, against an implementation of its own; its state; warm-up."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import Corrupt, TrainError

TOLERANCE = 1e-6
PPO = AlgorithmConfig(
    advantage_estimator="ppo",
    gamma=0.98,
    lambd=0.9,
    kl_coef=0.3,
    critic_lr=5e-3,
    use_rollout_logprobs=True,
)


def near(toy: Any, trainer: Any, count: int = 9) -> list[Any]:
    """Samples whose engine log-probs are the policy's with noise."""
    draw = random.Random(3)
    sequences = toy.random_sequences(count)
    exact = trainer.log_probs([list(s.tokens) for s in sequences])
    return [
        replace(s, rollout_log_probs=[x + draw.gauss(0, 0.2) for x in row[-s.response_length :]])
        for s, row in zip(sequences, exact, strict=True)
    ]


def gradients(optimizer: Any) -> dict[str, Tensor]:
    """Adam's first moments without decay."""
    found = {k: v.full_tensor().double() for k, v in optimizer.moments()}
    return {k.removeprefix("exp_avg."): v for k, v in found.items() if k.startswith("exp_avg.")}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return sum(float((a[k] - b[k]).square().sum()) for k in a) ** 0.5


def independent(
    folder: Path, head: tuple[Tensor, Tensor], sequences: list[Any], a: AlgorithmConfig
) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses and gradients of policy and critic, in float64, a sample at a time."""
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    critic: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    weight, bias = (x.double().requires_grad_() for x in head)
    policy_terms, critic_terms = [], []
    for s in sequences:
        ids = torch.tensor(s.tokens)
        first = len(ids) - s.response_length - 1
        mask = torch.tensor([1] * s.response_length if s.loss_mask is None else s.loss_mask).bool()
        if not mask.any():
            continue
        log_p = policy(ids[None], use_cache=False).logits[0, first:-1].log_softmax(-1)
        new = log_p.gather(-1, ids[first + 1 :, None])[:, 0][mask]
        hidden = critic.base_model(ids[None], use_cache=False).last_hidden_state[0, first:-1]
        value = (hidden @ weight[0] + bias)[mask]
        old = torch.tensor(s.rollout_log_probs, dtype=torch.float32).double()[mask]
        x = old - new.detach()  # the policy is its own reference still
        own = (-a.kl_coef * ((-x).exp() - 1 + x)).tolist()
        own[-1] += float(s.advantages)
        v, adv, goal = value.tolist(), [0.0] * len(own), [0.0] * len(own)
        following_value = following = 0.0
        for t in reversed(range(len(own))):
            delta = own[t] + a.gamma * following_value - v[t]
            following = adv[t] = delta + a.gamma * a.lambd * following
            following_value, goal[t] = v[t], adv[t] + v[t]
        ratio, advantages = (new - old).exp(), torch.tensor(adv, dtype=torch.float64)
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        policy_terms.append(-gain)
        critic_terms.append((value - torch.tensor(goal, dtype=torch.float64)) ** 2)
    policy_loss, critic_loss = torch.cat(policy_terms).mean(), torch.cat(critic_terms).mean()
    policy_loss.backward()
    critic_loss.backward()
    body = critic.base_model.named_parameters()
    return (
        {"loss": policy_loss.item(), "value_loss": critic_loss.item()},
        {name: p.grad for name, p in policy.named_parameters()},
        {f"body.{name}": p.grad for name, p in body}
        | {"head.weight": weight.grad, "head.bias": bias.grad},
    )


def test_losses_and_gradients_are_those_of_another_implementation(
    toy: Any, make_trainer: Any, model_folder: Path
) -> None:
    trainer = make_trainer(algorithm=PPO, adam_beta1=0.0, clip_grad=1e9, max_tokens_per_gpu=40)
    sequences = near(toy, trainer)
    head = trainer._critic.model.head
    given = head.weight.full_tensor().detach().clone(), head.bias.full_tensor().detach().clone()
    assert 0.01 < float(given[0].std()) < 0.03
    losses, policy, critic = independent(model_folder, given, sequences, PPO)
    batch = toy.shares(sequences, 1, micro_batches=3)[0]
    metrics = trainer.train("start", "next", batch).metrics
    for name, loss in losses.items():
        assert metrics[name] == pytest.approx(loss, abs=TOLERANCE)
    assert distance(gradients(trainer._optimizer), policy) <= TOLERANCE
    assert distance(gradients(trainer._critic.optimizer), critic) <= TOLERANCE * 10
    assert metrics["critic_lr"] == 5e-3
    assert metrics["lr"] == 1e-2
    assert metrics["pg_clipfrac"] > 0


def test_the_first_iterations_may_train_the_critic_alone(toy: Any, make_trainer: Any) -> None:
    algorithm = PPO.model_copy(update={"num_critic_only_steps": 1})
    trainer = make_trainer(algorithm=algorithm)
    sequences = near(toy, trainer)
    before = {n: t.clone() for n, t in trainer.named_tensors("float32")}
    critic = trainer._critic.model.head.bias.full_tensor().clone()
    report = trainer.train("start", "a", toy.shares(sequences, 1, iteration=0)[0])
    assert report.optimizer_step == 0
    assert "loss" not in report.metrics and report.metrics["critic_grad_norm"] > 0
    assert all(torch.equal(t, before[n]) for n, t in trainer.named_tensors("float32"))
    assert not torch.equal(trainer._critic.model.head.bias.full_tensor(), critic)
    report = trainer.train("a", "b", toy.shares(sequences, 1, iteration=1)[0])
    assert report.optimizer_step == 1 and "loss" in report.metrics
    assert not all(torch.equal(t, before[n]) for n, t in trainer.named_tensors("float32"))


def test_the_gap_is_seen_while_only_the_critic_trains(toy: Any, make_trainer: Any) -> None:
    algorithm = AlgorithmConfig(
        advantage_estimator="ppo", num_critic_only_steps=1, max_logprob_gap=1e-3
    )
    trainer = make_trainer(algorithm=algorithm)
    before = trainer.digest()
    with pytest.raises(TrainError, match=r"algorithm\.max_logprob_gap"):
        trainer.train("start", "a", toy.shares(near(toy, trainer), 1)[0])
    assert trainer.digest() == before and not trainer.dirty


def test_the_critic_learns_what_rewards_come_to(toy: Any, make_trainer: Any) -> None:
    algorithm = AlgorithmConfig(advantage_estimator="ppo", num_critic_only_steps=99)
    trainer = make_trainer(algorithm=algorithm, num_iterations=99)
    batch = toy.shares([replace(s, advantages=1.0) for s in toy.random_sequences(6)], 1)[0]
    reports = []
    for k in range(12):
        assert trainer.loaded is not None
        reports.append(trainer.train(trainer.loaded, f"s{k}", batch).metrics)
    assert reports[0]["value_loss"] > 0.5
    assert reports[-1]["value_loss"] < 0.1 * reports[0]["value_loss"]


def test_nothing_is_applied_where_the_critic_is_not_finite(toy: Any, make_trainer: Any) -> None:
    trainer = make_trainer(algorithm=PPO)
    before = trainer.digest()
    with torch.no_grad():
        trainer._critic.model.head.bias.fill_(float("inf"))
    with pytest.raises(TrainError, match="was not applied"):
        trainer.train("start", "next", toy.shares(near(toy, trainer), 1)[0])
    with torch.no_grad():
        trainer._critic.model.head.bias.zero_()
    assert trainer.digest() == before and not trainer.dirty


def test_a_state_with_a_critic_goes_on_bit_for_bit(
    toy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    straight = make_trainer(algorithm=PPO)
    one, two = (toy.shares(near(toy, straight, n), 1, num_steps=2)[0] for n in (6, 8))
    straight.train("start", "a", one)
    straight.save_state(tmp_path / "a")
    digest = straight.digest()
    straight.train("a", "b", two)
    resumed = make_trainer(algorithm=PPO)
    assert resumed.load_state(tmp_path / "a", "a") == digest
    resumed.train("a", "b", two)
    assert resumed.digest() == straight.digest() != digest


def test_a_state_without_a_critic_is_refused(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer().save_state(tmp_path / "plain")
    with pytest.raises(Corrupt, match="does not load as a state of this model"):
        make_trainer(algorithm=PPO).load_state(tmp_path / "plain", "plain")


def test_two_ranks_train_and_save_what_one_does(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path, tmp_path: Path
) -> None:
    alone = make_trainer(algorithm=PPO)
    sequences = near(toy, alone, 11)
    metrics = alone.train("start", "a", toy.shares(sequences, 1)[0]).metrics
    cut = toy.shares(sequences, 2)
    two = two_ranks.run(model_folder, [cut], algorithm=PPO, save=tmp_path / "two")
    for name in ("loss", "grad_norm", "value_loss", "critic_grad_norm"):
        assert two[0]["reports"][0][name] == pytest.approx(metrics[name], abs=1e-5)
    other = make_trainer(algorithm=PPO)
    assert other.load_state(tmp_path / "two", "a") == two[0]["saved"]
