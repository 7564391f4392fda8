"""Tokenizers of local Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError


def load_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    """A Hugging Face tokenizer of a local folder.

    Raises:
        ConfigError: the folder holds none.
    """
    try:
        if _is_plain_tokenizer(Path(folder)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {folder} holds no tokenizer that loads: {error}") from None


def _is_plain_tokenizer(folder: Path) -> bool:
    """Whether tokenizer.json alone says all: no class of its own, which AutoTokenizer would look
    up.

    AutoTokenizer imports torch, which takes this process seconds and 190 MB that it has no other
    use for.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    plain = config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return plain and "auto_map" not in config and (folder / "tokenizer.json").exists()
