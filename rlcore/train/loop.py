"""One rollout batch through the optimizer: log-probs, then forward, backward and update.

The loss of a step is a sum over all its tokens with weights that add up to 1
(`algorithms.aggregate`), so micro-batches and ranks just add up. How a model is passed through is
its backend's to know (`rlcore.train.backend`).

Where the old log-probs come from: the engine (`algorithm.use_rollout_logprobs`); or, with one step
a batch, the training forward itself, whose policy is the one that sampled (the ratio is 1 and only
its gradient matters); else, and for a KL penalty on rewards, a forward pass over the whole batch
before the first step. `credit` makes token advantages of what is known then. Functions of one's
own take the place of parts of this (`rlcore.train.custom`).

Invariants:
- Nothing is applied of a step whose loss or gradient norm is not finite, and nothing of a batch
  whose log-probs are further from the engine's than `algorithm.max_logprob_gap`.
- All ranks enter the same collectives in the same order: a rank without samples passes a
  masked token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms.aggregate import constant_scale
from rlcore.algorithms.demonstrations import Demonstrations, cross_entropy, perplexity
from rlcore.algorithms.logprobs import token_log_probs
from rlcore.algorithms.losses import (
    LossInputs,
    LossOutputs,
    PolicyLossSettings,
    Surrogate,
    effective_share,
    log_prob_gap,
    policy_loss,
)
from rlcore.algorithms.metrics import Metrics, merge_metrics
from rlcore.algorithms.off_policy import ImportanceSampling
from rlcore.algorithms.packing import LogProbs, pack
from rlcore.algorithms.values import ValueInputs, value_loss
from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import TrainError
from rlcore.train.backend import Models, Optimizer, Scores
from rlcore.train.credit import MicroBatch, spread_advantages
from rlcore.train.custom import Functions
from rlcore.train.means import LOG_PROBS, throughput, token_mean, token_means
from rlcore.train.rates import clip_scale
from rlcore.train.trainer import TrainBatch, TrainStep

GAP_PREFIX = "train_rollout_"
GAP = "train_rollout_logprob_abs_diff"
FINITE = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "value_loss": "critic's loss",
    "critic_grad_norm": "critic's gradient norm",
}
Scalars = dict[str, float]
Weigh = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Metrics]]
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LoopSettings:
    """What the loop needs of the configuration."""

    algorithm: AlgorithmConfig
    temperature: float
    """Of the rollout: the logits are divided by it."""
    clip_grad: float
    lr: Callable[[int], float]
    """Learning rate of an optimizer step, counted from the start of the run."""
    device: torch.device
    critic_lr: Callable[[int], float] | None = None
    """Of a critic's optimizer step."""

    @property
    def loss(self) -> PolicyLossSettings:
        """The settings of the loss."""
        return loss_settings(self.algorithm)


@dataclass
class Clock:
    """Seconds by phase, the device's work included."""

    device: torch.device
    seconds: Scalars = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time to a phase."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def loss_settings(a: AlgorithmConfig) -> PolicyLossSettings:
    """What the configuration asks of the loss."""
    surrogates: dict[str, Surrogate] = {"gspo": "gspo", "cispo": "cispo"}
    bounds = ImportanceSampling(a.tis_clip_low, a.tis_clip, a.tis_level, a.tis_mode)
    return PolicyLossSettings(
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        kl_coef=a.kl_loss_coef if a.use_kl_loss else 0.0,
        kl_kind=a.kl_loss_type,
        surrogate=surrogates.get(a.advantage_estimator, "clipped"),
        dual_clip=a.eps_clip_c,
        unbiased_kl=a.use_unbiased_kl,
        entropy_coef=a.entropy_coef,
        opsm_delta=a.opsm_delta if a.use_opsm else None,
        sampling=bounds if a.use_tis and a.custom_tis_function_path is None else None,
    )


class BatchLoop:
    """Trains one batch; `run` or `measure` is called once. `stepped`: the weights have changed."""

    def __init__(
        self,
        models: Models,
        settings: LoopSettings,
        batch: TrainBatch,
        own: Functions | None = None,
    ) -> None:
        self._models = models
        self._policy = models.policy
        self._ranks = models.ranks
        self._optimizer = models.optimizer
        self._critic = models.critic
        self._settings = settings
        self._batch = batch
        self._own = own or Functions(settings.algorithm, settings.temperature)
        self._clock = Clock(settings.device)
        self.stepped = False
        self._old_from_rollout = settings.algorithm.use_rollout_logprobs
        self._critic_only = (
            self._critic is not None and batch.iteration < settings.algorithm.num_critic_only_steps
        )
        # A policy that is not trained is passed through all the same: its gap to the engine shows.
        several = len(batch.steps) > 1 or self._critic_only
        self._supervised = settings.algorithm.loss_type == "sft_loss"
        ahead = (several and not self._supervised) or settings.algorithm.needs_old_ahead
        self._old_ahead = ahead and not self._old_from_rollout
        self._follows = settings.algorithm.use_opd and models.teacher is None
        """Whether a teacher on a server has scored the samples."""
        self._check_rollout_log_probs()

    def run(self) -> Scalars:
        """All optimizer steps.

        Returns:
            Metrics: means over the steps (maxima for those that are), means over the batch's
            tokens, seconds by phase and speed.

        Raises:
            TrainError: a number is not finite, or the log-prob gap is too large.
        """
        start = time.perf_counter()
        steps, gap, means = self._begin()
        reports = []
        for number, step in enumerate(steps):
            with self._clock.phase("seconds_forward_backward"):
                metrics = {} if self._critic_only else self._forward_backward(number, step)
                metrics |= self._critic_forward_backward(step)
            with self._clock.phase("seconds_optimizer"):
                norms = {name: o.collect_gradients() for name, (o, _) in self._learners().items()}
                metrics |= {f"{name}grad_norm": norm for name, norm in norms.items()}
                self._check_finite(number, metrics)
                if number == 0:
                    gap = gap or {k: v for k, v in metrics.items() if k.startswith(GAP_PREFIX)}
                    self._check_gap(gap)
                self.stepped = True
                for name, (optimizer, rate) in self._learners().items():
                    metrics[f"{name}lr"] = rate(optimizer.steps)
                    scale = clip_scale(norms[name], self._settings.clip_grad)
                    optimizer.step(metrics[f"{name}lr"], scale)
            reports.append(metrics)
        seconds = time.perf_counter() - start
        speed = {"seconds_train": seconds, "tokens_per_s": self._batch.tokens / max(seconds, 1e-9)}
        means |= self._policy.expert_load.figures()
        return _over_steps(reports) | gap | means | self._clock.seconds | speed | self._speed()

    def measure(self) -> Scalars:
        """Metrics and gradient of the first step, which is not applied; its gradient stays with the
        optimizer.
        """
        steps, _, _ = self._begin()
        metrics = self._forward_backward(0, steps[0])
        return metrics | {"grad_norm": self._optimizer.collect_gradients()}

    # --- before the first step --------------------------------------------------------------------

    def _begin(self) -> tuple[list[list[MicroBatch]], Scalars, Scalars]:
        """All that must be known before the weights change; the gap, where that shows it; means
        over the batch's tokens.
        """
        self._drop_gradients()
        self._policy.expert_load.reset()
        steps = [self._prepare(step) for step in self._batch.steps]
        gap = self._score_ahead(steps)
        spread_advantages(steps, self._settings.algorithm, self._ranks, self._own)
        if self._supervised:
            return steps, gap, {}
        return steps, gap, token_means(steps, self._ranks, own_old=not self._old_from_rollout)

    def _prepare(self, step: TrainStep) -> list[MicroBatch]:
        """The step's micro-batches on the device."""
        how = self._settings.algorithm.loss_aggregation
        given: list[LogProbs] = ["rollout_log_probs"] if self._batch.rollout_log_probs else []
        if self._follows:
            given.append("teacher_log_probs")
        micros = []
        for sequences in step.micro_batches:
            # What a constant makes of the mean is for the whole step to say.
            weighed = "token_mean" if how == "constant" else how
            packed = pack(sequences, step.totals, weighed, log_probs=given)
            # A loss of one's own gets the logits of all tokens.
            packed = packed if "loss" in self._own else packed.inputs()
            seen = sequences if self._own.see_tokens else ()
            micros.append(MicroBatch.of(packed, self._settings.device, seen))
        return micros

    @torch.no_grad()
    def _score_ahead(self, steps: Sequence[Sequence[MicroBatch]]) -> Scalars:
        """Log-probs and values that must be known before the weights change; the gap, where that
        shows it.
        """
        micros, gap = [micro for step in steps for micro in step], {}
        if self._old_ahead:
            with self._clock.phase("seconds_log_probs"):
                gap = _over_steps([self._score_old(step) for step in steps])
        models = {"ref": self._models.reference, "teacher": self._models.teacher}
        for name, model in models.items():
            if model is not None:
                with self._clock.phase(f"seconds_{name}_log_probs"):
                    for micro, values in zip(micros, self._score(model, micros), strict=True):
                        setattr(micro, name, values)
        if self._critic is not None:
            with self._clock.phase("seconds_values"):
                for micro, values in zip(micros, self._critic.model.values(micros), strict=True):
                    micro.values = values
        for micro in micros:
            if self._old_from_rollout:
                micro.old = micro.pick("rollout_log_probs")
            if self._follows:
                micro.teacher = micro.pick("teacher_log_probs")
        return gap

    def _score_old(self, step: Sequence[MicroBatch]) -> Scalars:
        """The policy's log-probs of a step before the first one; their gap to the engine's."""
        parts = []
        for micro, old in zip(step, self._score(self._policy, step), strict=True):
            micro.old = old
            if self._batch.rollout_log_probs:
                parts.append(self._gap(micro, old))
        return self._over_ranks(merge_metrics(parts))

    def _score(self, model: Scores, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs at the trained positions, at the rollout's temperature."""
        return model.score(micros, self._settings.temperature)

    def _gap(self, micro: MicroBatch, log_probs: Tensor) -> Metrics:
        """Distance of the trainer's log-probs to the engine's."""
        mask, weights = micro.pick("loss_mask"), micro.pick("loss_weights")
        return log_prob_gap(log_probs, micro.pick("rollout_log_probs"), mask, weights)

    # --- a step -----------------------------------------------------------------------------------

    def _forward_backward(self, number: int, step: Sequence[MicroBatch]) -> Scalars:
        """Gradients of the step on the parameters; its metrics over all ranks."""
        # The policy of later steps has moved: only that of the first is the engine's.
        shows = number == 0 and not self._old_ahead
        by_function = "loss" in self._own

        def loss(micro: MicroBatch, answer: Any) -> tuple[Tensor, list[Metrics]]:
            if by_function:
                out, log_probs = self._loss_of_function(micro, answer, with_log_probs=shows)
            else:
                out, log_probs = self._loss(micro, number, *answer), answer[0]
            found = [out.metrics]
            if shows and log_probs is not None:
                found.append(Metrics({LOG_PROBS: token_mean(micro, log_probs)}))
                if self._batch.rollout_log_probs:
                    found.append(self._gap(micro, log_probs))
            return out.loss, found

        scale = self._scale(number)
        temperature = None if by_function else self._settings.temperature
        parts = self._policy.accumulate(step, loss, scale=scale, temperature=temperature)
        metrics = self._over_ranks(self._complete(merge_metrics(parts)))
        if self._supervised:
            metrics["perplexity"] = perplexity(metrics["loss"])
        return metrics | {"loss": metrics["loss"] * scale}

    def _loss(
        self, micro: MicroBatch, number: int, log_probs: Tensor, entropy: Tensor
    ) -> LossOutputs:
        """The loss of a micro-batch, of what its trained tokens got."""
        settings = self._settings.loss
        mask, weights = micro.pick("loss_mask"), micro.pick("loss_weights")
        if self._supervised:
            return cross_entropy(Demonstrations(log_probs, mask, weights, entropy))
        engine = settings.sampling is not None or "tis" in self._own
        weigh, reduce = self._own_parts(micro, number)
        inputs = LossInputs(
            log_probs=log_probs,
            advantages=micro.advantages,
            mask=mask,
            weights=weights,
            old_log_probs=micro.old,
            ref_log_probs=micro.ref,
            entropy=entropy,
            rollout_log_probs=micro.pick("rollout_log_probs") if engine else None,
            lengths=micro.lengths,
            weigh=weigh,
            reduce=reduce,
        )
        return policy_loss(inputs, settings)

    def _own_parts(self, micro: MicroBatch, number: int) -> tuple[Weigh | None, Reduce | None]:
        """Importance weights and reduction by functions of one's own, over a micro-batch."""
        there, totals = micro.responses, self._batch.steps[number].totals
        if there is None:
            return None, None
        by_tokens = self._settings.algorithm.loss_aggregation == "token_mean"
        count = totals.tokens if by_tokens else totals.sequences
        masks = list(there.masks)

        def weigh(losses: Tensor, old: Tensor, engine: Tensor) -> tuple[Tensor, Metrics]:
            done = there.weigh(self._own, losses, old, engine)
            masks[:] = done.masks
            return done.loss, done.metrics

        def reduce(losses: Tensor) -> Tensor:
            return there.reduce(self._own, losses, masks, per_token=by_tokens, count=count)

        chosen = weigh if "tis" in self._own else None
        return chosen, reduce if "pg_loss_reducer" in self._own else None

    def _loss_of_function(
        self, micro: MicroBatch, logits: Tensor, *, with_log_probs: bool
    ) -> tuple[LossOutputs, Tensor | None]:
        """The loss by a function of one's own, and the log-probs of trained tokens if asked for."""
        there = micro.responses
        log_probs = None
        if with_log_probs:
            rows = logits.detach().index_select(0, micro.rows)
            log_probs = token_log_probs(rows, micro.pick("targets"), self._settings.temperature)[0]
        if there is None:
            # Every rank enters the collectives of backward.
            return LossOutputs(
                logits.sum() * 0.0, Metrics({"loss": logits.new_zeros(())})
            ), log_probs
        given = micro.told()
        given["tokens"] = micro.packed.input_ids[None]
        given["unconcat_tokens"] = there.tokens
        given["advantages"] = there.each(micro.advantages)
        given.setdefault("returns", given["advantages"])
        loss, found = self._own.loss(given, logits[None], there.mean)
        sums = {
            name: torch.as_tensor(value, dtype=torch.float32, device=loss.device).detach()
            for name, value in found.items()
        }
        return LossOutputs(loss, Metrics(sums | {"loss": loss.detach()})), log_probs

    def _complete(self, metrics: Metrics) -> Metrics:
        """The same names on all ranks, where a function of one's own names them and some ranks had
        no samples to call it with.
        """
        if not self._own.see_tokens:
            return metrics
        names: list[list[str]] = self._ranks.gather(list(metrics.means))
        zero = next(iter(metrics.means.values())).new_zeros(())
        return Metrics(
            {name: zero for one in names for name in one} | metrics.means, metrics.maxima
        )

    def _over_ranks(self, metrics: Metrics) -> Scalars:
        """Metrics of the whole step as numbers, the same on every rank."""
        out: Scalars = {}
        for values, reduce in (
            (metrics.means, self._ranks.add),
            (metrics.maxima, self._ranks.maximum),
        ):
            if not (names := sorted(values)):
                continue
            stacked = torch.stack([values[name].detach().double() for name in names])
            reduce(stacked)
            out |= dict(zip(names, stacked.tolist(), strict=True))
        if "entropy_loss" in out:
            out["entropy"] = out.pop("entropy_loss")
        if "effect" in out:
            share = effective_share(out.pop("effect"), out.pop("effect_square"))
            out["effective_sample_size"] = share
        return out

    def _critic_forward_backward(self, step: Sequence[MicroBatch]) -> Scalars:
        """The critic's gradients of the step, and its metrics over all ranks; none without one."""
        if self._critic is None:
            return {}

        def loss(micro: MicroBatch, values: Tensor) -> tuple[Tensor, list[Metrics]]:
            assert micro.values is not None and micro.returns is not None
            inputs = ValueInputs(
                values=values,
                old_values=micro.values,
                returns=micro.returns,
                mask=micro.pick("loss_mask"),
                weights=micro.pick("loss_weights"),
            )
            out = value_loss(inputs, self._settings.algorithm.value_clip)
            return out.loss, [out.metrics]

        return self._over_ranks(merge_metrics(self._critic.model.accumulate(step, loss)))

    def _learners(self) -> dict[str, tuple[Optimizer, Callable[[int], float]]]:
        """What is trained on this batch, with its learning rate, by the prefix of its metrics."""
        learners = {} if self._critic_only else {"": (self._optimizer, self._settings.lr)}
        if self._critic is not None:
            rate = self._settings.critic_lr or self._settings.lr
            learners["critic_"] = (self._critic.optimizer, rate)
        return learners

    def _speed(self) -> Scalars:
        """Throughput of the batch."""
        # Nothing is computed of the gradient of a frozen weight; a critic counts as the policy.
        costs = {"": 2 if self._policy.frozen else 3, "critic_": 3}
        return throughput(
            self._batch,
            self._policy.shape,
            self._clock.seconds,
            self._ranks,
            passes=sum(costs[name] for name in self._learners()),
            all_logits="loss" in self._own,
        )

    def _drop_gradients(self) -> None:
        self._optimizer.drop_gradients()
        if self._critic is not None:
            self._critic.optimizer.drop_gradients()

    def _scale(self, number: int) -> float:
        """What the mean over a step's tokens is multiplied by."""
        divisor = self._settings.algorithm.loss_divisor
        return 1.0 if divisor is None else constant_scale(self._batch.steps[number].totals, divisor)

    # --- checks -----------------------------------------------------------------------------------

    def _check_rollout_log_probs(self) -> None:
        if self._follows and not self._batch.teacher_log_probs:
            raise TrainError(
                f"iteration {self._batch.iteration}: algorithm.use_opd = true, but some samples of "
                "the batch have no log-probs of the teacher; set rollout.teacher_url"
            )
        if self._batch.rollout_log_probs:
            return
        if name := self._settings.algorithm.needs_rollout_log_probs:
            raise TrainError(
                f"iteration {self._batch.iteration}: algorithm.{name} needs the engine's "
                "log-probs, which some samples of the batch lack; have the generate function "
                "keep them, or leave the setting out"
            )

    def _check_finite(self, number: int, metrics: Scalars) -> None:
        for key, name in FINITE.items():
            value = metrics.get(key, 0.0)
            if not math.isfinite(value):
                self._drop_gradients()
                raise TrainError(
                    f"iteration {self._batch.iteration}, optimizer step {number + 1} of "
                    f"{len(self._batch.steps)}: the {name} is {value}; the step was not applied. "
                    "Look at the batch's log-probs and rewards, or lower train.lr"
                )

    def _check_gap(self, gaps: Scalars) -> None:
        algorithm = self._settings.algorithm
        limit, name, what = algorithm.max_logprob_gap, GAP, "on average"
        if algorithm.true_on_policy_mode:
            limit, name, what = limit or 0.0, f"{GAP}_max", "at most"
        gap = gaps.get(name)
        if limit is None or gap is None or gap <= limit:
            return
        self._drop_gradients()
        raise TrainError(
            f"iteration {self._batch.iteration}: trainer and engine differ by {gap:.4g} nat a "
            f"token ({what}) in their log-probs, more than algorithm.max_logprob_gap = {limit}; "
            "nothing was trained. Check that the engine has the trainer's weights and precision, "
            "or raise the limit"
        )


def _over_steps(reports: Sequence[Scalars]) -> Scalars:
    """Means over the steps that have the metric, maxima of those that are maxima."""
    out: Scalars = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report[name] for report in reports if name in report]
        out[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return out
