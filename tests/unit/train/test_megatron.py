"""The Megatron trainer at one rank: FSDP2's numbers and states, and what it refuses."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_families

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.errors import ConfigError, Corrupt, PluginError, TrainError  # noqa: E402
from rlcore.models.hf_config import read_hf_config  # noqa: E402
from rlcore.plugins import load_function  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.megatron.model import Layout, transformer_config  # noqa: E402
from rlcore.train.megatron.trainer import MegatronTrainer  # noqa: E402
from rlcore.train.trainer import Lora  # noqa: E402

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def make(process_group: None, models: Path) -> Iterator[Make]:
    """A loaded trainer; settings of `train.*` by keyword."""

    def trainer(
        family: str = "qwen3",
        kind: Any = MegatronTrainer,
        algorithm: AlgorithmConfig | None = None,
        **settings: Any,
    ) -> Any:
        if not (models / family).exists():
            tiny_families.build(family, models / family)
        made = kind(
            TrainConfig(**{"lr": 1e-2, "num_iterations": 4} | settings),
            algorithm or AlgorithmConfig(),
            temperature=1.0,
            seed=0,
            device="cpu",
        )
        made.load(models / family, "start")
        return made

    yield trainer


def batch_of(toy: Any, **cut: Any) -> Any:
    return toy.shares(toy.random_sequences(8, padding=True), 1, **cut)[0]


@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_a_step_is_that_of_fsdp(family: str, toy: Any, make: Make, tmp_path: Path) -> None:
    batch = batch_of(toy, micro_batches=3)
    other, own = make(family, FsdpTrainer), make(family)
    want = other.train("start", "next", batch).metrics
    got = own.train("start", "next", batch).metrics
    of_time = ("seconds", "perf/", "tokens_per_s")
    for name, value in want.items():
        if not name.startswith(of_time):
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    other.save_state(tmp_path / "fsdp")
    assert own.load_state(tmp_path / "fsdp", "next") == other.digest()
    own.save_state(tmp_path / "megatron")
    assert other.load_state(tmp_path / "megatron", "next") == own.digest()


def test_a_saved_state_goes_on_bit_for_bit(toy: Any, make: Make, tmp_path: Path) -> None:
    straight = make("glm4_moe", lr_schedule="cosine", lr_warmup_steps=1)
    straight.train("start", "a", batch_of(toy))
    straight.save_state(tmp_path / "a")
    digest = straight.digest()
    straight.train("a", "b", batch_of(toy, num_steps=2))
    resumed = make("glm4_moe", lr_schedule="cosine", lr_warmup_steps=1)
    assert resumed.load_state(tmp_path / "a", "a") == digest
    resumed.train("a", "b", batch_of(toy, num_steps=2))
    assert resumed.digest() == straight.digest() != digest
    part = next((tmp_path / "a").glob("shard-*"))
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(Corrupt, match="a does not load"):
        resumed.load_state(tmp_path / "a", "a")
    assert resumed.loaded is None


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_recomputed_activations_change_nothing(family: str, toy: Any, make: Make) -> None:
    batch = batch_of(toy, micro_batches=2)
    plain, again = make(family), make(family, gradient_checkpointing=True)
    for trainer in (plain, again):
        trainer.train("start", "next", batch)
    assert again.digest() == plain.digest()


def test_masters_keep_what_bfloat16_loses(toy: Any, make: Make, tmp_path: Path) -> None:
    whole, half = make(), make(precision="bfloat16", lr=1e-6)
    assert half.digest() == whole.digest()
    want = whole.train("start", "next", batch_of(toy)).metrics
    got = half.train("start", "next", batch_of(toy)).metrics
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=0.05)
    half.save_state(tmp_path / "half")
    other = make(precision="bfloat16")
    assert other.load_state(tmp_path / "half", "next") == half.digest()
    for (name, one), (_, two) in zip(
        half.named_tensors("bfloat16"), half.named_tensors("float32"), strict=True
    ):
        assert torch.equal(one, two.bfloat16()), name


def test_a_reference_and_several_steps(toy: Any, make: Make) -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.5)
    batch = batch_of(toy, num_steps=2, micro_batches=2)
    reports = [
        make("qwen3", kind, algorithm, lr=1e-3).train("start", "next", batch).metrics
        for kind in (FsdpTrainer, MegatronTrainer)
    ]
    for name in ("loss", "kl_loss", "grad_norm", "ratio_max"):
        assert reports[1][name] == pytest.approx(reports[0][name], rel=1e-3), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_goes_to_the_host_and_comes_back(precision: str, toy: Any, make: Make) -> None:
    batches = [batch_of(toy), toy.shares(toy.random_sequences(5, seed=3), 1)[0]]
    kl = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    plain, moved = (make(algorithm=kl, precision=precision) for _ in range(2))
    for trainer in (plain, moved):
        trainer.train("start", "one", batches[0])
    digest, ids = moved.digest(), [[5, 9, 2, 7]]
    log_probs = moved.log_probs(ids)
    moved.offload()
    weights = [p for chunk in moved._policy.chunks for p in chunk.parameters()]
    gradients = [*moved._optimizer.gradients()]
    assert {p.untyped_storage().nbytes() for p in (*weights, *gradients)} == {0}
    with pytest.raises(TrainError, match="onload"):
        moved.log_probs(ids)
    moved.onload(weights_only=True)
    assert moved.log_probs(ids) == log_probs
    with pytest.raises(TrainError, match="onload"):
        moved.train("one", "two", batches[1])
    moved.onload()
    assert moved.digest() == digest
    for trainer in (plain, moved):
        trainer.train("one", "two", batches[1])
    assert moved.digest() == plain.digest()


def test_hooks_are_called_with_what_slime_gives_them(toy: Any, make: Make, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(
        "SEEN = []\n"
        "def init(args):\n    SEEN.append(('init', args.lr))\n"
        "def scores(args, model, store_prefix):\n    SEEN.append((store_prefix, len(model)))\n"
        "def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):\n"
        "    if rollout_id == 7:\n        raise RuntimeError('not this one')\n"
        "    SEEN.append((rollout_id, step_id, optimizer.steps))\n"
    )
    names = {"init": "init", "before_log_prob_hook": "scores", "before_train_step_hook": "step"}
    hooks = {f"custom_megatron_{k}_path": f"{tmp_path}/hooks.py:{v}" for k, v in names.items()}
    kl = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    trainer, plain = make(algorithm=kl, **hooks), make(algorithm=kl)
    batch = batch_of(toy, num_steps=2)
    got, want = (one.train("start", "next", batch).metrics for one in (trainer, plain))
    seen = load_function(f"{tmp_path}/hooks.py:init", "a test").__globals__["SEEN"]
    assert seen == [("init", 1e-2), ("", 1), ("ref_", 1), (0, 0, 0), (0, 1, 1)]
    assert got["grad_norm"] == want["grad_norm"]
    with pytest.raises(PluginError, match=r"before_train_step_hook_path raised RuntimeError: not"):
        trainer.train("next", "later", replace(batch, iteration=7))
    assert (trainer.loaded, trainer.dirty) == ("next", False)


def test_nothing_is_applied_of_a_step_that_is_not_finite(toy: Any, make: Make) -> None:
    trainer = make()
    before = trainer.digest()
    bad = [replace(s, advantages=math.nan) for s in toy.random_sequences(4)]
    with pytest.raises(TrainError, match="the loss is nan"):
        trainer.train("start", "next", toy.shares(bad, 1)[0])
    assert trainer.digest() == before and not trainer.dirty
    good = batch_of(toy)
    again = trainer.train("start", "next", good).metrics["grad_norm"]
    assert again == make().train("start", "next", good).metrics["grad_norm"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"tensor_paralel_size": 2}, "no such setting; do you mean megatron.tensor_model_parallel"),
        ({"bf16": True}, "megatron.bf16 follows from train.precision"),
        ({"hidden_size": 64}, "megatron.hidden_size follows from the model"),
        ({"tensor_model_parallel_size": 2}, "1 trainer ranks cannot be laid out"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size = 2 x"),
        ({"tensor_model_parallel_size": "two"}, "tensor_model_parallel_size = 'two'"),
    ],
)
def test_settings_are_checked_by_name(
    process_group: None, table: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        MegatronTrainer(
            TrainConfig(),
            AlgorithmConfig(),
            temperature=1.0,
            seed=0,
            device="cpu",
            megatron=table,
        )


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"sequence_parallel": True}, "has no effect without tensor parallel ranks"),
        ({"num_layers_in_first_pipeline_stage": 1}, "beside megatron.num_layers_in_first"),
    ],
)
def test_a_layout_that_the_model_cannot_have(
    process_group: None, table: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny_families.build("qwen3_moe", tmp_path)
    where: dict[str, Any] = {"temperature": 1.0, "seed": 0, "device": "cpu"}
    trainer = MegatronTrainer(TrainConfig(), AlgorithmConfig(), **where, megatron=table)
    with pytest.raises(ConfigError, match=words):
        trainer.load(tmp_path, "start")


def test_settings_that_megatron_core_refuses_are_told(tmp_path: Path) -> None:
    tiny_families.build("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match="megatron-core refuses these settings"):
        transformer_config(read_hf_config(tmp_path), Layout(sequence_parallel=True), "float32", {})


def test_what_is_not_there_is_said(process_group: None, toy: Any, tmp_path: Path) -> None:
    def build(**more: Any) -> Any:
        return MegatronTrainer(
            TrainConfig(), AlgorithmConfig(), temperature=1.0, seed=0, device="cpu", **more
        )

    with pytest.raises(ConfigError, match=r"model\.lora_rank is not there"):
        build(lora=Lora(4, 8.0))
    granite = toy.write_model(tmp_path / "granite", "granite")
    with pytest.raises(ConfigError, match="granite"):
        build().load(granite, "start")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        build().load(tmp_path, "start")
