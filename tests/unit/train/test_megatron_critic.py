"""PPO by Megatron: losses, values and gradients of FSDP2, its states, warm-up, in every layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_families
from rank_processes import results, run_ranks
from tiny_trainers import loaded

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rlcore.config.tree import AlgorithmConfig  # noqa: E402
from rlcore.errors import Corrupt, PluginError, TrainError  # noqa: E402
from rlcore.plugins import load_function  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.megatron.trainer import MegatronTrainer  # noqa: E402

Make = Callable[..., Any]
PPO = AlgorithmConfig(
    advantage_estimator="ppo",
    gamma=0.98,
    lambd=0.9,
    kl_coef=0.3,
    critic_lr=5e-3,
    use_rollout_logprobs=True,
)
FOLLOWS = PPO.model_copy(update={"ref_update_interval": 1})
WARM_UP = PPO.model_copy(update={"num_critic_only_steps": 1})
TP, PP, CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {TP: 2},
    "tp2-sp": {TP: 2, "sequence_parallel": True},
    "pp2": {PP: 2},
    "pp2-vp2": {PP: 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {CP: 2},
}
FIGURES = (
    "loss",
    "grad_norm",
    "value_loss",
    "critic_grad_norm",
    "rollout/values",
    "rollout/returns",
    "rollout/advantages",
    "rollout/log_probs",
)
"""That must agree to 1e-4."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`qwen3` has tied embeddings, `llama` has not; `deep` has two runs of layers a stage."""
    folder = tmp_path_factory.mktemp("families")
    for family in ("qwen3", "llama", "deepseek_v3"):
        tiny_families.build(family, folder / family)
    tiny_families.build("qwen3", folder / "deep", layers=4)
    return folder


@pytest.fixture
def make(process_group: None, models: Path) -> Make:
    """A loaded trainer; settings of `train.*` by keyword."""

    def trainer(
        kind: Any = MegatronTrainer,
        algorithm: AlgorithmConfig = PPO,
        family: str = "qwen3",
        **settings: Any,
    ) -> Any:
        return loaded(kind, models / family, algorithm, **settings)

    return trainer


def batch_of(toy: Any, **cut: Any) -> Any:
    return toy.shares(toy.random_sequences(6, padding=True), 1, **cut)[0]


@pytest.mark.parametrize("family", ["qwen3", "llama", "deepseek_v3"])
def test_a_step_is_that_of_fsdp(family: str, toy: Any, make: Make, tmp_path: Path) -> None:
    batch = batch_of(toy, micro_batches=2, num_steps=2)
    other, own = make(FsdpTrainer, family=family), make(family=family)
    dense = family != "deepseek_v3"
    assert not dense or own.digest() == other.digest()
    want = other.train("start", "next", batch).metrics
    got = own.train("start", "next", batch).metrics
    assert {"value_loss", "critic_grad_norm", "critic_lr", "rollout/values"} <= want.keys()
    for name, value in want.items():
        if not name.startswith(("seconds", "perf/", "tokens_per_s", "moe/")):
            # After the first of two steps of AdamW, which makes much of next to nothing.
            assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    if dense:
        other.save_state(tmp_path / "fsdp")
        assert own.load_state(tmp_path / "fsdp", "next") == other.digest()
        own.save_state(tmp_path / "megatron")
        assert other.load_state(tmp_path / "megatron", "next") == own.digest()


def test_a_saved_state_goes_on_bit_for_bit(toy: Any, make: Make, tmp_path: Path) -> None:
    """Through an iteration of the critic alone, with the trainer's memory in the host's between."""
    straight = make(algorithm=WARM_UP)
    weights = {name: t.clone() for name, t in straight.named_tensors("float32")}
    report = straight.train("start", "a", batch_of(toy))
    assert report.optimizer_step == 0
    assert "loss" not in report.metrics and report.metrics["critic_grad_norm"] > 0
    assert all(torch.equal(t, weights[n]) for n, t in straight.named_tensors("float32"))
    straight.save_state(tmp_path / "a")
    digest = straight.digest()
    straight.offload()
    critic = [p for chunk in straight._critic.model.chunks for p in chunk.parameters()]
    assert {p.untyped_storage().nbytes() for p in critic} == {0}
    straight.onload()
    assert straight.digest() == digest
    straight.train("a", "b", batch_of(toy, iteration=1))
    resumed = make(algorithm=WARM_UP)
    assert resumed.load_state(tmp_path / "a", "a") == digest
    assert "loss" in resumed.train("a", "b", batch_of(toy, iteration=1)).metrics
    assert resumed.digest() == straight.digest() != digest


def test_a_state_without_a_critic_is_refused(make: Make, tmp_path: Path) -> None:
    make(algorithm=AlgorithmConfig()).save_state(tmp_path / "plain")
    with pytest.raises(Corrupt, match=r"does not load as a state of this model.* is missing"):
        make().load_state(tmp_path / "plain", "plain")


def test_the_critic_s_masters_keep_what_bfloat16_loses(toy: Any, make: Make) -> None:
    whole, half = make(), make(precision="bfloat16")
    assert half.digest() == whole.digest()
    got, want = (one.train("start", "next", batch_of(toy)).metrics for one in (half, whole))
    assert got["critic_grad_norm"] == pytest.approx(want["critic_grad_norm"], rel=0.05)


def test_nothing_is_applied_where_the_critic_is_not_finite(toy: Any, make: Make) -> None:
    trainer = make()
    bias = trainer._critic.model.head.bias
    with torch.no_grad():
        bias.fill_(float("inf"))
    with pytest.raises(TrainError, match="was not applied"):
        trainer.train("start", "next", batch_of(toy))
    with torch.no_grad():
        bias.zero_()
    assert trainer.digest() == make().digest() and not trainer.dirty


HOOKS = """
SEEN = []

def init(args):
    SEEN.append(("init", args.lr))

def scores(args, model, store_prefix):
    head = model[-1].output_layer.weight
    SEEN.append((store_prefix, "critic" if head is not None and len(head) == 1 else "policy"))

def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    if rollout_id == 7 and optimizer.steps == 2:
        raise RuntimeError("not this one")
    head = model[-1].output_layer.weight
    role = "critic" if head is not None and len(head) == 1 else "policy"
    SEEN.append((rollout_id, step_id, role, optimizer.steps, opt_param_scheduler))
"""


def test_hooks_see_every_model_when_slime_calls_them(
    toy: Any, make: Make, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    names = {"init": "init", "before_log_prob_hook": "scores", "before_train_step_hook": "step"}
    hooks = {f"custom_megatron_{k}_path": f"{tmp_path}/hooks.py:{v}" for k, v in names.items()}
    seen = load_function(f"{tmp_path}/hooks.py:init", "a test").__globals__["SEEN"]
    teacher = {"use_opd": True, "opd_teacher_load": str(models / "qwen3")}
    algorithm = PPO.model_copy(update=teacher | {"use_rollout_logprobs": False})
    trainer = make(algorithm=algorithm, **hooks)
    trainer.load(models / "qwen3", "start")
    assert seen == [("init", 1e-2)], "once, whatever is loaded"
    trainer.train("start", "next", batch_of(toy, num_steps=2))
    assert seen[1:5] == [("", "policy"), ("ref_", "policy"), ("teacher_", "policy"), ("", "critic")]
    steps = [(0, k, role, k, None) for k in range(2) for role in ("policy", "critic")]
    assert seen[5:] == steps
    before = trainer.digest()
    with pytest.raises(PluginError, match=r"before_train_step_hook_path raised RuntimeError: not"):
        trainer.train("next", "later", replace(batch_of(toy), iteration=7))
    assert (trainer.loaded, trainer.dirty) == ("next", False)
    assert trainer.digest() == before


@pytest.fixture(scope="module")
def batches(toy: Any) -> dict[int, Any]:
    sequences = toy.random_sequences(10, padding=True)
    return {n: toy.shares(sequences, n, micro_batches=3) for n in (1, 2)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: Path, batches: Any) -> Path:
    """What two ranks do, one case after another: the last goes on from what another saved."""
    folder = tmp_path_factory.mktemp("pair")
    cases: list[dict[str, Any]] = [
        {
            "name": layout,
            "model": models / ("deep" if "vp2" in layout else "qwen3"),
            "layout": table,
            "shares": batches,
            "algorithm": FOLLOWS.model_dump(exclude_unset=True),
        }
        for layout, table in LAYOUTS.items()
    ]
    cases[0]["save"] = folder / "of-copies"
    cases[2]["save"] = folder / "saved"
    cases.append(cases[3] | {"name": "on", "restore": folder / "saved", "save": folder / "of-two"})
    run_ranks(folder, 2, cases)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_make_the_numbers_of_fsdp(
    layout: str, pair: Path, make: Make, batches: Any
) -> None:
    one = make(FsdpTrainer, family="deep" if "vp2" in layout else "qwen3")
    want = one.train("start", "next", batches[1][0]).metrics
    for got in results(pair, layout, 2):
        for name in FIGURES:
            assert got["metrics"][name] == pytest.approx(want[name], rel=1e-4), name


def test_a_state_is_read_at_another_layout_and_by_fsdp(pair: Path, make: Make) -> None:
    saved = results(pair, "tp2-sp", 2)[0]["saved"]
    assert [one["restored"] for one in results(pair, "on", 2)] == [saved, saved]
    assert make(FsdpTrainer, FOLLOWS).load_state(pair / "saved", "a") == saved
    alone = make(algorithm=FOLLOWS)
    for folder, case in (("of-two", "on"), ("of-copies", "dp2")):
        assert alone.load_state(pair / folder, "a") == results(pair, case, 2)[0]["saved"]
        weights = ([*m.chunks[0].parameters()] for m in (alone._reference, alone._policy))
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True)), case
