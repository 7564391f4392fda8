"""`sluice lab` on a real run."""

from pathlib import Path

import pytest
from real_runs import Sluice, short

from rlcore.lab import OWN


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory, stack_env: dict[str, str]) -> Sluice:
    """A root with run a: two iterations of GSPO."""
    folder = tmp_path_factory.mktemp("lab")
    made = Sluice(folder / "root", cwd=folder, env=stack_env)
    config = short(folder, iterations=2, more='[algorithm]\nadvantage_estimator = "gspo"')
    made("train", str(config), "--run-id", "a")
    return made


@pytest.mark.slow
def test_a_run_of_another_backend_is_measured_by_that_one(sluice: Sluice, tmp_path: Path) -> None:
    """In two layouts: ranks that divided the model are no part of it."""
    pytest.importorskip("megatron.core")
    config = short(tmp_path, iterations=1)
    backend = "--set", 'train.backend="megatron"', "--set", "cluster.actor_num_gpus_per_node=2"
    layout = "--set", "megatron.tensor_model_parallel_size=2"
    sluice("train", str(config), "--run-id", "m", *backend, *layout)
    found = sluice.json("lab", "m", "--iter", "0", "--policy", "-1")
    done = sluice.json("show", "m", "--iter", "0")["metrics"]
    own = found["rows"][0]["metrics"]
    for name in ("grad_norm", "loss"):
        assert own[name] == pytest.approx(done[f"train/{name}"], rel=1e-3, abs=1e-6)


def files(root: Path | str) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in Path(root).rglob("*") if p.is_file()}


def test_all_algorithms_are_measured_and_nothing_is_written(sluice: Sluice) -> None:
    before = files(sluice.root)
    found = sluice.json("lab", "a", "--iter", "1")
    assert files(sluice.root) == before
    assert (found["run_id"], found["iteration"], found["policy"]) == ("a", 1, 1)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows[OWN]["settings"]["advantage_estimator"] == "gspo"
    for name, row in rows.items():
        assert 0 < row["metrics"]["effective_sample_size"] <= 1.0 + 1e-6
        assert row["metrics"]["grad_norm"] > 0
        assert row["cosines"].keys() == rows.keys()
        assert row["cosines"][name] == pytest.approx(1.0)
        for other, cosine in row["cosines"].items():
            assert cosine == pytest.approx(rows[other]["cosines"][name])


def test_the_policy_that_sampled_is_at_a_ratio_of_one(sluice: Sluice) -> None:
    found = sluice.json("lab", "a", "--iter", "0", "--policy", "-1")
    for row in found["rows"]:
        assert row["metrics"]["pg_clipfrac"] == 0.0
        assert row["metrics"]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    table = sluice("lab", "a", "--iter", "0", "--policy", "-1")
    assert "seen from the starting model" in table
    assert all(row["name"] in table for row in found["rows"])


def test_what_is_not_there_is_said(sluice: Sluice) -> None:
    said = sluice("lab", "a", "--iter", "9", code=2)
    assert "has no committed iteration 9; 0 to 1 are committed" in said
    said = sluice("lab", "a", "--iter", "1", "--policy", "9", code=2)
    assert "keeps no trainer state after iteration 9" in said


def test_a_kept_state_becomes_the_folder_of_its_checkpoint(sluice: Sluice, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = sluice.json("convert", "a", str(tmp_path / "out"), "--iter", "1")
    (checkpoint,) = Path(sluice.root).glob("runs/a/it/*1/checkpoint/**/model.safetensors")
    expected, found = load_file(checkpoint), load_file(tmp_path / "out" / "model.safetensors")
    assert done["tensors"] == len(expected) == len(found)
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
    said = sluice("convert", "a", str(tmp_path / "more"), "--iter", "7", code=2)
    assert "keeps no trainer state after 7" in said
