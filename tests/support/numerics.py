"""Engine and trainer side by side: their log-probs of the same tokens, and what each of a model's
operations gave.

SGLang writes the latter with `debug_tensor_dump_output_folder`: a file for each pass of the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.train.fsdp.trainer import FsdpTrainer
from rlcore.train.trainer import DType

VOCABULARY = 4096


@dataclass(frozen=True)
class Sampled:
    """A prompt, what an engine made of it, and the log-probs that it gave."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Gap:
    """Distances of the log-probs of sampled tokens, in nat."""

    mean: float
    largest: float
    equal: float
    """Share of tokens whose log-probs have the same bits."""

    @classmethod
    def of(cls, engine: Sequence[float], trainer: Sequence[float]) -> Gap:
        """Between two lists of one order."""
        apart = [abs(a - b) for a, b in zip(engine, trainer, strict=True)]
        equal = sum(gap == 0 for gap in apart) / len(apart)
        return cls(statistics.fmean(apart), max(apart), equal)


def write_model(folder: Path, *, layers: int, hidden: int, head_dim: int) -> Path:
    """A Qwen3 with random bfloat16 weights and logits that are not flat."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {f"<{i}>": i for i in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<0>", eos_token="<1>", unk_token="<2>"
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2 * hidden // head_dim,
        num_key_value_heads=hidden // head_dim,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        model.lm_head.weight.mul_(2)
    model.bfloat16().save_pretrained(folder)
    return folder


async def sample(url: str, count: int, length: int) -> list[Sampled]:
    """Responses at temperature 1, all asked for at once, each with a seed of its own."""
    draw = torch.Generator().manual_seed(1)
    lengths = [5 + 7 * k % 90 for k in range(count)]
    prompts = [torch.randint(2, VOCABULARY - 1, (n,), generator=draw).tolist() for n in lengths]
    params = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
    requests = [
        GenerateRequest(prompt, {**params, "sampling_seed": k}) for k, prompt in enumerate(prompts)
    ]
    async with EngineClient(url) as client:
        answers = await client.generate(requests)
    return [Sampled(p, a.tokens, a.log_probs) for p, a in zip(prompts, answers, strict=True)]


def load_trainer(
    folder: Path, precision: DType, *, as_sglang: bool = False, device: str = "cuda"
) -> FsdpTrainer:
    """One rank; torch.distributed is there."""
    trainer = FsdpTrainer(
        TrainConfig(precision=precision),
        AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device=device,
        as_sglang=as_sglang,
    )
    trainer.load(folder, "start")
    return trainer


def gap(trainer: FsdpTrainer, samples: Sequence[Sampled]) -> Gap:
    """Of the responses, as training packs them."""
    scored = trainer.log_probs([one.prompt + one.response for one in samples])
    ours = [v for one, row in zip(samples, scored, strict=True) for v in row[-len(one.response) :]]
    return Gap.of([v for one in samples for v in one.log_probs], ours)


# --- operation by operation -----------------------------------------------------------------------


def trainer_steps(trainer: FsdpTrainer, tokens: list[int]) -> dict[str, Tensor]:
    """What the operations of a pass over one sequence give, by SGLang's names of them; [T, n]."""
    found: dict[str, Tensor] = {}
    lm = trainer._held()[0].lm
    with _watched(lm, found):
        trainer.log_probs([tokens])
    length = found["model.embed_tokens"].shape[-2]
    found = {name: value.reshape(length, -1) for name, value in found.items()}
    joined = {}
    for name, value in found.items():
        stem, _, last = name.rpartition(".")
        if last == "q_proj":
            parts = [found[f"{stem}.{part}"] for part in ("q_proj", "k_proj", "v_proj")]
            joined[f"{stem}.qkv_proj"] = torch.cat(parts, -1)
        elif last == "gate_proj":
            parts = [found[f"{stem}.{part}"] for part in ("gate_proj", "up_proj")]
            joined[f"{stem}.gate_up_proj"] = torch.cat(parts, -1)
        elif last not in ("k_proj", "v_proj", "up_proj"):
            joined[name] = value
    return joined


@contextmanager
def _watched(lm: Any, found: dict[str, Tensor]) -> Iterator[None]:
    """Fill `found` with outputs of leaves, and with what enters the last product of attention and
    MLP.
    """
    handles = []

    def keep(name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        found[name] = value.detach().cpu()

    def output(name: str) -> Any:
        return lambda module, args, out: keep(name, out)

    def entering(name: str) -> Any:
        return lambda module, args: keep(name, args)

    for name, module in lm.named_modules():
        last = name.rpartition(".")[2]
        if last.endswith(("proj", "norm", "layernorm")) or last == "embed_tokens":
            handles.append(module.register_forward_hook(output(name)))
        before = {"o_proj": "attn", "down_proj": "act_fn"}.get(last)
        if before:
            stem = name.rpartition(".")[0]
            handles.append(module.register_forward_pre_hook(entering(f"{stem}.{before}")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def engine_steps(folder: Path, passes: int) -> list[dict[str, Tensor]]:
    """What an engine has written of its first passes, in their order; empty: it wrote nothing."""
    files = sorted(folder.glob("*/Pass*.pt"))[:passes]
    out = []
    for file in files:
        written = torch.load(file, map_location="cpu", weights_only=True)
        first = {k: v[0] if isinstance(v, list) else v for k, v in written.items()}
        out.append({k: v for k, v in first.items() if isinstance(v, Tensor)})
    return out


def differences(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], start: int
) -> list[tuple[str, float, float]]:
    """By operation in the trainer's order: its name, the largest difference and the share of
    elements that differ, of the tokens that an engine's pass has from `start` on.
    """
    embedded = theirs.get("model.embed_tokens")
    if embedded is None:
        return []
    tokens, rows = len(next(iter(ours.values()))), []
    count = min(len(embedded), tokens - start)
    for name, value in ours.items():
        other = theirs.get(name)
        if other is None:
            continue
        # Norms of queries and keys have a row for each head.
        each = value[start : start + count].flatten().float()
        there = other.reshape(len(embedded), -1)[:count].flatten().float()
        if each.shape != there.shape:
            rows.append((f"{name} (shapes differ)", float("nan"), 1.0))
            continue
        apart = (each - there).abs()
        rows.append((name, apart.max().item(), (apart > 0).float().mean().item()))
    return rows
