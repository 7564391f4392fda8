"""Models of published shapes with random weights, and what is counted of them."""

from pathlib import Path

import torch
from torch import nn

from rlcore.models.architecture import Architecture
from rlcore.models.presets import read_preset

PEAK_TFLOPS = 788.0
"""What an H200 reaches in large bfloat16 products: the 100 % of MFU."""
TINY = Architecture(
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    use_qk_norm=True,
)


def shape(name: str) -> Architecture:
    """A preset, or `tiny`, which a CPU trains in moments."""
    return TINY if name == "tiny" else read_preset(name).architecture


def make_model(name: str, folder: Path, device: str, seed: int = 0) -> Path:
    """A Hugging Face folder of a shape with random weights in bfloat16; without a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = shape(name)
    given = arch.model_dump(exclude_defaults=True, exclude={"model_type", "use_qk_norm"})
    rotary = {"rope_type": "default", "rope_theta": given.pop("rope_theta")}
    config = AutoConfig.for_model(arch.model_type, rope_parameters=rotary, **given)
    torch.manual_seed(seed)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def training_flops(arch: Architecture, parameters: int, lengths: list[int]) -> float:
    """Operations of forward and backward: 6 a parameter and token, and causal attention."""
    width = arch.num_attention_heads * arch.head_dim
    attention = 2 * arch.num_hidden_layers * width * sum(s * s for s in lengths)
    return 6.0 * parameters * sum(lengths) + 3.0 * attention
