"""A run whose root is an S3 bucket: it resumes from what is there."""

from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for
from s3_servers import KEY, SECRET, seaweed_server

from rlcore.store.objects import Objects


@pytest.mark.slow
def test_a_run_on_s3_survives_a_kill(tmp_path: Path) -> None:
    (tmp_path / "weed").mkdir()
    with seaweed_server(tmp_path / "weed") as server:
        env = {
            "FSSPEC_S3_KEY": KEY,
            "FSSPEC_S3_SECRET": SECRET,
            "FSSPEC_S3_ENDPOINT_URL": server.endpoint,
            "HOME": str(tmp_path / "home"),
        }
        sluice = Sluice("s3://runs/sluice", cwd=tmp_path, env=env)
        config = short(tmp_path, iterations=4, more="state_interval = 2")
        process = sluice.start("train", str(config), "--run-id", "far")
        objects = Objects.open("s3://runs/sluice", server.options)
        wait_for(lambda: objects.exists("runs/far/it/000001/_COMMITTED.json"))
        kill_tree(process.pid)
        process.wait(10)
        assert "4 iterations committed" in sluice("resume", "far")
        assert sluice.json("verify", "far")["ok"]
        assert sluice.json("show", "far")["status"] == "completed"
