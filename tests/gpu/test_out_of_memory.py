"""A batch that really does not fit on a GPU: the sizes that are told."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rlcore.algorithms.aggregate import Totals  # noqa: E402
from rlcore.algorithms.packing import TrainSequence  # noqa: E402
from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.errors import OutOfMemory  # noqa: E402
from rlcore.train.trainer import TrainBatch, TrainStep  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTH, COUNT = 4096, 64
ROOM = 12e9
"""Bytes that this process may take: the model's 1.5 GB fit, activations of all tokens do not."""


def model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def batch() -> TrainBatch:
    """All samples in one micro-batch."""
    one = TrainSequence(
        [k % 7_000 for k in range(LENGTH)],
        LENGTH - 1,
        advantages=1.0,
        rollout_log_probs=[-9.0] * (LENGTH - 1),
    )
    totals = Totals.of(LENGTH - 1 for _ in range(COUNT))
    step = TrainStep(((one,) * COUNT,), totals)
    return TrainBatch(0, (step,), COUNT, COUNT * LENGTH, rollout_log_probs=True)


@pytest.fixture
def cap() -> Iterator[Callable[[], None]]:
    """Bounds what this process may take, until the test ends."""

    def bound() -> None:
        torch.cuda.set_per_process_memory_fraction(ROOM / torch.cuda.mem_get_info()[1])

    yield bound
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_sizes_are_told(tmp_path: Path, cap: Callable[[], None]) -> None:
    from rlcore.train.fsdp.trainer import FsdpTrainer
    from rlcore.train.ranks import one_rank

    torch.cuda.set_device(0)
    with one_rank("cuda"):
        train = TrainConfig(precision="bfloat16", max_tokens_per_gpu=COUNT * LENGTH)
        trainer = FsdpTrainer(train, AlgorithmConfig(), temperature=1.0, seed=0, device="cuda")
        trainer.load(model(tmp_path / "model"), "start")
        cap()
        with pytest.raises(OutOfMemory) as caught:
            trainer.train("start", "next", batch())
        said = str(caught.value)
        print(said)
        for part in (" were asked for", "parameters 0.", "moments 0.", "activations and the rest "):
            assert part in said
        assert f"train.max_tokens_per_gpu = {COUNT * LENGTH}" in said
        assert trainer.dirty
