"""The model folder's tokenizer, and which tokens end an answer."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from rlcore.errors import EngineError


class Tokenizer:
    """Text to ids and back, as `AutoTokenizer` of the model folder does it."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"{path} holds no tokenizer that transformers can load: {error}"
            ) from error

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence token."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, with the special tokens that the tokenizer adds."""
        ids: list[list[int]] = self._tokenizer(texts)["input_ids"]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def end_tokens(path: Path, config: PretrainedConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """The union of what config.json, generation_config.json and the tokenizer call end-of-sequence,
    which is what SGLang stops at."""
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if (path / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(str(path)).eos_token_id)
    ends: set[int] = set()
    for source in sources:
        ends.update(source if isinstance(source, list) else [] if source is None else [source])
    return frozenset(ends)
