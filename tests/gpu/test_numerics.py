"""How near SGLang's log-probs are to the trainer's on one GPU, and whether runs repeat bit by bit.

Run with `-s` to see the tables as they are made; skipped without a GPU or SGLang. Each engine takes
a minute or two to start.
"""

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_servers import SERVER
from real_runs import REPO, Sluice

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not there"),
]

ON_POLICY = {"rl_on_policy_target": "fsdp", "enable_deterministic_inference": True}
ENGINES: dict[str, tuple[str, dict[str, bool | int | float | str]]] = {
    "bfloat16": ("bfloat16", SERVER),
    "bfloat16, deterministic": ("bfloat16", SERVER | {"enable_deterministic_inference": True}),
    "float32": ("float32", SERVER | {"attention_backend": "triton"}),
    "as the trainer": ("bfloat16", SERVER | ON_POLICY),
}
"""By name: the type of an engine's weights, and more of its arguments."""
SHAPE = {"layers": 8, "hidden": 1024, "head_dim": 128}
COUNT, LENGTH = 32, 128
GAP = "train/train_rollout_logprob_abs_diff"
DECODED = 6
"""Passes of one token each that are looked at operation by operation."""


@contextmanager
def serving(model: Path, log: Path, dtype: str, extra: dict[str, Any]) -> Iterator[str]:
    from rlcore.engine.launch import EngineProcess
    from rlcore.engine.sglang import DETERMINISTIC_ENV, sglang_argv
    from rlcore.net import free_port

    port = free_port()
    engine = EngineProcess(port)
    argv = sglang_argv(model, port, dtype=dtype, context_length=1024, extra=extra)
    engine.start(argv, log, DETERMINISTIC_ENV)
    try:
        engine.wait_healthy(400)
        yield engine.url
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from numerics import write_model

    return write_model(tmp_path_factory.mktemp("model") / "qwen3", **SHAPE)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    from rlcore.train.ranks import one_rank

    torch.cuda.set_device(0)
    with one_rank("cuda"):
        yield


@pytest.fixture(scope="module")
def samples(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of every engine that starts, by its name; of one that does not, why."""
    from numerics import sample

    from rlcore.errors import EngineError

    found: dict[str, Any] = {}
    for name, (dtype, extra) in ENGINES.items():
        log = tmp_path_factory.mktemp("engine") / "engine.log"
        try:
            with serving(model, log, dtype, extra) as url:
                found[name] = asyncio.run(sample(url, COUNT, LENGTH))
        except EngineError as error:
            found[name] = str(error)
            print(f"engine {name!r} did not start: {error}", flush=True)
    return found


def show(engine: str, trainer: str, gap: Any) -> None:
    print(
        f"{engine:26s} {trainer:26s} mean {gap.mean:.3e}  max {gap.largest:.3e}  "
        f"equal {100 * gap.equal:6.2f} %",
        flush=True,
    )


def test_gaps_of_engines_and_trainers(
    model: Path, samples: dict[str, Any], process_group: None
) -> None:
    """A table, and bounds beyond which something is broken."""
    from numerics import gap, load_trainer

    print(f"\n{COUNT} responses of {LENGTH} tokens; engine, trainer, gap in nat a token")
    gaps = {}
    for precision in ("float32", "bfloat16"):
        trainer = load_trainer(model, precision)  # type: ignore[arg-type]
        for name, made in samples.items():
            if not isinstance(made, str):
                gaps[name, precision] = gap(trainer, made)
                show(name, precision, gaps[name, precision])
        del trainer
        torch.cuda.empty_cache()
    assert gaps, f"no engine started: {samples}"
    assert all(one.mean < 0.1 for one in gaps.values())
    if ("float32", "float32") in gaps:
        assert gaps["float32", "float32"].mean < 1e-3


def test_the_gap_is_exactly_0_where_both_compute_the_same(
    model: Path, samples: dict[str, Any], process_group: None, tmp_path: Path
) -> None:
    """Last of those with a trainer: from here on the process computes by SGLang's kernels. Where
    the gap is not 0, the operations that differ first are printed.
    """
    from numerics import gap, load_trainer

    made = samples["as the trainer"]
    assert not isinstance(made, str), made
    trainer = load_trainer(model, "bfloat16", as_sglang=True)
    for name, other in samples.items():
        if not isinstance(other, str):
            show(name, "bfloat16, as sglang", gap(trainer, other))
    found = gap(trainer, made)
    if found.largest:
        _compare_operations(model, trainer, tmp_path)
    assert found.largest == 0.0, f"equal are {100 * found.equal:.2f} % of the tokens"


def _compare_operations(model: Path, trainer: Any, scratch: Path) -> None:
    """Print where engine and trainer part, in the pass over a prompt and in the ones after it."""
    from numerics import differences, engine_steps, sample, trainer_steps

    dump = scratch / "dump"
    extra = SERVER | ON_POLICY | {"debug_tensor_dump_output_folder": str(dump)}
    with serving(model, scratch / "dump.log", "bfloat16", extra) as url:
        (one,) = asyncio.run(sample(url, 1, DECODED + 2))
    ours = trainer_steps(trainer, one.prompt + one.response)
    passes = engine_steps(dump, DECODED + 1)
    if not passes:
        print(f"the engine has written no tensors below {dump}", flush=True)
    start = 0
    for number, theirs in enumerate(passes):
        rows = differences(ours, theirs, start)
        parted = [row for row in rows if row[2]]
        what = "over the prompt" if number == 0 else f"of token {start}"
        print(f"\npass {what}: {len(parted)} of {len(rows)} operations differ", flush=True)
        for name, largest, share in parted[:12]:
            print(f"  {name:50s} max {largest:.3e}  differing {100 * share:.3f} %", flush=True)
        start += len(theirs["model.embed_tokens"]) if "model.embed_tokens" in theirs else 0


def run(root: Path, name: str, *settings: str) -> list[dict[str, Any]]:
    """The quickstart with SGLang, four iterations; its metrics, the digest of its state first."""
    sluice = Sluice(root, cwd=root.parent)
    config = REPO / "examples" / "quickstart" / "gpu.toml"
    chosen = ["train.num_iterations=4", *settings]
    sets = [word for one in chosen for word in ("--set", one)]
    sluice("train", str(config), "--run-id", name, *sets, timeout=600)
    shown = sluice.json("show", name)
    names = (GAP, f"{GAP}_max", "train/seconds_train")
    told = {name: [m.get(name) for m in shown["metrics"]] for name in names}
    print(name, json.dumps({"state_sha256": shown["state_sha256"]} | told), flush=True)
    return [{"state": shown["state_sha256"]}, *shown["metrics"]]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_deterministic_runs_are_bit_equal(tmp_path: Path, precision: str) -> None:
    settings = ("train.deterministic=true", f"train.precision={precision}")
    first, second = (run(tmp_path / f"{k}", f"run-{k}", *settings) for k in range(2))
    assert [m["train/loss"] for m in first[1:]] == [m["train/loss"] for m in second[1:]]
    assert first[0] == second[0]


def test_a_true_on_policy_run_trains(tmp_path: Path) -> None:
    """It stops at a gap that is not 0."""
    settings = ("algorithm.true_on_policy_mode=true", "train.precision=bfloat16")
    metrics = run(tmp_path / "root", "exact", *settings)[1:]
    assert len(metrics) == 4
    assert all(m[f"{GAP}_max"] == 0 for m in metrics)
