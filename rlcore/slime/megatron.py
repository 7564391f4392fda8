"""Megatron's own options, as far as launch lines of slime give them."""

from rlcore.slime.rules import Argument, Held, Joined, Setting, Takes

RUN_LENGTH = "num-layers-per-virtual-pipeline-stage"
RUNS = Joined(
    "megatron.virtual_pipeline_model_parallel_size",
    "with `--train-backend megatron`, by `--num-layers` and the stages",
)
MASTERS = Held("AdamW's masters and moments are float32")
BESIDE = Held("gradients and weights are always copied beside the steps")
CONTEXT = "context-parallel-size"
FIRST, LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
UNDER_OTHER_NAMES = {
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    FIRST: "num_layers_in_first_pipeline_stage",
    LAST: "num_layers_in_last_pipeline_stage",
    "accumulate-allreduce-grads-in-fp32": "grad_reduce_in_fp32",
    "ddp-pad-buckets-for-high-nccl-busbw": "pad_buckets_for_high_nccl_busbw",
}
"""What megatron-core's settings are called where they are not called like the options."""
LAID_OUT: dict[str, Takes] = {
    "tensor-model-parallel-size": "int",
    "pipeline-model-parallel-size": "int",
    "context-parallel-size": "int",
    "expert-model-parallel-size": "int",
    "expert-tensor-parallel-size": "int",
    "sequence-parallel": "flag",
    "num-virtual-stages-per-pipeline-rank": "int",
    FIRST: "int",
    LAST: "int",
    "use-distributed-optimizer": "flag",
    "overlap-grad-reduce": "flag",
    "overlap-param-gather": "flag",
    "accumulate-allreduce-grads-in-fp32": "flag",
    "ddp-bucket-size": "int",
    "ddp-pad-buckets-for-high-nccl-busbw": "flag",
    "recompute-granularity": "str",
    "recompute-method": "str",
    "recompute-num-layers": "int",
    "recompute-modules": "strs",
    "moe-grouped-gemm": "flag",
}
"""Settings of `megatron`, where that backend is asked for."""
BALANCING = ("moe-aux-loss-coeff", "moe-z-loss-coeff", "moe-router-bias-update-rate")
"""Settings of `megatron` likewise; with FSDP2 they must be 0."""
BALANCING_TYPE = "moe-router-load-balancing-type"
SEQUENCE = "sequence-parallel"
SHAPE = Held("read from the model's config.json, or of model.preset; what is said must agree")
KERNEL = Held("kernels and precision of sums are the trainer's choice")
WITH_MEGATRON = "with `--train-backend megatron`"


def setting(name: str) -> str:
    """Of `megatron`, for an option of `LAID_OUT`."""
    return f"megatron.{UNDER_OTHER_NAMES.get(name, name.replace('-', '_'))}"


def _all(rule: Held, takes: Takes, names: str) -> list[Argument]:
    return [Argument(name, takes, rule) for name in names.split()]


OPTIONS = {
    argument.name: argument
    for argument in (
        *(
            Argument(
                name,
                takes,
                Joined(
                    setting(name),
                    WITH_MEGATRON
                    + (", else `train.context_parallel_size`" if name == CONTEXT else ""),
                ),
            )
            for name, takes in LAID_OUT.items()
        ),
        Argument(RUN_LENGTH, "int", RUNS),
        *_all(MASTERS, "flag", "use-precision-aware-optimizer"),
        *_all(BESIDE, "flag", "overlap-cpu-optimizer-d2h-h2d"),
        Argument("optimizer-cpu-offload", "flag", Setting("train.optimizer_cpu_offload")),
        *_all(
            SHAPE,
            "int",
            "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups "
            "kv-channels vocab-size max-position-embeddings seq-length num-experts "
            "moe-ffn-hidden-size moe-router-topk moe-shared-expert-intermediate-size "
            "make-vocab-size-divisible-by q-lora-rank kv-lora-rank qk-head-dim v-head-dim "
            "qk-pos-emb-head-dim moe-router-group-topk moe-router-num-groups rotary-base",
        ),
        *_all(
            SHAPE,
            "float",
            "norm-epsilon rotary-percent rotary-scaling-factor mscale mscale-all-dim "
            "moe-router-topk-scaling-factor",
        ),
        *_all(
            SHAPE,
            "flag",
            "swiglu group-query-attention disable-bias-linear add-qkv-bias qk-layernorm "
            "untie-embeddings-and-output-weights use-rotary-position-embeddings use-rope-scaling "
            "no-position-embedding multi-latent-attention moe-router-pre-softmax "
            "moe-router-enable-expert-bias post-self-attn-layernorm post-mlp-layernorm "
            "rotary-interleaved apply-layernorm-1p attention-output-gate moe-shared-expert-gate",
        ),
        *_all(
            SHAPE,
            "str",
            "normalization position-embedding-type moe-layer-freq moe-router-score-function",
        ),
        *_all(SHAPE, "strs", "spec"),
        *_all(
            KERNEL,
            "flag",
            "attention-softmax-in-fp32 no-rope-fusion no-masked-softmax-fusion "
            "moe-permute-fusion no-gradient-accumulation-fusion enable-experimental",
        ),
        *_all(
            KERNEL,
            "str",
            "attention-backend transformer-impl moe-token-dispatcher-type moe-router-dtype "
            "moe-token-drop-policy",
        ),
        *(
            Argument(name, "float", Joined(setting(name), f"{WITH_MEGATRON}; else it must be 0"))
            for name in BALANCING
        ),
        Argument(
            BALANCING_TYPE,
            "str",
            Joined(setting(BALANCING_TYPE), "with --moe-aux-loss-coeff above 0"),
        ),
        *_all(Held("nothing is dropped out", (0.0,)), "float", "attention-dropout hidden-dropout"),
    )
}
