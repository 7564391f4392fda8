"""Names of megatron-core's that the table `megatron` does not take: what decides each, or why it
has no meaning here.

They are fields of its `TransformerConfig`, `DistributedDataParallelConfig` and `OptimizerConfig`.
"""

from __future__ import annotations

NO_DROPOUT = "the policy that is trained is the one that sampled"
NORM = "train.* checks the norm of each step's gradient over all ranks"
EIGHT_BITS = "weights that compute are of train.precision"
SHARDED = "weights are whole within a layout; train.backend = 'fsdp' divides them"
ACTIVATIONS = "train.gradient_checkpointing saves the memory of activations"
GENERATION = "engines generate"
GRAPHS = "micro-batches are of any length"
LAYERS = "layers are megatron-core's own"
LOGITS = "logits of attention are never held"
SAME_EXPERTS = "tokens must go through the experts that the policy chose"
ADAM = "the optimizer is AdamW with float32 masters and moments"

INSTEAD = {
    "params_dtype": "train.precision",
    "pipeline_dtype": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "calculate_per_token_loss": "algorithm.loss_aggregation",
    "average_in_collective": "algorithm.loss_aggregation",
    "bucket_size": "megatron.ddp_bucket_size",
    "num_buckets": "megatron.ddp_bucket_size",
    "lr": "train.lr",
    "min_lr": "train.min_lr",
    "weight_decay": "train.weight_decay",
    "adam_beta1": "train.adam_beta1",
    "adam_beta2": "train.adam_beta2",
    "adam_eps": "train.adam_eps",
    "clip_grad": "train.clip_grad",
    "optimizer_cpu_offload": "train.optimizer_cpu_offload",
    "param_name_patterns_for_fp32_local_accumulation": "megatron.grad_reduce_in_fp32",
}
"""The setting that decides it."""

NO_MEANING = {
    "hidden_dropout": NO_DROPOUT,
    "attention_dropout": NO_DROPOUT,
    "variable_seq_lengths": "it follows from the packing",
    "check_for_nan_in_grad": NORM,
    "check_for_large_grads": NORM,
    "grad_norm_skip_threshold": NORM,
    "align_param_gather": "each stage gathers weights as its forward pass comes to them",
    "num_distributed_optimizer_instances": "all ranks that have copies of a weight share its "
    "optimizer",
    "nccl_ub": "cluster.offload_train empties the buffers, which NCCL must not know then",
    "disable_symmetric_registration": "buffers are not registered with NCCL",
    "delay_wgrad_compute": "it needs layers of Transformer Engine that are called by hand",
    "fp8_param_gather": EIGHT_BITS,
    "fp4_param_gather": EIGHT_BITS,
    "reuse_grad_buf_for_mxfp8_param_ag": EIGHT_BITS,
    "keep_fp8_transpose_cache": EIGHT_BITS,
    "optimizer_offload_fraction": "train.optimizer_cpu_offload is for all of it",
    "use_torch_optimizer_for_cpu_offload": "it always is torch's",
    "overlap_cpu_optimizer_d2h_h2d": "copies always go beside the steps",
    "pin_cpu_grads": "what is copied always goes through pinned memory",
    "pin_cpu_params": "what is copied always goes through pinned memory",
    "overlap_param_gather_with_optimizer_step": "megatron.overlap_param_gather begins with the "
    "forward pass",
    "apply_wd_to_qk_layernorm": "no weight decay is for vectors",
    "log_num_zeros_in_grad": "it is no metric",
    "log_max_attention_logit": LOGITS,
    "moe_expert_capacity_factor": SAME_EXPERTS,
    "moe_pad_expert_input_to_capacity": SAME_EXPERTS,
    "moe_token_dropping": SAME_EXPERTS,
    "moe_token_drop_policy": SAME_EXPERTS,
    "moe_input_jitter_eps": SAME_EXPERTS,
    "moe_router_force_load_balancing": SAME_EXPERTS,
    "moe_router_force_biased": SAME_EXPERTS,
    "moe_enable_routing_replay": "train.use_routing_replay and rollout.use_rollout_routing_replay "
    "say it",
    "moe_router_padding_for_fp8": EIGHT_BITS,
    "moe_router_padding_for_quantization": EIGHT_BITS,
    "moe_per_layer_logging": "metrics are train/moe/*",
    "enable_cuda_graph": GRAPHS,
    "external_cuda_graph": GRAPHS,
    "fine_grained_activation_offloading": ACTIVATIONS,
    "min_offloaded_tensor_size": ACTIVATIONS,
    "flash_decode": GENERATION,
    "mlp_chunks_for_prefill": GENERATION,
    "cache_mla_latents": GENERATION,
    "init_method_std": "weights are those of the model's folder",
    "embedding_init_method_std": "weights are those of the model's folder",
    "perform_initialization": "weights are those of the model's folder",
    "transformer_impl": "Transformer Engine is used where it is installed",
    "deterministic_mode": "train.deterministic says it",
    "enable_autocast": "train.precision says it",
}
"""Why it has none."""
OF_SHARDED = (
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "gradient_reduce_div_fusion",
    "suggested_communication_unit_size",
    "preserve_fp32_weights",
)
"""Fields of megatron-core's own FSDP, besides those with `fsdp_` in their names."""

FROM_THE_MODEL = frozenset(
    {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "layernorm_epsilon",
        "normalization",
        "qk_layernorm",
        "add_qkv_bias",
        "add_bias_linear",
        "rotary_interleaved",
        "gated_linear_unit",
        "activation_func",
        "num_moe_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_layer_freq",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_enable_expert_bias",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rotary_base",
        "rope_type",
        "rotary_scaling_factor",
        "rotary_percent",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "mrope_section",
        "no_rope_freq",
        "softmax_scale",
        "softmax_type",
        "window_size",
        "window_attn_skip_freq",
        "activation_func_clamp_value",
        "glu_linear_offset",
        "layernorm_zero_centered_gamma",
        "apply_residual_connection_post_layernorm",
        "fp32_residual_connection",
        "attention_output_gate",
        "qk_l2_norm",
        "moe_shared_expert_gate",
        "moe_latent_size",
        "moe_router_dtype",
        "moe_router_topk_limited_devices",
        "moe_apply_probs_on_input",
        "experimental_attention_variant",
        "heterogeneous_block_specs",
        "is_hybrid_model",
    }
)
"""Fields that the model's architecture decides."""


OF_OTHER_MODELS = ("dsa_", "linear_", "mamba_", "mtp_")
"""What names of layers begin with that no model here has."""
BEGINNINGS = {
    "fp8": EIGHT_BITS,
    "fp4": EIGHT_BITS,
    "cuda_graph_": GRAPHS,
    "cpu_offloading": ACTIVATIONS,
    "offload_": ACTIVATIONS,
    "inference_": GENERATION,
    "use_inference": GENERATION,
    "qk_clip": LOGITS,
    "use_kitchen": LAYERS,
    "kitchen_": LAYERS,
}
"""Why names that begin like this have no meaning."""


def reason(name: str, taken: frozenset[str]) -> str | None:
    """Why a setting is not taken, as the end of a sentence that begins with its name; None: it is.

    Args:
        name: of the setting.
        taken: names that the table has.
    """
    if name in FROM_THE_MODEL:
        return "follows from the model; leave it out"
    if name in INSTEAD:
        return f"follows from {INSTEAD[name]}; set that"
    if name.startswith(OF_OTHER_MODELS):
        return "is of layers that no model here has; leave it out"
    for beginning, why in BEGINNINGS.items():
        if name.startswith(beginning):
            return f"has no meaning here: {why}; leave it out"
    if name in NO_MEANING:
        return f"has no meaning here: {NO_MEANING[name]}; leave it out"
    if name in taken:
        return None
    if name in OF_SHARDED or "fsdp_" in name:
        return f"has no meaning here: {SHARDED}"
    return None
