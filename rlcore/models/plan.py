"""What a run's training needs, by arithmetic: a rank's memory, traffic between ranks, time.

Bytes of parameters, gradients and optimizer are exact; those of activations count the tensors that
backward needs; time divides by the speed that well-filled GPUs reach. Everything here is of the
trainer of FSDP2, which shards parameters, gradients and optimizer evenly over all ranks;
`rlcore.models.megatron_plan` has Megatron's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from rlcore.algorithms.logit_memory import CHUNK_ELEMENTS, KEPT_SHARE
from rlcore.models.architecture import Architecture
from rlcore.models.tensors import layer_tensors, size_of

MASTER = GRADIENT = 4
"""Bytes of a master weight and of its gradient: float32."""
MOMENTS = 8
"""Bytes of AdamW's two moments."""
UTILISATION = 0.4
"""Share of a GPU's peak that training reaches with full micro-batches."""
LINK_SHARE = 0.7
"""Share of a link's peak that collectives reach."""
CONTEXT = 2e9
"""Bytes that CUDA, NCCL and the allocator's gaps take."""
TRAINED, RECOMPUTED = 3, 4
"""Forward passes that forward and backward are worth, without and with recomputation. One of them
makes the gradients of the weights, which frozen ones do not need."""
ROUTERS = frozenset({"mlp.gate", "block_sparse_moe.gate"})
"""Matrices of a layer that are no linear layers."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of one GPU."""

    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 operations a second."""
    link: float
    """Bytes a second to others of its node, in one direction."""
    network: float
    """Bytes a second to other nodes."""


GPUS = {
    "a100": Gpu(80e9, 312e12, 300e9, 25e9),
    "h100": Gpu(80e9, 989e12, 450e9, 50e9),
    "h200": Gpu(141e9, 989e12, 450e9, 50e9),
    "b200": Gpu(180e9, 2250e12, 900e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What the trainer does."""

    ranks: int
    ranks_per_node: int
    tokens_per_micro_batch: int
    """Of one rank."""
    tokens_per_step: int
    """Of all ranks, in one optimizer step."""
    steps: int
    """Optimizer steps an iteration."""
    sequence: int
    """Tokens of a sequence, for the cost of attention."""
    bytes_of_numbers: int
    """Of forward and backward: 2 in bfloat16, 4 in float32."""
    recomputes: bool
    frozen: int = 0
    """Further models that are passed through without being trained: reference, teacher."""
    shared: int = 0
    """Of these, those that are the trained model without its adapters, and take no memory."""
    critic: bool = False
    lora_rank: int | None = None
    """Of the adapters that are trained in place of the weights; None: there are none."""
    lora_targets: tuple[str, ...] = ()
    """Names of the layers that have one; none: all."""
    offloads: bool = False
    """Whether the optimizer's moments lie in the CPU's memory."""
    engine_share: float = 0.0
    """Of a GPU's memory, that engines on the same GPU take."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What it comes to."""

    parameters: int
    active_parameters: int
    memory: dict[str, float]
    """Bytes of one rank, by kind."""
    available: float
    """Bytes that a rank may use."""
    traffic: Mapping[str, float]
    """Bytes that a rank sends in an iteration, by kind."""
    compute_s: float
    """Of training in an iteration; with the time that stages of a pipeline wait for each other."""
    traffic_s: float
    """Of traffic beside computing."""
    waiting_s: float = 0.0
    """Of traffic that computing waits for."""

    @property
    def needed(self) -> float:
        """Bytes of one rank."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a rank's memory suffices."""
        return self.needed <= self.available

    @property
    def seconds(self) -> float:
        """Training of an iteration."""
        return max(self.compute_s, self.traffic_s) + self.waiting_s


def plan(arch: Architecture, work: Work, gpu: Gpu) -> Plan:
    """Count what training a model in a layout needs."""
    size = size_of(arch)
    micro_batches = ceil(work.tokens_per_step / (work.ranks * work.tokens_per_micro_batch))
    whole = _traffic(size.parameters, size.parameters, work)
    policy = _traffic(size.parameters, trained(arch, work), work)
    sent = (policy + work.critic * whole) * micro_batches * work.steps
    full = RECOMPUTED if work.recomputes else TRAINED
    passes = full - (work.lora_rank is not None) + work.frozen + work.critic * full
    flops = passes * forward_flops(arch, work.sequence) * work.tokens_per_step * work.steps
    speed = work.ranks * gpu.flops * UTILISATION
    link = gpu.link if work.ranks <= work.ranks_per_node else gpu.network
    return Plan(
        size.parameters,
        size.active_parameters,
        memory(arch, work, gpu),
        gpu.memory * (1 - work.engine_share),
        {"gradients and weights": sent},
        flops / speed,
        sent / (link * LINK_SHARE),
    )


def memory(arch: Architecture, work: Work, gpu: Gpu) -> dict[str, float]:
    """Bytes of one rank, by kind."""
    own = size_of(arch).parameters / work.ranks
    learns = trained(arch, work) / work.ranks
    adapters = 0.0 if work.lora_rank is None else learns
    learns += own if work.critic else 0
    largest = max(
        sum(prod(spec.shape) for spec in layer_tensors(arch, layer, ""))
        for layer in (0, arch.num_hidden_layers - 1)
    )
    outer = arch.vocab_size * arch.hidden_size * (1 if arch.tie_word_embeddings else 2)
    gathered = 0.0
    if work.ranks == 1 and work.bytes_of_numbers < MASTER and work.lora_rank is None:
        # One rank keeps them from one micro-batch to the next.
        gathered = own * work.bytes_of_numbers
    elif work.ranks > 1 or work.bytes_of_numbers < MASTER:
        gathered = (outer + 2 * largest) * work.bytes_of_numbers + largest * GRADIENT
    return {
        "master weights": own * MASTER * (2 if work.critic else 1) + adapters * MASTER,
        "gradients": learns * GRADIENT,
        "optimizer": 0.0 if work.offloads else learns * MOMENTS,
        "frozen models": own * MASTER * (work.frozen - work.shared),
        "gathered layers": float(gathered),
        "activations": activations(arch, work),
        "logits": logits(arch, work, gpu),
        "CUDA and NCCL": CONTEXT,
    }


def trained(arch: Architecture, work: Work) -> int:
    """Parameters of the policy that are trained: all, or those of its adapters."""
    if work.lora_rank is None:
        return size_of(arch).parameters
    count = 0
    for layer in range(arch.num_hidden_layers):
        for spec in layer_tensors(arch, layer, ""):
            name = spec.name.removeprefix(".").removesuffix(".weight")
            chosen = not work.lora_targets or name.rpartition(".")[2] in work.lora_targets
            linear = len(spec.shape) == 2 and not spec.expert and name not in ROUTERS
            count += work.lora_rank * sum(spec.shape) if linear and chosen else 0
    return count


def logits(arch: Architecture, work: Work, gpu: Gpu, parts: int = 1) -> float:
    """Bytes of the logits that are there at once: those that wait for backward, a chunk of the
    others, and a chunk's gradient. Ranks that each have a part of the vocabulary keep none.
    """
    of_all = work.tokens_per_micro_batch * arch.vocab_size / parts * work.bytes_of_numbers
    chunk = min(of_all, CHUNK_ELEMENTS["cuda"] * work.bytes_of_numbers)
    kept = KEPT_SHARE * gpu.memory if parts == 1 else 0.0
    return min(of_all, kept + chunk) + chunk


def activations(arch: Architecture, work: Work) -> float:
    """Bytes that backward needs of one micro-batch.

    With recomputation: the input of every layer, and all of one layer.
    """
    tokens, layers = work.tokens_per_micro_batch, arch.num_hidden_layers
    whole = layer_numbers(arch) * work.bytes_of_numbers + layer_norm_bytes(arch)
    if not work.recomputes:
        return float(tokens * layers * whole)
    return float(tokens * (layers * arch.hidden_size * work.bytes_of_numbers + whole))


def layer_numbers(arch: Architecture) -> int:
    """Numbers a token that one layer keeps for backward: the inputs of its matrix products, of
    attention and of the gated product.
    """
    queries = arch.num_attention_heads * (arch.v_head_dim if arch.is_latent else arch.head_dim)
    keys = arch.num_key_value_heads * arch.head_dim
    sparse = arch.num_experts > 0
    width = arch.intermediate_size
    if sparse:
        width = arch.num_experts_per_tok * arch.moe_intermediate_size
        width += arch.shared_expert_intermediate_size
    # Normed inputs of both halves; queries and keys before and after their norm and rotation,
    # values, what attention gives; gate, its activation, up, their product.
    return 2 * arch.hidden_size + 4 * queries + 3 * keys + 4 * width


def layer_norm_bytes(arch: Architecture) -> int:
    """Bytes a token that the two norms of a layer keep: their input in float32, and its scaled."""
    return 2 * 2 * 4 * arch.hidden_size


def forward_flops(arch: Architecture, sequence: int) -> float:
    """Operations a token of one forward pass: two for each active parameter but the embedding's,
    and causal attention over half of the sequence on average.
    """
    outer = arch.vocab_size * arch.hidden_size
    products = size_of(arch).active_parameters - (0 if arch.tie_word_embeddings else outer)
    width = arch.qk_nope_head_dim + arch.qk_rope_head_dim if arch.is_latent else arch.head_dim
    attention = 2 * arch.num_hidden_layers * arch.num_attention_heads * width * sequence
    return 2.0 * products + attention / arch.full_attention_interval


def _traffic(parameters: int, trained: int, work: Work) -> float:
    """Bytes that a rank sends in one micro-batch: weights are gathered for forward and backward,
    gradients of those that are trained are summed and scattered.
    """
    others = (work.ranks - 1) / work.ranks
    return others * (parameters * 2 * work.bytes_of_numbers + trained * GRADIENT)
