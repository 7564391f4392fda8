"""The private Prefect server lives wherever a run's root may be."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest

from flows.operation.server import PrefectServer

WRITERS, RUNS = 12, 8


@pytest.mark.parametrize("name", ["100% sure", "why? #1 & it's", "säge"])
def test_a_server_starts_below_a_folder_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / name / "prefect"
    server = PrefectServer(home)
    try:
        server.wait()
    finally:
        server.end()
        server.gone()
    assert (home / "prefect.db").stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_requests_that_write_at_once_are_all_answered(tmp_path: Path) -> None:
    """Plain Prefect answers some of these 503, for which its client sleeps two seconds and more."""
    server = PrefectServer(tmp_path / "prefect")
    try:
        server.wait()
        seen = asyncio.run(write_at_once(server.api_url))
    finally:
        server.end()
        server.gone()
    assert Counter(seen) == {201: 2 * RUNS * WRITERS}


async def write_at_once(url: str) -> list[int]:
    """Status codes of writers that each make runs of a task in a flow run of their own."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        flow = (await client.post("/flows/", json={"name": "writers"})).json()["id"]

        async def writer(number: int) -> list[int]:
            made = await client.post("/flow_runs/", json={"flow_id": flow})
            seen = []
            for k in range(RUNS):
                task = {
                    "flow_run_id": made.json()["id"],
                    "task_key": f"task-{number}",
                    "dynamic_key": str(k),
                    "state": {"type": "RUNNING"},
                }
                answer = await client.post("/task_runs/", json=task)
                seen.append(answer.status_code)
                change = {"state": {"type": "COMPLETED"}}
                address = f"/flow_runs/{made.json()['id']}/set_state"
                seen.append((await client.post(address, json=change)).status_code)
            return seen

        found = await asyncio.gather(*(writer(number) for number in range(WRITERS)))
    return [status for one in found for status in one]
