"""The section `algorithm`: advantages and loss, with the rules between its settings.

Invariant: settings that contradict each other, or that could have no effect beside the others, are
an error before anything starts.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlcore.config.section import FilePath, FunctionPath, PositiveInt, Section

Estimator = Literal[
    "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]
WITHOUT_POLICY_LOSS = (
    "advantage_estimator",
    "normalize_advantages",
    "eps_clip_c",
    "use_kl_loss",
    "kl_coef",
    "entropy_coef",
    "use_opd",
    "use_opsm",
    "use_tis",
    "use_rollout_logprobs",
    "max_logprob_gap",
    "true_on_policy_mode",
    "custom_reward_post_process_path",
    "custom_advantage_function_path",
    "custom_pg_loss_reducer_function_path",
    "custom_loss_function_path",
)
"""Settings that could have no effect where demonstrations are learned."""
OF_A_PART = {
    "kl_loss_coef": "use_kl_loss",
    "opsm_delta": "use_opsm",
    "opd_kl_coef": "use_opd",
    "tis_clip": "use_tis",
    "tis_clip_low": "use_tis",
    "tis_level": "use_tis",
    "tis_mode": "use_tis",
}
"""Settings of a part of the algorithm, and what turns that part on."""
REINFORCE = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})


class AlgorithmConfig(Section):
    """Advantages and loss."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """`sft_loss`: cross-entropy of the trained tokens, whatever their rewards."""
    advantage_estimator: Estimator = "grpo"
    """Where advantages come from and what the loss is; see docs/algorithms.md."""
    rewards_normalization: bool = True
    """Take the group's mean off the reward; off, the reward itself is the advantage."""
    grpo_std_normalization: bool = True
    """Divide the advantage by its group's standard deviation; off is Dr.GRPO (arXiv 2503.20783)."""
    normalize_advantages: bool | None = None
    """Whiten advantages over the tokens of the batch; default: where the estimator needs it."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a token, for `reinforce_plus_plus` and `ppo`."""
    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of the generalised advantages of `ppo`: 0 is one step, 1 the whole return."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """How far a value may go from what it was before the batch, for `ppo`."""
    critic_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the critic; default: train.lr."""
    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """First iterations that train the critic alone."""
    use_opd: bool = False
    """On-policy distillation: take the distance to a teacher off the advantages."""
    opd_teacher_load: FilePath = ""
    """Hugging Face folder of the teacher, whose token ids are the model's, for the trainer to hold;
    else `rollout.teacher_url`."""
    opd_kl_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the distance to the teacher."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: the loss of a token with a negative advantage is at most this times its size."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over a step's tokens; or over its sequences' means; or sums over a constant."""
    loss_divisor: PositiveInt | None = None
    """Tokens by which `constant` divides the sum over a sequence, as the longest response has."""
    use_kl_loss: bool = False
    """Add a KL term against the starting model to the loss."""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a KL penalty on each token's reward, for `ppo` and `reinforce_plus_plus*`."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of KL term and KL penalty."""
    use_unbiased_kl: bool = False
    """Multiply the KL term by the ratio to the policy that sampled (arXiv 2512.02556)."""
    ref_update_interval: PositiveInt | None = None
    """Iterations after which the policy becomes the reference; none: always the starting model."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy bonus."""
    use_opsm: bool = False
    """Leave out sequences of negative advantage that the policy has left (arXiv 2512.02556)."""
    opsm_delta: Annotated[float, Field(ge=0)] = 1e-4
    """Mean of log pi_old - log pi, in nat a token, beyond which a sequence is left."""
    use_tis: bool = False
    """Truncated importance sampling: weigh by how much likelier the trainer finds a token."""
    tis_clip: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""
    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: the token's, the product over its sequence, or that product's geometric mean."""
    tis_mode: Literal["clip", "mask"] = "clip"
    """Weights beyond the bounds become the bound, or 0."""
    use_rollout_logprobs: bool = False
    """Take the old log-probs from the engine instead of computing them again in the trainer."""
    max_logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """Stop when the mean gap between engine and trainer log-probs is larger than this."""
    true_on_policy_mode: bool = False
    """Stop when any token's gap is larger than max_logprob_gap, or, without one, not exactly 0."""
    custom_reward_post_process_path: FunctionPath | None = None
    """A function `(args, samples)` that makes advantages of rewards in place of the baseline."""
    custom_convert_samples_to_train_data_path: FunctionPath | None = None
    """A function `(args, samples)` that makes training sequences of a batch's samples."""
    custom_advantage_function_path: FunctionPath | None = None
    """A function `(args, rollout_data)` that sets advantages in place of the estimator's."""
    custom_tis_function_path: FunctionPath | None = None
    """With use_tis: a function that weighs tokens' losses in place of tis_level and tis_mode."""
    custom_pg_loss_reducer_function_path: FunctionPath | None = None
    """A function that gives one to reduce the policy loss with; KL and entropy are left alone."""
    custom_loss_function_path: FunctionPath | None = None
    """A function `(args, batch, logits, sum_of_sample_mean)` in place of the whole loss."""

    @model_validator(mode="after")
    def _estimator_agrees(self) -> "AlgorithmConfig":
        name, reinforce = self.advantage_estimator, self.advantage_estimator in REINFORCE
        if reinforce and self.normalize_advantages is False:
            raise ValueError(
                f"algorithm.advantage_estimator = {name!r} needs whitened advantages: remove "
                "algorithm.normalize_advantages = false"
            )
        own = self.custom_advantage_function_path is not None
        if self.kl_coef and not (reinforce or self.has_critic or own):
            raise ValueError(
                f"algorithm.kl_coef = {self.kl_coef} is a penalty on rewards, which "
                f"algorithm.advantage_estimator = {name!r} does not have: use "
                "algorithm.use_kl_loss = true with algorithm.kl_loss_coef"
            )
        if self.gamma != 1.0 and name not in ("reinforce_plus_plus", "ppo") and not own:
            raise ValueError(
                f"algorithm.gamma = {self.gamma} discounts the returns of 'reinforce_plus_plus' "
                f"and 'ppo'; algorithm.advantage_estimator = {name!r} has none"
            )
        for key in ("lambd", "value_clip", "critic_lr", "num_critic_only_steps"):
            value = getattr(self, key)
            if not self.has_critic and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"algorithm.{key} = {value} is about the critic of 'ppo'; "
                    f"algorithm.advantage_estimator = {name!r} has none"
                )
        if self.eps_clip_c is not None and name == "cispo":
            raise ValueError("algorithm.eps_clip_c is set, but 'cispo' has no dual clip; remove it")
        return self

    @model_validator(mode="after")
    def _loss_agrees(self) -> "AlgorithmConfig":
        if self.loss_type == "policy_loss":
            return self
        for key in WITHOUT_POLICY_LOSS:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(
                    f"algorithm.{key} = {value!r} is about the policy loss, which "
                    f"algorithm.loss_type = {self.loss_type!r} does not have; remove it"
                )
        return self

    @model_validator(mode="after")
    def _kl_agrees(self) -> "AlgorithmConfig":
        if self.use_kl_loss and self.kl_coef:
            raise ValueError(
                f"algorithm.kl_coef = {self.kl_coef} and algorithm.use_kl_loss = true punish the "
                "same divergence twice; use one of them"
            )
        if self.use_unbiased_kl and not self.use_kl_loss:
            raise ValueError(
                "algorithm.use_unbiased_kl = true is about the KL term; set "
                "algorithm.use_kl_loss = true, or remove it"
            )
        if self.ref_update_interval is not None and not self.needs_reference:
            raise ValueError(
                f"algorithm.ref_update_interval = {self.ref_update_interval} is about the "
                "reference of a KL term or penalty; set algorithm.use_kl_loss = true or "
                "algorithm.kl_coef, or remove it"
            )
        if (self.loss_divisor is not None) != (self.loss_aggregation == "constant"):
            raise ValueError(
                "algorithm.loss_aggregation = 'constant' and algorithm.loss_divisor, such as the "
                "value of rollout.max_response_len, belong together: give both or neither"
            )
        return self

    @model_validator(mode="after")
    def _parts_are_on(self) -> "AlgorithmConfig":
        if self.custom_advantage_function_path or self.custom_loss_function_path:
            # These see all settings.
            return self
        off = {key: switch for key, switch in OF_A_PART.items() if not getattr(self, switch)}
        if not self.needs_reference:
            off["kl_loss_type"] = "use_kl_loss"
        for key, switch in off.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default:
                raise ValueError(
                    f"algorithm.{key} = {value!r} has no effect with algorithm.{switch} = false: "
                    f"set that to true, or leave algorithm.{key} at {default!r}"
                )
        return self

    @model_validator(mode="after")
    def _old_policy_agrees(self) -> "AlgorithmConfig":
        if self.use_tis and self.use_rollout_logprobs:
            raise ValueError(
                "algorithm.use_tis = true weighs the trainer's old log-probs against the engine's, "
                "which algorithm.use_rollout_logprobs = true makes the same; use one of them"
            )
        if self.tis_clip_low > self.tis_clip:
            raise ValueError(
                f"algorithm.tis_clip_low = {self.tis_clip_low} is above algorithm.tis_clip = "
                f"{self.tis_clip}"
            )
        if self.true_on_policy_mode and (self.use_tis or self.use_opsm):
            name = "use_tis" if self.use_tis else "use_opsm"
            raise ValueError(
                f"algorithm.{name} = true corrects for another policy, which "
                "algorithm.true_on_policy_mode = true does not let happen; use one of them"
            )
        return self

    @model_validator(mode="after")
    def _functions_agree(self) -> "AlgorithmConfig":
        own = self.custom_loss_function_path is not None
        parts = ("use_tis", "use_opsm", "custom_pg_loss_reducer_function_path")
        part = next((name for name in parts if getattr(self, name)), None)
        if own and part is not None:
            raise ValueError(
                f"algorithm.{part} is about the loss that algorithm.custom_loss_function_path "
                "replaces; use one of them"
            )
        if self.custom_convert_samples_to_train_data_path and self.custom_reward_post_process_path:
            raise ValueError(
                "algorithm.custom_reward_post_process_path makes the numbers that the function of "
                "algorithm.custom_convert_samples_to_train_data_path returns as 'rewards'; use "
                "one of them"
            )
        if self.custom_tis_function_path is not None and not self.use_tis:
            raise ValueError(
                "algorithm.custom_tis_function_path is about truncated importance sampling; set "
                "algorithm.use_tis = true, or remove it"
            )
        reduces = self.custom_pg_loss_reducer_function_path is not None
        if reduces and self.loss_aggregation == "constant":
            raise ValueError(
                "algorithm.loss_aggregation = 'constant' divides by algorithm.loss_divisor, and so "
                "may the function of algorithm.custom_pg_loss_reducer_function_path; use one of "
                "them"
            )
        return self

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage_estimator == "ppo"

    @property
    def group_baseline(self) -> bool:
        """Whether rewards are compared with those of their group."""
        compares = self.advantage_estimator not in ("reinforce_plus_plus", "ppo")
        own = self.custom_reward_post_process_path or self.custom_convert_samples_to_train_data_path
        compares = compares and own is None
        learns = self.loss_type == "policy_loss"
        return self.rewards_normalization and compares and learns

    @property
    def group_std(self) -> bool:
        """Whether advantages are divided by the standard deviation of their group."""
        divides = self.grpo_std_normalization and self.advantage_estimator not in REINFORCE
        return divides and self.group_baseline

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the batch."""
        if self.normalize_advantages is None:
            return self.advantage_estimator in REINFORCE
        return self.normalize_advantages

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the starting model are needed."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def needs_old_ahead(self) -> bool:
        """Whether log-probs of the policy before the first step are needed as it begins."""
        shown = self.custom_advantage_function_path or self.custom_loss_function_path
        return self.kl_coef > 0 or self.use_opd or shown is not None

    @property
    def needs_rollout_log_probs(self) -> str | None:
        """Name of a setting that needs the engine's log-probs, if one is on."""
        wants = {
            "use_rollout_logprobs": self.use_rollout_logprobs,
            "use_tis": self.use_tis,
            "true_on_policy_mode": self.true_on_policy_mode,
            "max_logprob_gap": self.max_logprob_gap is not None,
        }
        return next((name for name, wanted in wants.items() if wanted), None)
