"""The trainer's faster ways on a GPU against the plain ones."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks._shapes import build  # noqa: E402
from rlcore.algorithms.aggregate import Totals  # noqa: E402
from rlcore.algorithms.logprobs import chunked_log_probs  # noqa: E402
from rlcore.algorithms.packing import TrainSequence  # noqa: E402
from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.train.fsdp import attention  # noqa: E402
from rlcore.train.fsdp.attention import SequenceLayout, packed_attention  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.trainer import TrainBatch, TrainStep  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (7, 130, 1, 64, 33)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    from rlcore.train.ranks import one_rank

    with one_rank("cuda"):
        yield


def test_attention_of_uneven_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layout = SequenceLayout.of(LENGTHS, torch.device("cuda"))
    heads = [torch.randn(1, n, sum(LENGTHS), 64, device="cuda") for n in (8, 2, 2)]

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.detach().to(dtype, copy=True).requires_grad_() for x in heads]
        out, _ = packed_attention(torch.nn.Module(), *inputs, None, layout=layout, scaling=0.2)
        out.square().sum().backward()
        return [out.detach().float(), *(x.grad.float() for x in inputs)]

    exact = gradients(torch.float32)
    fast = gradients(torch.bfloat16)
    monkeypatch.setattr(attention, "HALF", ())
    plain = gradients(torch.bfloat16)
    for name, e, f, p in zip("oqkv", exact, fast, plain, strict=True):
        off, usual = (f - e).abs().max().item(), (p - e).abs().max().item()
        print(name, "variable length", off, "rectangle", usual)
        assert off <= 2 * usual + 1e-3


@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_probs_of_a_large_vocabulary(with_entropy: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda").requires_grad_()
    weight = (torch.randn(50_000, 256, device="cuda") / 16).requires_grad_()
    targets = torch.randint(50_000, (300,), device="cuda")
    grads = torch.randn(2, 300, device="cuda")

    def found(dtype: torch.dtype, device: str = "cuda") -> list[torch.Tensor]:
        h, w = (x.detach().to(device, dtype).requires_grad_() for x in (hidden, weight))
        log_probs, entropy = chunked_log_probs(h, w, targets.to(device), 0.8, 100)
        loss = (log_probs * grads[0].to(device)).sum()
        if with_entropy:
            loss = loss + (entropy * grads[1].to(device)).sum()
        loss.backward()
        return [x.float().cuda() for x in (log_probs.detach(), entropy.detach(), h.grad, w.grad)]

    exact = found(torch.float64, "cpu")
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        for name, e, f in zip(("log-probs", "entropy", "h", "w"), exact, found(dtype), strict=True):
            off = ((f - e).abs().max() / e.abs().max()).item()
            print(dtype, name, off)
            assert off < tolerance


def batch_of(lengths: Sequence[int], max_tokens: int = 255) -> TrainBatch:
    """A batch of random responses of these lengths, as many to a micro-batch as fit."""
    draw = torch.Generator().manual_seed(1)
    micros: list[list[TrainSequence]] = [[]]
    for n in lengths:
        if sum(len(s.tokens) for s in micros[-1]) + n + 4 > max_tokens:
            micros.append([])
        tokens = torch.randint(512, (n + 4,), generator=draw).numpy()
        micros[-1].append(TrainSequence(tokens, n, advantages=(-1.0) ** n))
    totals = Totals.of(lengths)
    step = TrainStep(tuple(map(tuple, micros)), totals)
    tokens = sum(n + 4 for n in lengths)
    return TrainBatch(0, (step,), len(lengths), tokens, rollout_log_probs=False)


def test_the_first_batch_compiles_nothing(tmp_path: Path) -> None:
    folder = build("tiny", tmp_path / "model")
    config = TrainConfig(precision="bfloat16", lr=1e-4, max_tokens_per_gpu=4096)
    trainer = FsdpTrainer(config, AlgorithmConfig(), temperature=1.0, seed=0, device="cuda")
    began = time.perf_counter()
    trainer.load(folder, "0")
    print("load", time.perf_counter() - began)

    def graphs() -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    made, seconds = graphs(), []
    assert made > 0
    for number, lengths in enumerate((LENGTHS, (200,) * 40, (90,), range(1, 99))):
        batch, began = batch_of(lengths, 4096), time.perf_counter()
        trainer.train(str(number), str(number + 1), batch)
        seconds.append(time.perf_counter() - began)
        print("batch", number, len(batch.steps[0].micro_batches), "micro-batches", seconds[-1])
        assert graphs() == made, f"batch {number} had code made anew"


def test_a_step_is_that_of_a_cpu(tmp_path: Path) -> None:
    folder = build("tiny", tmp_path / "model")
    batch = batch_of(LENGTHS)
    reports = {}
    for precision in ("float32", "bfloat16"):
        for device, compiled in (("cpu", False), ("cuda", False), ("cuda", True)):
            config = TrainConfig(precision=precision, torch_compile=compiled, lr=1e-4)
            trainer = FsdpTrainer(config, AlgorithmConfig(), temperature=1.0, seed=0, device=device)
            trainer.load(folder, "0")
            first = trainer.train("0", "1", batch).metrics
            second = trainer.train("1", "2", batch).metrics
            reports[precision, device, compiled] = first, second
            print(precision, device, compiled, first["grad_norm"], second["loss"])
    exact = reports["float32", "cpu", False]
    for (precision, *_), report in reports.items():
        tolerance = 1e-3 if precision == "float32" else 3e-2
        for mine, theirs in zip(report, exact, strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
