"""Tiny random models of the families that Megatron computes, as Hugging Face folders."""

from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen2": {"head_dim": None, "tie_word_embeddings": False},
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "glm4": {
        "rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.5},
        "attention_bias": True,
    },
    "glm4_moe": {
        **ROUTED,
        "rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.5},
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        **ROUTED,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rope_parameters": YARN,
    },
}


def build(family: str, folder: Path, dtype: str = "float32", layers: int | None = None) -> Any:
    """Write a model with random weights, none of them at its usual 0 or 1; returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in {**BASE, **FAMILIES[family]}.items() if v is not None}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **fields, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * (0.2 if "bias" in name else 0.05))
    model = model.to(getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    return model
