"""What `sluice lab` measures is what training does, and it changes nothing."""

import math
from typing import Any

import pytest
import torch

from rlcore.config import AlgorithmConfig, build_config
from rlcore.lab import OWN, _cosine, variants


def config(**algorithm: Any) -> Any:
    return build_config(
        {
            "model": {"path": "/model"},
            "data": {"path": "/train.jsonl"},
            "reward": {"custom_rm_path": "mine:reward"},
            "algorithm": algorithm,
        }
    )


def test_measured_is_what_a_step_does_and_nothing_is_applied(toy: Any, make_trainer: Any) -> None:
    batch = toy.shares(toy.random_sequences(6), 1)[0]
    trainer = make_trainer(adam_beta1=0.0, clip_grad=1e9)
    before = trainer.digest()
    algorithm = AlgorithmConfig(advantage_estimator="gspo", use_rollout_logprobs=True)
    measured, gradient = trainer.measure(batch, algorithm)
    assert trainer.digest() == before
    assert (trainer.loaded, trainer.dirty) == ("start", False)
    twin = make_trainer(algorithm=algorithm, adam_beta1=0.0, clip_grad=1e9)
    trained = twin.train("start", "next", batch).metrics
    for name in ("loss", "grad_norm", "pg_clipfrac", "effective_sample_size"):
        assert measured[name] == trained[name]
    moments = dict(twin._optimizer.moments())
    applied = [v.full_tensor().flatten() for k, v in moments.items() if k.startswith("exp_avg.")]
    torch.testing.assert_close(torch.cat(gradient), torch.cat(applied), rtol=1e-6, atol=1e-9)
    # And training goes on as if it had never been measured.
    plain = make_trainer(adam_beta1=0.0, clip_grad=1e9)
    for one in (trainer, plain):
        one.train("start", "next", batch)
    assert trainer.digest() == plain.digest()


def test_a_run_comes_first_with_its_own_settings() -> None:
    found = variants(config(advantage_estimator="gspo", clip_high=0.5, max_logprob_gap=0.1))
    own = found[OWN]
    assert next(iter(found)) == OWN
    assert (own.advantage_estimator, own.clip_high, own.max_logprob_gap) == ("gspo", 0.5, None)
    assert own.use_rollout_logprobs
    assert not variants(config(use_tis=True))[OWN].use_rollout_logprobs


def test_every_estimator_and_every_correction_is_compared() -> None:
    found = list(variants(config()).values())[1:]
    estimators = {a.advantage_estimator for a in found}
    assert estimators | {"ppo"} == set(
        AlgorithmConfig.model_fields["advantage_estimator"].annotation.__args__
    )  # type: ignore[union-attr]
    assert "ppo" not in estimators, "it needs a critic, which only a run of ppo has"
    assert "ppo" in variants(config(advantage_estimator="ppo"))
    assert {a.tis_level for a in found if a.use_tis} == {"token", "sequence", "geometric"}
    for name in ("use_opsm", "use_kl_loss", "use_unbiased_kl", "eps_clip_c", "entropy_coef"):
        assert any(getattr(a, name) for a in found), name
    assert all(a.use_tis != a.use_rollout_logprobs for a in found)


def test_cosines() -> None:
    a, b = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])], [torch.ones(2), torch.zeros(1)]
    assert _cosine(a, a) == pytest.approx(1.0)
    assert _cosine(a, b) == pytest.approx(3 / (5 * math.sqrt(2)))
    assert _cosine(a, [torch.zeros(2), torch.zeros(1)]) is None
