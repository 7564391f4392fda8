"""A small Qwen3 with random weights and a character tokenizer, in a folder: what the engine tests
serve.

The vocabulary is large enough that a random model hardly ever samples its end token by chance.
"""

from pathlib import Path

VOCABULARY = 2000
CHARACTERS = "0123456789+=>:;.,! abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def build(
    folder: Path,
    seed: int = 0,
    context_length: int = 8192,
    tie: bool = True,
    head_dim: int = 16,
) -> Path:
    """Write config, weights (float32) and tokenizer to `folder`, and return it."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokens = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    tokens += [f"<{i}>" for i in range(len(tokens), VOCABULARY)]
    characters = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>")
    )
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context_length,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        # Random weights this small give logits so flat that mistakes would hide in them.
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data *= 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
