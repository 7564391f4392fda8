"""Faults of the surroundings: what they make a command say, and that nothing else suffers."""

import json
from pathlib import Path

import pytest
from real_runs import QUICKSTART, Sluice, short

from flows.reporting.progress import Progress
from rlcore.cluster import ray_session
from rlcore.cluster.placement import Demand, Placement
from rlcore.cluster.plan import FleetPlan
from rlcore.config import load_config
from rlcore.errors import ClusterError, PluginError, StoreError
from rlcore.opening import create_or_check, leave, open_store
from rlcore.starting_model import prepare_model
from rlcore.store.lease import Lease
from rlcore.store.objects import Objects
from rlcore.store.paths import outcome_key


def test_a_private_ray_that_starts_slowly_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    begun = 0

    def init(**options: object) -> None:
        nonlocal begun
        begun += 1
        if begun < ray_session.STARTS:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert ray_session.connect("local")
    assert begun == ray_session.STARTS

    begun = -ray_session.STARTS
    with pytest.raises(ClusterError, match="overloaded"):
        ray_session.connect("local")


async def test_gpus_that_are_not_there_are_an_error_and_no_endless_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    sets = ["cluster.device=cuda", f"storage.root={tmp_path}", "run.id=x"]
    config = load_config(short(tmp_path, iterations=1), sets)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    plan = FleetPlan(config, open_store(config), epoch=1, scratch=tmp_path)
    with pytest.raises(ClusterError, match=r"asks for 1 GPUs.* has 0"):
        await Placement.reserve(Demand.of(plan, trainer=True, engines=True), "auto")


def test_a_run_that_is_driven_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path, root = short(tmp_path, iterations=1), tmp_path / "root"
    config = load_config(path, [f"storage.root={root}", "run.id=driven"])
    store = open_store(config)
    create_or_check(store, config, {})
    Lease.acquire(store.objects, "driven", "elsewhere:7:7")
    said = Sluice(root, cwd=tmp_path)("train", str(path), "--run-id", "driven", code=1)
    assert said.startswith("error: run driven is held by elsewhere:7:7")
    assert sorted(p.name for p in root.iterdir()) == ["runs"]


def test_the_commands_that_are_printed_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["storage.root=/a b/c", "run.id=x"]
    Progress(load_config(QUICKSTART, sets), 0.0, quiet=True).interrupted()
    assert "sluice resume x --root '/a b/c'" in capsys.readouterr().err


def test_a_full_disk_does_not_hide_why_a_run_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(QUICKSTART, [f"storage.root={tmp_path}", "run.id=x"])
    store = open_store(config)
    lease = Lease.acquire(store.objects, "x")

    def full(key: str, data: bytes) -> None:
        raise StoreError("No space left on device")

    monkeypatch.setattr(store.objects, "put", full)
    leave(store, config, lease, "failed", "the reason")
    assert "No space left" in caplog.text


def test_one_torn_record_hides_no_other_run(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("torn", "whole"):
        sets = [f"storage.root={root}", f"run.id={name}"]
        config = load_config(short(tmp_path, iterations=1), sets)
        create_or_check(open_store(config), config, {})
    record = root / "runs" / "torn" / "run.json"
    record.write_bytes(record.read_bytes()[:100])

    torn, whole = json.loads(Sluice(root, cwd=tmp_path)("runs", "--json"))
    assert torn["status"] == "damaged"
    assert "run.json is torn" in torn["message"]
    assert (whole["run_id"], whole["status"]) == ("whole", "new")


def test_a_model_builder_that_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("def build(folder, seed):\n    raise KeyError('width')\n")
    sets = [f"model.build={tmp_path}/models.py:build"]
    model = load_config(short(tmp_path, iterations=1), sets).model
    objects = Objects.open(tmp_path / "root")
    with pytest.raises(PluginError, match=r"model\.build = .*raised KeyError: 'width'"):
        prepare_model(objects, "x", model, 0, tmp_path / "scratch")


def test_a_fenced_driver_does_not_speak_for_the_one_that_took_over(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"storage.root={tmp_path}", "run.id=x"])
    store = open_store(config)
    old = Lease.acquire(store.objects, "x", "old:1:1")
    new = Lease.acquire(store.objects, "x", "new:1:1", steal=True)
    leave(store, config, new, "interrupted", "by the new one")
    leave(store, config, old, "completed", "")
    noted = json.loads(store.objects.get(outcome_key("x")))
    assert (noted["status"], noted["epoch"]) == ("interrupted", 2)
