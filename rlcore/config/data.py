"""The sections `data` and `eval`: which prompts, how rows are read, what is asked of held-out ones.

Invariant: what an evaluation's data set does not say is as the run's own settings have it.
"""

# pydantic copies defaults, which ruff does not know of a section's base in another file.
# ruff: noqa: RUF012

import difflib
from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from rlcore.config.section import FilePath, FunctionPath, PositiveInt, Scalar, Section, StopText

KINDS = ("image", "video", "audio")
"""Kinds of media that a prompt may have a place for."""


def check_kinds(setting: str, keys: dict[str, str] | None) -> None:
    """Media are of kinds that prompts have places for, and in columns that have a name.

    Raises:
        ValueError: naming the setting, and the nearest kind.
    """
    for kind, column in (keys or {}).items():
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{setting}.{kind} = {column!r}: kinds of media are {', '.join(KINDS)}{hint}"
            )
        if not column:
            raise ValueError(f"{setting}.{kind} is empty; it names the column, or remove it")


class MixedSet(Section):
    """One more file of prompts."""

    model_config = ConfigDict(title="mixed file")

    path: Annotated[FilePath, Field(min_length=1)]
    """As data.path."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, relative to the other files; at least a thousandth of all."""
    input_key: str | None = None
    """Default: data.input_key."""
    label_key: str | None = None
    """Default: data.label_key."""
    metadata_key: str | None = None
    """Default: data.metadata_key."""
    tool_key: str | None = None
    """Default: data.tool_key."""
    max_prompt_len: PositiveInt | None = None
    """Default: data.max_prompt_len."""


class DataConfig(Section):
    """The prompts to train on."""

    path: Annotated[FilePath, Field(min_length=1)]
    """JSONL or Parquet file, or a folder of Hugging Face datasets; rows as `f.jsonl@[0:100]`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, relative to those of data.mix."""
    mix: list[MixedSet] = []
    """More files, mixed with data.path by weight."""
    input_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    label_key: str | None = None
    """Column of the right answer, handed to the reward function."""
    response_key: str | None = None
    """Column of the response to learn, for `run.mode = "sft"`; without it, of the conversation."""
    metadata_key: str = "metadata"
    """Column with a JSON object handed to the reward function; rows may lack it."""
    tool_key: str | None = None
    """Column with a list of tool descriptions for the chat template."""
    apply_chat_template: bool = False
    """Turn the prompt into text by the tokenizer's chat template, generation prompt added."""
    apply_chat_template_kwargs: dict[str, Scalar] = {}
    """More arguments of the chat template."""
    shuffle: bool = True
    """Visit the rows of each epoch in an order drawn from run.seed and the epoch."""
    skip_bad_rows: bool = False
    """Skip and count rows that cannot be read, instead of stopping with an error."""
    max_prompt_len: PositiveInt | None = None
    """Leave out prompts of more tokens than this; the count is reported."""
    multimodal_keys: dict[str, str] = {}
    """Kinds of media (`image`, `video`, `audio`) and the columns that hold them."""
    sampling_params_key: str | None = None
    """Column with a row's own stop rules: an object of SGLang's parameters; rows may lack it."""
    generate_function_key: str | None = None
    """Column with a row's own generate function, by name; rows may lack it."""
    custom_rm_key: str | None = None
    """Column with a row's own reward function, by name; rows may lack it."""

    @model_validator(mode="after")
    def _media_are_known(self) -> "DataConfig":
        check_kinds("data.multimodal_keys", self.multimodal_keys)
        return self

    @model_validator(mode="after")
    def _weights_are_of_several(self) -> "DataConfig":
        if self.weight != 1.0 and not self.mix:
            raise ValueError(
                f"data.weight = {self.weight} is a share beside the files of data.mix, and there "
                "are none; add them, or remove it"
            )
        return self

    def files(self) -> list["DataConfig"]:
        """A section for each file, how it is read included."""
        alone = self.model_copy(update={"mix": []})
        out = [alone]
        for one in self.mix:
            own = {k: v for k, v in one.model_dump().items() if v is not None}
            out.append(alone.model_copy(update=own))
        return out


class EvalDataset(Section):
    """One held-out data set."""

    model_config = ConfigDict(title="data set")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Name in the metrics."""
    path: Annotated[FilePath, Field(min_length=1)]
    """As data.path."""
    n_samples_per_eval_prompt: PositiveInt = 1
    """Responses a prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Default: rollout.top_k."""
    max_response_len: PositiveInt | None = None
    """Default: rollout.max_response_len."""
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    """Fewest tokens of a response."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Punish tokens that have come before; 1 is off."""
    stop: list[StopText] | None = None
    """Strings that end a response. Default: rollout.stop."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a response. Default: rollout.stop_token_ids."""
    skip_special_tokens: bool | None = None
    """Default: rollout.skip_special_tokens."""
    no_stop_trim: bool | None = None
    """Leave the stop string in the response. Default: true."""
    custom_generate_function_path: FunctionPath | None = None
    """Default: rollout.custom_generate_function_path."""
    custom_rm_path: FunctionPath | None = None
    """A reward function for this data set, in place of the run's."""
    rm_type: str | None = None
    """Put into the metadata of its samples as `rm_type`."""
    metadata_overrides: dict[str, Scalar] = {}
    """Laid over the metadata of its samples."""
    input_key: str | None = None
    """Default: data.input_key."""
    label_key: str | None = None
    """Default: data.label_key."""
    metadata_key: str | None = None
    """Default: data.metadata_key."""
    tool_key: str | None = None
    """Default: data.tool_key."""
    multimodal_keys: dict[str, str] | None = None
    """Default: data.multimodal_keys."""
    apply_chat_template: bool | None = None
    """Default: data.apply_chat_template."""
    apply_chat_template_kwargs: dict[str, Scalar] | None = None
    """Default: data.apply_chat_template_kwargs."""
    max_prompt_len: PositiveInt | None = None
    """Leave out prompts of more tokens than this. Default: none."""
    pass_threshold: float = 1.0
    """Smallest reward that counts as solved in pass@k."""

    @model_validator(mode="after")
    def _media_are_known(self) -> "EvalDataset":
        check_kinds(f"multimodal_keys of eval.datasets {self.name!r}", self.multimodal_keys)
        return self

    def data(self, train: DataConfig) -> DataConfig:
        """How to read it: as the training data, but for what it says itself."""
        names = (
            "input_key",
            "label_key",
            "metadata_key",
            "tool_key",
            "multimodal_keys",
            "apply_chat_template",
            "apply_chat_template_kwargs",
        )
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        own |= {"path": self.path, "max_prompt_len": self.max_prompt_len, "mix": []}
        own["response_key"] = None
        return train.model_copy(update=own)


class EvalConfig(Section):
    """Evaluation during training."""

    eval_interval: PositiveInt | None = None
    """Iterations between evaluations; none: never."""
    eval_config: FilePath = ""
    """Instead of `datasets`: a YAML file of them, as slime has it."""
    datasets: list[EvalDataset] = []
    """What to evaluate on."""
    reward_key: str | None = None
    """Which entry of a reward that is a dict counts in evaluations. Default: reward.reward_key."""

    eval_function_path: FunctionPath | None = None
    """A function `(args, rollout_id, data_source)` that evaluates: samples by data set."""

    @model_validator(mode="after")
    def _has_datasets(self) -> "EvalConfig":
        own = self.eval_function_path is not None
        if self.eval_interval is not None and not (self.datasets or own):
            raise ValueError("eval.eval_interval is set but eval.datasets is empty")
        names = [d.name for d in self.datasets]
        if len(set(names)) != len(names):
            raise ValueError(f"eval.datasets has two entries of one name: {names}")
        return self
