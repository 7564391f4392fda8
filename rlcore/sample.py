"""One sample of a rollout: a prompt, what the model answered, and what is known of it.

Invariants, checked by `validate` and after each `append_response_tokens`:
- `tokens` holds the prompt's ids followed by the response's; `response_length` counts the latter.
- `loss_mask` and `rollout_log_probs`, where present, have `response_length` entries. Tokens the
  model did not generate (tool output) have mask 0 and log-prob 0.0.
- Token ids come from the engine and are never made again from text.

The field names are those of slime's `Sample`, so that plugins written for it keep working.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from rlcore.errors import DataError


class Status(StrEnum):
    """How a sample ended."""

    PENDING = "pending"
    """Not generated yet."""
    COMPLETED = "completed"
    """The model stopped by itself: end-of-sequence or a stop rule."""
    TRUNCATED = "truncated"
    """The token budget ran out."""
    ABORTED = "aborted"
    """Generation was cut off from outside; it may be continued."""
    FAILED = "failed"
    """Generation or scoring failed: the sample has no reward and is not trained on."""


FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Finish reason of an engine -> status of the sample."""


@dataclass
class Sample:
    """One prompt with one response. A group is the list of samples of one prompt."""

    group_index: int | None = None
    """Position of the prompt in the rollout batch."""
    index: int | None = None
    """Position of the sample in the rollout batch."""
    rollout_id: int | None = None
    """Samples cut from one execution (sub-agents, compacted context) share it."""
    prompt_id: str = ""
    """Digest of the data file's name, the row and its content."""
    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    """None means that every response token is trained on."""
    rollout_log_probs: list[float] | None = None
    """The engine's log-probs of the response tokens, at the rollout temperature."""
    weight_versions: list[str] = field(default_factory=list)
    """The policy version of each engine call that contributed tokens."""
    status: Status = Status.PENDING
    reward: float | dict[str, Any] | None = None
    remove_sample: bool = False
    """Counts in its group's statistics but is not trained on."""
    seed: int | None = None
    """Sampling seed sent to the engine."""
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: Any = None
    rollout_routed_experts: Any = None
    """int32 array [len(tokens) - 1, layers, top_k] or None."""
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    teacher_log_probs: list[float] | None = None
    spec_info: dict[str, Any] = field(default_factory=dict)
    prefix_cache_info: dict[str, Any] = field(default_factory=dict)
    non_generation_time: float = 0.0
    """Seconds the sample spent outside the engine (tools, waiting)."""

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens in `tokens`."""
        return len(self.tokens) - self.response_length

    @property
    def response_tokens(self) -> list[int]:
        """Token ids of the response."""
        return self.tokens[self.prompt_length :]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, reward_key: str | None = None) -> float | None:
        """The reward as a number: itself, or `reward[reward_key]` where the reward is a dict."""
        if not isinstance(self.reward, dict):
            return self.reward
        if reward_key is None or reward_key not in self.reward:
            raise DataError(
                f"the reward of sample {self.index} is a dict with the keys {sorted(self.reward)}; "
                f"set reward.reward_key to one of them (it is {reward_key!r})"
            )
        return float(self.reward[reward_key])

    def append_response_tokens(
        self,
        tokens: list[int],
        log_probs: list[float] | None = None,
        *,
        trainable: bool = True,
        text: str | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Grow the response. The one sanctioned way to do so.

        Args:
            tokens: ids to append.
            log_probs: one a token; required for trainable tokens, refused for others.
            trainable: False for tool output: mask 0, log-prob 0.0.
            text: decoded text to append to `response`.
            meta_info: of the engine's answer: says the policy version and how it ended.

        Raises:
            DataError: lengths differ, or log-probs are given for tokens that are not trained on.
        """
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            got = "none" if log_probs is None else str(len(log_probs))
            raise DataError(
                f"sample {self.index}: {len(tokens)} trainable tokens need as many log-probs, "
                f"got {got}"
            )
        if not trainable and log_probs is not None:
            raise DataError(
                f"sample {self.index}: tokens that are not trained on take no log-probs"
            )
        if self.rollout_log_probs is None:
            if self.response_length and trainable:
                raise DataError(
                    f"sample {self.index}: its first {self.response_length} response tokens "
                    "have no log-probs"
                )
            self.rollout_log_probs = [0.0] * self.response_length
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        self.tokens = self.tokens + list(tokens)
        self.response_length += len(tokens)
        self.rollout_log_probs = self.rollout_log_probs + (
            list(log_probs) if log_probs is not None else [0.0] * len(tokens)
        )
        self.loss_mask = self.loss_mask + [int(trainable)] * len(tokens)
        if text is not None:
            self.response += text
        if meta_info is not None:
            if "weight_version" in meta_info:
                self.weight_versions = [*self.weight_versions, str(meta_info["weight_version"])]
            ended = (meta_info.get("finish_reason") or {}).get("type")
            self.status = FINISHED.get(str(ended), self.status)
        self.validate()

    def validate(self) -> None:
        """Check the lengths that must agree.

        Raises:
            DataError: naming the field and both lengths.
        """
        if self.response_length > len(self.tokens):
            raise DataError(
                f"sample {self.index}: response_length {self.response_length} exceeds its "
                f"{len(self.tokens)} tokens"
            )
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise DataError(
                    f"sample {self.index}: {name} has {len(value)} entries for "
                    f"{self.response_length} response tokens"
                )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; the status as its text."""
        return asdict(self) | {"status": self.status.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Sample":
        """The inverse of `to_dict`.

        Raises:
            DataError: naming keys that are no field.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise DataError(
                f"a sample has no field {', '.join(unknown)}; known are {sorted(known)}"
            )
        return cls(**data | {"status": Status(data.get("status", Status.PENDING))})
