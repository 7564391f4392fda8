"""Every algorithm on a stored batch, through the trainer, against an implementation of its own.

The other implementation shares no code with the trainer: transformers in float64, a sample at a
time, and the papers' formulas written out.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_batches import Stored
from torch import Tensor

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import TrainError
from rlcore.sample import Sample, Status

TOLERANCE = 1e-6
TEMPERATURE = 0.9
GROUP, SIZE = 4, 24
ACTS = {"grpo": "pg_clipfrac", "gspo": "pg_clipfrac", "cispo": "pg_clipfrac_high"}
ACTS |= {"dual clip": "pg_clipfrac_dual", "opsm": "opsm_clipfrac", "icepop": "tis_clipfrac"}
ACTS |= {"tis": "tis_clipfrac", "tis, sequences": "tis_clipfrac", "tis, geometric": "tis_clipfrac"}
"""What shows that a bound is reached on this batch, so that the comparison is one."""
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"use_rollout_logprobs": True, "clip_high": 0.28},
    "grpo, sequences": {"loss_aggregation": "sequence_mean"},
    "dr.grpo": {
        "grpo_std_normalization": False,
        "loss_aggregation": "constant",
        "loss_divisor": 12,
        "use_rollout_logprobs": True,
    },
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "use_rollout_logprobs": True},
    "gspo": {
        "advantage_estimator": "gspo",
        "clip_low": 0.01,
        "clip_high": 0.02,
        "use_rollout_logprobs": True,
        "loss_aggregation": "sequence_mean",
    },
    "gspo, own old log-probs": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo", "clip_low": 1.0, "use_rollout_logprobs": True},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.5, "gamma": 0.95},
    "reinforce++, old of the engine": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.1,
        "kl_loss_type": "k1",
        "use_rollout_logprobs": True,
    },
    "reinforce++ baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "kl_coef": 0.2,
        "kl_loss_type": "k2",
    },
    "raw rewards": {"rewards_normalization": False},
    "whitened": {"normalize_advantages": True},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.4, "use_rollout_logprobs": True},
    "unbiased kl": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.4,
        "use_unbiased_kl": True,
        "use_rollout_logprobs": True,
    },
    "entropy": {"entropy_coef": 0.05},
    "dual clip": {"eps_clip_c": 1.1, "use_rollout_logprobs": True},
    "opsm": {"use_opsm": True, "opsm_delta": 0.02, "use_rollout_logprobs": True},
    "tis": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
    "icepop": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.8, "tis_mode": "mask"},
    "tis, sequences": {"use_tis": True, "tis_clip": 1.3, "tis_level": "sequence"},
    "tis, geometric": {
        "advantage_estimator": "gspo",
        "use_tis": True,
        "tis_clip": 1.02,
        "tis_clip_low": 0.98,
        "tis_level": "geometric",
    },
}


def make_samples(vocab: int) -> tuple[list[Sample], list[float | None]]:
    """Groups of four, unequal lengths, holes in some masks; one sample was not scored."""
    draw = random.Random(5)
    samples, rewards = [], []
    for i in range(SIZE):
        prompt, response = draw.randint(1, 5), draw.randint(2, 12)
        samples.append(
            Sample(
                group_index=i // GROUP,
                index=i,
                prompt_id=f"p{i // GROUP}",
                prompt="x",
                tokens=[draw.randrange(2, vocab) for _ in range(prompt + response)],
                response="y",
                response_length=response,
                loss_mask=[int(draw.random() < 0.7) for _ in range(response - 1)] + [i % 2]
                if i % 3 == 0
                else None,
                rollout_log_probs=[0.0] * response,
                status=Status.COMPLETED,
            )
        )
        rewards.append(float(draw.randint(0, 3)) if i // GROUP != 2 else 1.5)
    return samples, [None if i == 9 else r for i, r in enumerate(rewards)]


@pytest.fixture(scope="module")
def moved(
    toy: Any, process_group: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A stored batch, and a state that is some way from the starting model; the engine's log-probs
    are those of that state with noise.
    """
    from rlcore.config.tree import TrainConfig
    from rlcore.train.fsdp.trainer import FsdpTrainer

    folder = tmp_path_factory.mktemp("moved")

    def make(algorithm: AlgorithmConfig) -> FsdpTrainer:
        config = TrainConfig(
            lr=1e-2, num_iterations=4, adam_beta1=0.0, clip_grad=1e9, max_tokens_per_gpu=40
        )
        trainer = FsdpTrainer(config, algorithm, temperature=TEMPERATURE, seed=0, device="cpu")
        trainer.load(model_folder, "start")
        return trainer

    trainer = make(AlgorithmConfig())
    trainer.train("start", "moved", toy.shares(toy.random_sequences(12, seed=8), 1)[0])
    trainer.save_state(folder / "state")
    trainer.export_hf(folder / "hf", "float32")
    draw = random.Random(1)
    samples, rewards = make_samples(toy.vocab)
    policy = Plain(folder / "hf")
    for sample in samples:
        exact = policy.score(sample)[0].tolist()
        sample.rollout_log_probs = [x + draw.gauss(0, 0.15) for x in exact]
    return folder, Stored(folder / "store", samples, rewards=rewards), samples, rewards, make


# --- the other implementation ---------------------------------------------------------------------


class Plain:
    """transformers in float64, a sample at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def score(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the response's tokens."""
        ids = torch.tensor(sample.tokens)
        logits = self.model(ids[None], use_cache=False).logits[0] / TEMPERATURE
        first = len(ids) - sample.response_length - 1
        log_p = logits[first:-1].log_softmax(-1)
        chosen = log_p.gather(-1, ids[first + 1 :, None])[:, 0]
        return chosen, -(log_p.exp() * log_p).sum(-1)


def group_numbers(rewards: list[float | None], a: AlgorithmConfig) -> list[float | None]:
    numbers: list[float | None] = []
    for i, r in enumerate(rewards):
        first = i // GROUP * GROUP
        group = [x for x in rewards[first : first + GROUP] if x is not None]
        mean = sum(group) / len(group)
        std = (sum((x - mean) ** 2 for x in group) / (len(group) - 1)) ** 0.5
        raw = not a.rewards_normalization or a.advantage_estimator == "reinforce_plus_plus"
        if r is None or raw:
            numbers.append(r)
        elif "baseline" in a.advantage_estimator or not a.grpo_std_normalization:
            numbers.append(r - mean)
        else:
            numbers.append((r - mean) / (std + 1e-6))
    return numbers


def estimate(x: Tensor, kind: str) -> Tensor:
    return {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[kind]


def token_advantages(number: float, kl: Tensor, a: AlgorithmConfig) -> Tensor:
    if a.advantage_estimator == "reinforce_plus_plus":
        own, out = (-a.kl_coef * kl).tolist(), [0.0] * len(kl)
        own[-1] += number
        for t in range(len(own)):
            out[t] = sum(a.gamma ** (u - t) * own[u] for u in range(t, len(own)))
        return torch.tensor(out, dtype=torch.float64)
    return number - a.kl_coef * kl


def whitened(columns: list[Tensor]) -> list[Tensor]:
    every = torch.cat(columns)
    std = (every.var(correction=1) + 1e-8).sqrt()
    return [(c - every.mean()) / std for c in columns]


def losses_of(t: dict[str, Tensor], a: AlgorithmConfig) -> Tensor:
    """Loss of each trained token of one sample."""
    x, adv = t["new"] - t["old"], t["advantages"]
    if a.advantage_estimator == "gspo":
        x = x.mean().expand_as(x)
    rho, low, high = x.exp(), 1 - a.clip_low, 1 + a.clip_high
    if a.advantage_estimator == "cispo":
        out = -rho.clamp(low, high).detach() * adv * t["new"]
    else:
        out = -torch.minimum(rho * adv, rho.clamp(low, high) * adv)
        if a.eps_clip_c is not None:
            out = torch.where(adv < 0, torch.minimum(out, -a.eps_clip_c * adv), out)
    if a.use_opsm and (t["old"] - t["new"]).mean() > a.opsm_delta:
        out = torch.where(adv < 0, 0.0, out)
    if a.use_tis:
        y = (t["old"] - t["engine"]).detach()
        y = {"token": y, "sequence": y.sum(), "geometric": y.mean()}[a.tis_level].expand_as(y)
        w, bounds = y.exp(), (a.tis_clip_low, a.tis_clip)
        inside = (w >= bounds[0]) & (w <= bounds[1])
        out = out * (w.clamp(*bounds) if a.tis_mode == "clip" else torch.where(inside, w, 0.0))
    if a.use_kl_loss:
        kl = estimate(t["new"] - t["ref"], a.kl_loss_type)
        kl = kl * (t["new"] - t["old"]).exp() if a.use_unbiased_kl else kl
        out = out + a.kl_loss_coef * kl
    return out - a.entropy_coef * t["entropy"]


def independent(
    policy: Plain, reference: Plain, samples: list[Sample], numbers: list[Any], a: AlgorithmConfig
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step over all samples."""
    rows = []
    for sample, number in zip(samples, numbers, strict=True):
        mask = torch.tensor(sample.loss_mask or [1] * sample.response_length).bool()
        if number is None or not mask.any():
            continue
        new, entropy = policy.score(sample)
        engine = torch.tensor(sample.rollout_log_probs, dtype=torch.float32).double()
        t = {
            "new": new,
            "entropy": entropy,
            "engine": engine,
            "old": engine if a.use_rollout_logprobs else new.detach(),
            "ref": reference.score(sample)[0].detach(),
        }
        t = {name: values[mask] for name, values in t.items()}
        kl = estimate((t["old"] - t["ref"]).detach(), a.kl_loss_type)
        rows.append(t | {"advantages": token_advantages(number, kl, a)})
    if a.normalize_advantages or "reinforce" in a.advantage_estimator:
        for t, values in zip(rows, whitened([t["advantages"] for t in rows]), strict=True):
            t["advantages"] = values
    terms = [losses_of(t, a) for t in rows]
    loss = {
        "token_mean": lambda: torch.cat(terms).mean(),
        "sequence_mean": lambda: torch.stack([x.mean() for x in terms]).mean(),
        "constant": lambda: torch.cat(terms).sum() / (len(terms) * a.loss_divisor),  # type: ignore[operator]
    }[a.loss_aggregation]()
    loss.backward()
    grads = {name: p.grad for name, p in policy.model.named_parameters()}
    return loss.item(), grads


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_another_implementation(
    moved: Any, model_folder: Path, name: str
) -> None:
    folder, stored, samples, rewards, make = moved
    algorithm = AlgorithmConfig(**CASES[name])
    trainer = make(algorithm)
    trainer.load_state(folder / "state", "moved")
    batch = stored.load(algorithm=algorithm, max_tokens_per_gpu=40)
    metrics = trainer.train("moved", "next", batch).metrics
    numbers = group_numbers(rewards, algorithm)
    policy, reference = Plain(folder / "hf"), Plain(model_folder)
    loss, grads = independent(policy, reference, samples, numbers, algorithm)
    assert metrics["loss"] == pytest.approx(loss, abs=TOLERANCE)
    # Adam's first moment without decay is the gradient itself.
    moments = dict(trainer._optimizer.moments())
    got = {n: moments[f"exp_avg.{n}"].full_tensor().double() for n in grads}
    size = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
    distance = sum(float((got[n] - grads[n]).square().sum()) for n in grads) ** 0.5
    assert size > 1e-3
    assert distance <= TOLERANCE * max(1.0, size)
    assert metrics["grad_norm"] == pytest.approx(size, rel=1e-5)
    if name in ACTS:
        assert 0 < metrics[ACTS[name]] < 0.9


@pytest.mark.parametrize("name", ["gspo", "reinforce++", "tis, sequences", "opsm", "dr.grpo"])
def test_ranks_and_packing_do_not_show(
    toy: Any, two_ranks: Any, one_rank: Any, model_folder: Path, name: str
) -> None:
    sequences = toy.random_sequences(13)
    job = {"algorithm": AlgorithmConfig(**CASES[name])}
    cuts: list[Callable[[int], Any]] = [
        lambda world: toy.shares(sequences, world, num_steps=2),
        lambda world: toy.shares(sequences, world, num_steps=2, micro_batches=4),
    ]
    runs = [one_rank.run(model_folder, [cut(1)], **job)[0] for cut in cuts]
    runs += two_ranks.run(model_folder, [cuts[1](2)], **job)
    first = runs[0]["reports"][0]
    for run in runs[1:]:
        for metric in ("loss", "grad_norm", "pg_clipfrac"):
            assert run["reports"][0][metric] == pytest.approx(first[metric], abs=1e-5)


def test_the_mean_of_the_penalty_is_reported(toy: Any, make_trainer: Any) -> None:
    algorithm = AlgorithmConfig(**CASES["reinforce++"])
    trainer = make_trainer(algorithm=algorithm)
    batch = toy.shares(toy.random_sequences(6), 1)[0]
    assert trainer.train("start", "a", batch).metrics["rollout/kl"] == 0.0
    assert trainer.train("a", "b", batch).metrics["rollout/kl"] > 1e-4


def test_true_on_policy_refuses_any_gap_beyond_the_limit(toy: Any, make_trainer: Any) -> None:
    plain = make_trainer()
    sequences = toy.random_sequences(5)
    exact = [
        replace(s, rollout_log_probs=row[-s.response_length :])
        for s, row in zip(
            sequences, plain.log_probs([list(s.tokens) for s in sequences]), strict=True
        )
    ]
    near = make_trainer(algorithm=AlgorithmConfig(true_on_policy_mode=True, max_logprob_gap=1e-4))
    report = near.train("start", "next", toy.shares(exact, 1)[0])
    assert report.metrics["train_rollout_logprob_abs_diff_max"] <= 1e-4
    # One token out of line: the mean would not show it.
    off = list(exact[0].rollout_log_probs)
    off[-1] += 2e-3
    batch = toy.shares([replace(exact[0], rollout_log_probs=off, loss_mask=None), *exact[1:]], 1)[0]
    for config in (
        AlgorithmConfig(true_on_policy_mode=True, max_logprob_gap=1e-3),
        AlgorithmConfig(true_on_policy_mode=True),
    ):
        strict = make_trainer(algorithm=config)
        with pytest.raises(TrainError, match=r"\(at most\) in their log-probs"):
            strict.train("start", "next", batch)
        assert not strict.dirty
    mean = make_trainer(algorithm=AlgorithmConfig(max_logprob_gap=1e-3))
    mean.train("start", "next", batch)
