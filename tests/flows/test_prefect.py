"""What Prefect shows of a run: flows, tasks, names, states and artifacts, asked through its API.

With the server on SQLite and, where there is one, on PostgreSQL: whole runs on that are slow tests.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running
from prefect_servers import KINDS, prefect_server
from real_runs import Sluice, short, wait_for

from flows.operation.leftovers import root_tag, take_over
from rlcore.config import load_config

TASKS = ["rollout", "reward", "filter", "train", "weight_sync", "evaluate", "checkpoint"]


BOTH = pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that the tests share: each asks for what it made itself."""
    with prefect_server("sqlite", tmp_path_factory.mktemp("prefect")) as api_url:
        yield api_url


@contextmanager
def server(kind: str, on_sqlite: str, tmp_path: Path) -> Iterator[str]:
    """The shared server, or one of another kind."""
    if kind == "sqlite":
        yield on_sqlite
        return
    with prefect_server(kind, tmp_path / "prefect") as api_url:
        yield api_url


@BOTH
def test_prefect_shows_every_iteration_and_stage(kind: str, on_sqlite: str, tmp_path: Path) -> None:
    with server(kind, on_sqlite, tmp_path) as api_url:
        sluice = Sluice(tmp_path / "root", tmp_path, env={"PREFECT_API_URL": api_url})
        printed = sluice("train", str(short(tmp_path, iterations=3)), "--run-id", "seen")
        assert api_url.removesuffix("/api") in printed
        assert "for as long as this command runs" not in printed

        runs = [r for r in rows(api_url, "flow_runs") if is_of(r, "seen")]
        assert {r["state_type"] for r in runs} == {"COMPLETED"}
        assert [r["name"] for r in runs if r["name"].startswith("train-")] == ["train-seen"]
        iterations = sorted(r["name"] for r in runs if not r["name"].startswith("train-"))
        assert iterations == [f"seen-it{i:06d}" for i in range(3)]

        flows = {r["id"] for r in runs}
        tasks = [t for t in rows(api_url, "task_runs") if t["flow_run_id"] in flows]
        stages = [t for t in tasks if not t["name"].startswith("rl-iteration")]
        assert {t["state_type"] for t in stages} == {"COMPLETED"}
        expected = [f"{task}-it{i:06d}" for i in range(3) for task in TASKS[: 5 if i < 2 else 7]]
        assert sorted(t["name"] for t in stages) == sorted(expected)
        policy = {t["name"].split("-it")[0]: t["empirical_policy"]["retries"] for t in stages}
        assert policy == dict.fromkeys(TASKS, 2) | {"train": 0, "weight_sync": 0}

        names = {t["id"]: t["name"] for t in stages}
        told = [(names.get(line["task_run_id"], ""), line["message"]) for line in logs(api_url)]
        for task, who in (("rollout", "rollout worker"), ("train", "trainer rank 0")):
            lines = [text for name, text in told if name == f"{task}-it000001"]
            assert any(text.startswith(f"{who}: iteration 1: ") for text in lines), told

        keys = {a["key"] for a in rows(api_url, "artifacts") if a["flow_run_id"] in flows}
        assert keys == {"seen-progress", "seen-metrics", "seen-reward", "seen-summary"}


@BOTH
def test_a_run_starts_from_a_plain_dict_as_prefects_form_sends_it(
    kind: str, on_sqlite: str, tmp_path: Path
) -> None:
    with server(kind, on_sqlite, tmp_path) as api_url:
        config = load_config(short(tmp_path, iterations=1)).model_dump(mode="json")
        config["run"].pop("id")
        config["storage"] = {"root": "here"}
        script = (
            f"import asyncio, flows.train; asyncio.run(flows.train.rl_train(config={config!r}))"
        )
        env = os.environ | {"PREFECT_API_URL": api_url}
        subprocess.run([sys.executable, "-c", script], env=env, cwd=tmp_path, check=True)
        [run] = [r for r in rows(api_url, "flow_runs") if r["name"] == f"train-{r['id']}"]
        assert run["state_type"] == "COMPLETED"
        [stored] = Sluice(tmp_path / "here", tmp_path).json("runs")
        assert (stored["run_id"], stored["status"]) == (f"run-{run['id']}", "completed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_closes_what_killed_ones_left_in_its_own_root_alone(
    kind: str, on_sqlite: str, tmp_path: Path
) -> None:
    here = load_config(short(tmp_path, iterations=1))
    here = here.model_copy(update={"run": here.run.model_copy(update={"id": "x"})})
    there = here.model_copy(
        update={"storage": here.storage.model_copy(update={"root": "s3://elsewhere/runs"})}
    )

    async def take_over_one_of_many() -> dict[str, str]:
        def rl() -> None: ...

        async with get_client() as client:
            made = {}
            for name, run, root in (
                ("mine", "train-x", here),
                ("left here", "train-x", here),
                ("iteration left here", "x-it000003", here),
                ("alive there", "train-x", there),
                ("iteration there", "x-it000003", there),
                ("another run", "train-x2", here),
            ):
                made[name] = await client.create_flow_run(
                    flow(rl), name=run, tags=[root_tag(root)], state=Running()
                )
            await client.update_flow_run(made["mine"].id, tags=["own"])
            await take_over(client, here, made["mine"].id)
            seen = {name: await client.read_flow_run(one.id) for name, one in made.items()}
            assert set(seen["mine"].tags) == {"own", root_tag(here)}
            return {name: str(one.state and one.state.name) for name, one in seen.items()}

    with (
        server(kind, on_sqlite, tmp_path) as api_url,
        temporary_settings({PREFECT_API_URL: api_url}),
    ):
        assert asyncio.run(take_over_one_of_many()) == {
            "mine": "Running",
            "left here": "Superseded",
            "iteration left here": "Superseded",
            "alive there": "Running",
            "iteration there": "Running",
            "another run": "Running",
        }


def is_of(run: dict[str, Any], run_id: str) -> bool:
    """Whether a flow run is that run or an iteration of it."""
    return run["name"] == f"train-{run_id}" or run["name"].startswith(f"{run_id}-it")


def logs(api_url: str) -> list[dict[str, Any]]:
    """All lines that the server has, once those of the last stage are there: they go in batches."""

    def found() -> list[dict[str, Any]]:
        return [line for page in range(5) for line in rows(api_url, "logs", offset=200 * page)]

    wait_for(lambda: any("iteration 2: " in line["message"] for line in found()), seconds=30)
    return found()


def rows(api_url: str, kind: str, offset: int = 0) -> list[dict[str, Any]]:
    """All objects of a kind that the server knows."""
    answer = httpx.post(
        f"{api_url}/{kind}/filter", json={"limit": 200, "offset": offset}, timeout=30
    )
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()
    return found
