"""A trainer on a GPU that goes to the host's memory and comes back: bytes freed, same numbers."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GB = 1e9
LEFT = 0.1 * GB
"""What may stay on the device: buffers, step counts, cuBLAS' workspace."""


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    from rlcore.train.ranks import one_rank

    torch.cuda.set_device(0)
    with one_rank("cuda"):
        yield


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a billion random weights: 8 GB with moments."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_the_device_is_free_and_the_numbers_come_back(
    process_group: None, model_folder: Path
) -> None:
    from rlcore.train.fsdp.trainer import FsdpTrainer

    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    train = TrainConfig(precision="bfloat16", torch_compile=False)
    trainer = FsdpTrainer(train, algorithm, temperature=1.0, seed=0, device="cuda")
    trainer.load(model_folder, "start")
    sequences = [[k % 31_000 for k in range(n, n + 300)] for n in (1, 500)]
    log_probs, digest = trainer.log_probs(sequences), trainer.digest()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()

    for turn in range(3):
        start = time.perf_counter()
        trainer.offload()
        away, left = time.perf_counter() - start, torch.cuda.memory_allocated()
        reserved = torch.cuda.memory_reserved()
        start = time.perf_counter()
        trainer.onload()
        back = time.perf_counter() - start
        moved = (held - left) / GB
        print(
            f"turn {turn}: {moved:.2f} GB, off in {away:.3f} s ({moved / away:.1f} GB/s), on in "
            f"{back:.3f} s ({moved / back:.1f} GB/s); left allocated {left / GB:.3f} GB, reserved "
            f"{reserved / GB:.3f} GB"
        )
        assert left < LEFT, f"{left / GB:.2f} GB stayed on the device"
        assert torch.cuda.memory_allocated() == held

    assert trainer.digest() == digest
    assert trainer.log_probs(sequences) == log_probs
    trainer.offload()
    trainer.onload(weights_only=True)
    weights = torch.cuda.memory_allocated()
    print(f"the weights alone: {weights / GB:.2f} of {held / GB:.2f} GB")
    assert weights < 0.35 * held
    assert trainer.log_probs(sequences) == log_probs
