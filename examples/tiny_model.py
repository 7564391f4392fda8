"""Models of the examples with tools and agents: a Qwen3 of 0.1M parameters with random weights.

Each example has a vocabulary of its own, of some twenty words: what a random model says by chance
is then right often enough to learn from. Nothing is downloaded.
"""

from collections.abc import Sequence
from pathlib import Path

SPECIAL = ["<pad>", "<eos>", "<unk>"]
DIGITS = [*"0123456789"]


def search_r1(folder: Path, seed: int) -> None:
    """One token a character."""
    write(folder, seed, [*"abcdef", *"012345", *"?>="])


def retool(folder: Path, seed: int) -> None:
    """Questions, names of functions and the argument are a token each."""
    words = ["largest", "smallest", "count", "max", "min", "len", "(x)"]
    write(folder, seed, [*words, *DIGITS, *":!"])


def multi_agent(folder: Path, seed: int) -> None:
    """One token a character."""
    write(folder, seed, [*"01234567", *"+!yn"])


def write(folder: Path, seed: int, words: Sequence[str]) -> None:
    """Write config, weights (float32, drawn from `seed`) and tokenizer to `folder`."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: k for k, token in enumerate([*SPECIAL, *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\(x\)|[a-z]{2,}|."), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
