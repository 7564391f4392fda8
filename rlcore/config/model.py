"""The section `model`: what is trained, and how much of it."""

# pydantic copies defaults, which ruff does not know of a section's base in another file.
# ruff: noqa: RUF012

from typing import Annotated

from pydantic import Field, model_validator

from rlcore.config.section import FilePath, FunctionPath, PositiveInt, Section
from rlcore.models.presets import read_preset


class ModelConfig(Section):
    """The model that is trained."""

    OPERATIONAL = frozenset({"preset"})

    path: FilePath = ""
    """Hugging Face folder with weights, config.json and tokenizer."""
    build: FunctionPath = ""
    """Instead of `path`: a function `(folder: Path, seed: int) -> None` that writes it."""
    preset: str = ""
    """Name of the architecture that the model must have, such as `qwen3-4B`."""
    tokenizer: FilePath = ""
    """Folder of the tokenizer, where it is not the model's."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model folder to run."""
    lora_rank: PositiveInt | None = None
    """Train updates of this rank to linear layers (LoRA), not the model's weights themselves."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is multiplied by lora_alpha / lora_rank."""
    lora_target_modules: list[str] = []
    """Names of the linear layers, such as q_proj; none: all of the decoder."""

    @model_validator(mode="after")
    def _lora_is_asked_for(self) -> "ModelConfig":
        for key in ("lora_alpha", "lora_target_modules"):
            value = getattr(self, key)
            if self.lora_rank is None and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"model.{key} = {value} is about LoRA; set model.lora_rank, or remove it"
                )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if bool(self.path) == bool(self.build):
            raise ValueError("give exactly one of model.path and model.build")
        if self.preset:
            read_preset(self.preset)
        return self
