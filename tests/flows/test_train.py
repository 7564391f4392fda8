"""`sluice train` from the command to the checkpoint, and what can be asked of the run
afterwards.
"""

import json
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
from real_runs import Sluice, short
from undisturbed import ITERATIONS, Undisturbed

STAGES = ["rollout", "reward", "filter", "train", "weight_sync"]


def test_a_run_goes_the_whole_way_and_can_be_asked(calm: Undisturbed) -> None:
    sluice, shown = calm.sluice, calm.shown
    assert f"{ITERATIONS} iterations committed" in calm.printed
    assert "sluice verify calm" in calm.printed

    ended = (shown["run_id"], shown["status"], shown["committed"])
    assert ended == ("calm", "completed", ITERATIONS)
    assert len(shown["state_sha256"]) == 64
    assert [m["iteration"] for m in shown["metrics"]] == list(range(ITERATIONS))
    assert all(0 <= m["reward"] <= 1 and m["seconds"] > 0 for m in shown["metrics"])
    assert "eval/greedy/pass@1" in shown["metrics"][2]

    first = sluice.json("show", "calm", "--iter", "2")
    assert list(first["stages"]) == [*STAGES, "evaluate", "checkpoint"]
    for number in (str(ITERATIONS), "-1"):
        said = sluice("show", "calm", "--iter", number, code=2)
        assert f"0 to {ITERATIONS - 1} are committed" in said

    assert sluice.json("verify", "calm")["ok"]
    samples = sluice.json("samples", "calm", "--iter", "3", "--limit", "5")
    assert len(samples) == 5
    assert samples[0]["prompt"].endswith("=")
    rows = sluice.json("sql", "select iteration, count(*) n from samples group by 1 order by 1")
    assert rows == [{"iteration": i, "n": 64} for i in range(ITERATIONS)]
    assert [r["run_id"] for r in sluice.json("runs")] == ["calm"]

    plain_readers_open_every_part(Path(sluice.root))
    the_checkpoint_loads_and_differs(Path(sluice.root) / "runs" / "calm")
    assert (Path(sluice.root) / "runs" / "calm" / "reward.png").read_bytes().startswith(b"\x89PNG")


def plain_readers_open_every_part(root: Path) -> None:
    parts = sorted(root.glob("runs/*/it/*/*/part-*.parquet"))
    assert parts
    for part in parts:
        table = pq.read_table(part)
        assert table.num_rows == duckdb.sql(f"select count(*) from '{part}'").fetchall()[0][0]


def the_checkpoint_loads_and_differs(run: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = json.loads(
        (run / "it" / f"{ITERATIONS - 1:06d}" / "checkpoint" / "_MANIFEST.json").read_bytes()
    )
    prefix = run.parent.parent / folder["extra"]["checkpoint"]["key_prefix"]
    trained = AutoModelForCausalLM.from_pretrained(prefix)
    start = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(prefix).decode([5, 6]) != ""
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_the_same_name_with_another_config_is_refused(calm: Undisturbed) -> None:
    sluice, again = calm.sluice, ("train", str(calm.config), "--run-id", "calm")
    assert "train.lr is 0.0005 there and 0.1 here" in sluice(
        *again, "--set", "train.lr=0.1", code=2
    )
    assert sluice.json("show", "calm") == calm.shown
    # The same configuration is no error: there is nothing left to do.
    sluice(*again)
    assert sluice.json("show", "calm") == calm.shown


def test_a_run_made_longer_says_so_and_one_without_samples_goes_on(
    sluice: Sluice, tmp_path: Path
) -> None:
    (tmp_path / "nothing.py").write_text("def keep(args, samples, **kwargs):\n    return False\n")
    drop = f"filter.dynamic_sampling_filter_path={tmp_path}/nothing.py:keep"
    config = short(tmp_path, iterations=2)
    sluice("train", str(config), "--run-id", "longer", "--set", drop)
    start = sluice.json("show", "longer")
    assert [m["train/samples"] for m in start["metrics"]] == [0, 0]
    sluice("resume", "longer", "--set", "train.num_iterations=3")
    shown = sluice.json("show", "longer")
    assert (shown["committed"], shown["total"], shown["status"]) == (3, 3, "completed")
    assert shown["state_sha256"] == start["state_sha256"]
    assert sluice.json("verify", "longer")["ok"]
