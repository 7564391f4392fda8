"""Models of a published shape with random weights, and prompts for them; nothing is downloaded.

No token ends a response: the config names no end of sequence, so all responses have the length that
was asked for. A vocabulary's every id is a word of its own, so that decoding costs what it does for
a real model.

Run: python -m benchmarks._shapes SHAPE FOLDER SEED
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._common import REPO
from rlcore.models.architecture import Architecture
from rlcore.models.presets import read_preset

TINY = Architecture(
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    rope_theta=1e6,
    tie_word_embeddings=True,
    use_qk_norm=True,
)
SHAPES = ("tiny", "qwen3-0.6B", "qwen3-4B")
CONTEXT = 4096
BUILD_S = 300


def shape(name: str) -> Architecture:
    """An architecture by its name."""
    return TINY if name == "tiny" else read_preset(name).architecture


def build(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a model folder, in a process of its own that leaves no GPU memory behind; where
    SLUICE_BENCH_MODELS names a folder, into that, once for all benchmarks.
    """
    if kept := os.environ.get("SLUICE_BENCH_MODELS"):
        folder = Path(kept) / f"{name}-{seed}"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        argv = [sys.executable, "-m", "benchmarks._shapes", name, str(part), str(seed)]
        subprocess.run(argv, cwd=REPO, check=True, timeout=BUILD_S)
        part.rename(folder)
    return folder


def write(name: str, folder: Path, seed: int) -> None:
    """Write config, tokenizer and random weights: bfloat16, or float32 where there is no GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    wanted = shape(name)
    fields: dict[str, Any] = wanted.model_dump(
        include={
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rms_norm_eps",
            "tie_word_embeddings",
        }
    )
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    config = Qwen3Config(
        **fields,
        rope_parameters={"rope_type": "default", "rope_theta": wanted.rope_theta},
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=str(dtype).removeprefix("torch."),
    )
    torch.manual_seed(seed)
    with torch.device("cuda" if cuda else "cpu"):
        model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    _tokenizer(wanted.vocab_size).save_pretrained(folder)


def _tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1} | {f"w{k}": k for k in range(2, vocabulary)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def prompts(name: str, count: int, tokens: int) -> list[list[int]]:
    """Random prompts for a shape, of that many tokens each, as ids."""
    draw, vocabulary = random.Random(0), shape(name).vocab_size
    return [[draw.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(count)]


def text(ids: list[int]) -> str:
    """What the tokenizer reads as these ids."""
    return " ".join(f"w{k}" for k in ids)


def write_prompts(path: Path, made: list[list[int]], label: str = "") -> Path:
    """A data set of prompts, all with one label."""
    rows = [json.dumps({"prompt": text(ids), "label": label}) for ids in made]
    path.write_text("\n".join(rows) + "\n")
    return path


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
