"""The sections of the configuration that say how responses are scored."""

import re
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from rlcore.config.secrets import check_no_login
from rlcore.config.section import FunctionPath, PositiveInt, Section, Url
from rlcore.errors import PluginError
from rlcore.rollout.rewards.builtin import BOXED, BUILTINS, split_name

NO_REWARD = "none"
"""The rm_type of a run whose samples are not scored."""


class JudgeConfig(Section):
    """The language model that scores, where reward.rm_type is `judge`."""

    model_config = ConfigDict(title="judge")

    url: Annotated[Url, Field(pattern=r"^https?://")]
    """Address of its chat API without `/chat/completions`, such as `http://127.0.0.1:8000/v1`."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model, as the server knows it."""
    prompt: str = ""
    """What it is asked, with `{prompt}`, `{response}`, `{label}` put in; empty: for 0 to 1."""
    system: str = ""
    """Its system message; none if empty."""
    score_pattern: str = r"(?i)score\s*[:=]?\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose group 1 is the score; the last match in its answer counts."""
    min_score: float = 0.0
    """Smallest score; one below it makes the sample failed."""
    max_score: float = 1.0
    """Largest score; one above it makes the sample failed."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Its sampling temperature."""
    max_tokens: PositiveInt = 1024
    """Most tokens of its answer."""
    key_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = "SLUICE_JUDGE_KEY"
    """Environment variable of the scoring processes that holds the server's key; none is needed."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> "JudgeConfig":
        check_no_login("reward.judge.url", self.url)
        if self.prompt and "{response}" not in self.prompt:
            raise ValueError("reward.judge.prompt has no {response}: the judge would not see it")
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(
                f"reward.judge.score_pattern = {self.score_pattern!r} is no regular expression: "
                f"{error}"
            ) from None
        if not groups:
            raise ValueError("reward.judge.score_pattern has no group (...) around the score")
        if self.min_score >= self.max_score:
            raise ValueError(
                f"reward.judge.min_score = {self.min_score} is not below max_score = "
                f"{self.max_score}"
            )
        return self


class RewardConfig(Section):
    """How responses are scored."""

    OPERATIONAL = frozenset({"workers", "concurrency", "retries", "request_timeout_s"})

    rm_type: str = ""
    """A built-in type, such as `math` or `boxed_f1` (docs/rewards.md); rows may name their own."""
    custom_rm_path: FunctionPath = ""
    """Instead: `reward(args, sample, **kwargs) -> float | dict`; a list of them if batched."""
    batched: bool = False
    """The function takes a list of samples and returns a list of rewards."""
    reward_key: str | None = None
    """Key of the reward to train on, where the function returns a dict; built-in types know it."""
    rm_url: Annotated[Url, Field(pattern=r"^(https?://.+)?$")] = ""
    """Address that `remote_rm` sends prompt, response and label to."""
    judge: JudgeConfig | None = None
    """The language model that scores, where rm_type is `judge`."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds the function may take for one call; a sample over it is marked failed."""
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds for one request to rm_url or the judge; default: timeout_s, so none is sent again."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How often a request to rm_url or the judge that failed is sent again, within timeout_s."""
    concurrency: PositiveInt = 64
    """Async calls that one process has open at once."""
    workers: PositiveInt = 1
    """Processes that score."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of an iteration's samples that may fail to be scored before the run stops."""

    @model_validator(mode="before")
    @classmethod
    def _type_knows_its_key(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("reward_key") is not None:
            return values
        name = values.get("rm_type")
        known = BUILTINS.get(name.strip().removeprefix(BOXED)) if isinstance(name, str) else None
        return values | {"reward_key": known.key} if known is not None and known.key else values

    @model_validator(mode="after")
    def _one_function(self) -> "RewardConfig":
        if bool(self.rm_type) == bool(self.custom_rm_path):
            raise ValueError(
                "give exactly one of reward.rm_type and reward.custom_rm_path"
                + ('; set the other to ""' if self.rm_type else "")
            )
        if self.rm_type in ("", NO_REWARD):
            return self
        self.check_type(self.rm_type, "reward.rm_type")
        if self.batched:
            raise ValueError(
                "reward.batched = true needs reward.custom_rm_path: built-in types score one "
                "sample at a time"
            )
        return self

    @model_validator(mode="after")
    def _requests_end_before_their_call(self) -> "RewardConfig":
        if self.request_timeout_s is not None and self.request_timeout_s > self.timeout_s:
            raise ValueError(
                f"reward.request_timeout_s = {self.request_timeout_s} is above reward.timeout_s = "
                f"{self.timeout_s}, which ends the call before; lower it, or raise that"
            )
        return self

    def check_type(self, rm_type: str, setting: str) -> None:
        """There is such a built-in type, with what it needs.

        Args:
            rm_type: its name.
            setting: that names it, for errors.

        Raises:
            ValueError: naming the setting.
        """
        try:
            name, _ = split_name(rm_type)
        except PluginError as error:
            raise ValueError(f"{setting} = {rm_type!r}: {error}") from None
        if name == "remote_rm" and not self.rm_url:
            raise ValueError(f"{setting} = 'remote_rm' needs reward.rm_url")
        if name == "judge" and self.judge is None:
            raise ValueError(
                f"{setting} = 'judge' needs the table [reward.judge] with url and model"
            )

    @model_validator(mode="after")
    def _addresses_hold_no_secret(self) -> "RewardConfig":
        check_no_login("reward.rm_url", self.rm_url)
        return self
