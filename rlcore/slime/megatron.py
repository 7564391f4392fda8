"""Megatron's own options, as far as launch lines of slime give them."""

from rlcore.slime.rules import Argument, Held, Joined, Setting, Takes

LAYOUT = Held("how Megatron lays the model out; FSDP2 shards it over all ranks")
OVERLAP = Held("gradients are reduced when a step's micro-batches are through")
CONTEXT = "context-parallel-size"
LAID_OUT: dict[str, Takes] = {
    "tensor-model-parallel-size": "int",
    "pipeline-model-parallel-size": "int",
    "context-parallel-size": "int",
    "expert-model-parallel-size": "int",
    "expert-tensor-parallel-size": "int",
    "sequence-parallel": "flag",
    "use-distributed-optimizer": "flag",
    "recompute-granularity": "str",
    "recompute-method": "str",
    "recompute-num-layers": "int",
    "moe-grouped-gemm": "flag",
}
"""Settings of `megatron`, under the same names, where that backend is asked for."""
BALANCING = ("moe-aux-loss-coeff", "moe-z-loss-coeff", "moe-router-bias-update-rate")
"""Settings of `megatron` likewise; with FSDP2 they must be 0."""
BALANCING_TYPE = "moe-router-load-balancing-type"
SHAPE = Held("read from the model's config.json, or of model.preset; what is said must agree")
KERNEL = Held("kernels and precision of sums are the trainer's choice")
MEMORY = Held("how Megatron saves memory; train.gradient_checkpointing recomputes activations")


WITH_MEGATRON = "with `--train-backend megatron`"


def _setting(name: str) -> str:
    return f"megatron.{name.replace('-', '_')}"


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
                    _setting(name),
                    WITH_MEGATRON
                    + (", else `train.context_parallel_size`" if name == CONTEXT else ""),
                ),
            )
            for name, takes in LAID_OUT.items()
        ),
        *_all(
            LAYOUT,
            "int",
            "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
            "num-layers-per-virtual-pipeline-stage",
        ),
        *_all(
            OVERLAP,
            "flag",
            "overlap-grad-reduce overlap-param-gather "
            "use-precision-aware-optimizer overlap-cpu-optimizer-d2h-h2d",
        ),
        Argument("optimizer-cpu-offload", "flag", Setting("train.optimizer_cpu_offload")),
        *_all(MEMORY, "strs", "recompute-modules"),
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
            "attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 no-rope-fusion "
            "no-masked-softmax-fusion moe-permute-fusion no-gradient-accumulation-fusion "
            "enable-experimental",
        ),
        *_all(
            KERNEL,
            "str",
            "attention-backend transformer-impl moe-token-dispatcher-type moe-router-dtype "
            "moe-token-drop-policy",
        ),
        *(
            Argument(name, "float", Joined(_setting(name), f"{WITH_MEGATRON}; else it must be 0"))
            for name in BALANCING
        ),
        Argument(
            BALANCING_TYPE,
            "str",
            Joined(_setting(BALANCING_TYPE), "with --moe-aux-loss-coeff above 0"),
        ),
        *_all(Held("nothing is dropped out", (0.0,)), "float", "attention-dropout hidden-dropout"),
    )
}
