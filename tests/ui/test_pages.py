"""A run as people start, watch, retry and cancel it in Prefect's pages."""

import time
from pathlib import Path

import psutil
import pytest
from prefect_pages import Pages

pytestmark = [pytest.mark.ui, pytest.mark.timeout(420)]

SMALL = {
    "train.global_batch_size": 64,
    "rollout.rollout_batch_size": 8,
    "rollout.n_samples_per_prompt": 8,
    "eval.eval_interval": 2,
    "checkpoint.save_interval": 2,
}
REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def reward(args, sample, **kwargs):
    if (HERE / "broken").exists():
        raise RuntimeError("the answer key is not there")
    if (HERE / "slow").exists():
        time.sleep(0.1)
    return float(sample.response.strip() == str(sample.label))
"""


def test_a_run_is_started_from_the_form_and_watched(pages: Pages) -> None:
    pages.form()
    field = pages.field("train", "num_iterations")
    assert "Iterations of the run." in field.inner_text()
    assert field.locator("input").input_value() == "200"
    engine = pages.field("rollout", "engine").inner_text()
    assert "embedded" in engine and "needs a GPU" in engine
    pages.picture("form")
    pages.fill("run", "id", "first")
    pages.fill("train", "num_iterations", "20")
    for name, value in SMALL.items():
        pages.fill(*name.split("."), str(value))
    field.scroll_into_view_if_needed()
    pages.picture("form-train")
    pages.page.get_by_role("button", name="Submit").click()
    pages.wait(lambda: bool(named(pages, "train-first")), 120)
    [flow_run] = named(pages, "train-first")
    pages.wait(lambda: bool(named(pages, "first-it000002")), 120, lambda: pages.said(flow_run))

    pages.run(flow_run, "Subflow Runs")
    pages.sees("first-it000001")
    pages.picture("run-running")
    pages.wait_for_state(flow_run, "COMPLETED")
    pages.run(flow_run, "Artifacts")
    for kind in ("progress", "metrics", "reward", "summary"):
        pages.sees(f"first-{kind}")
    pages.picture("run-artifacts")

    pages.artifact("first-progress")
    pages.sees("100%")
    pages.artifact("first-metrics")
    pages.sees("tokens/s")
    pages.picture("metrics")
    pages.artifact("first-reward")
    picture = pages.page.get_by_alt_text("reward by iteration")
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 500
    pages.picture("reward")
    pages.artifact("first-summary")
    pages.sees("Samples of iteration 19")
    pages.picture("summary")
    link = pages.page.get_by_role("link", name="flow run", exact=True).get_attribute("href")
    pages.page.goto(link)
    pages.tab("Subflow Runs")
    pages.sees("first-it000019")

    [iteration] = named(pages, "first-it000003")
    pages.run(iteration)
    pages.sees("trainer rank 0: iteration 3")
    pages.picture("iteration")


def test_retry_goes_on_with_a_run_that_failed(pages: Pages, tmp_path: Path) -> None:
    scorer = tmp_path / "reward.py"
    scorer.write_text(REWARD)
    (tmp_path / "slow").touch()
    more = {"run.id": "mended", "train.num_iterations": 4}
    flow_run = pages.start(SMALL | more | {"reward.custom_rm_path": f"{scorer}:reward"})
    committed = Path(pages.stack.root) / "runs" / "mended" / "it" / "000000" / "_COMMITTED.json"
    pages.wait(committed.exists, 120, lambda: pages.said(flow_run))
    (tmp_path / "broken").touch()
    pages.wait_for_state(flow_run, "FAILED")
    first = committed.read_bytes()

    pages.artifact("mended-failure")
    pages.sees("the answer key is not there")
    pages.sees("Iteration 0 is committed")
    pages.picture("failure")
    (tmp_path / "broken").unlink()
    (tmp_path / "slow").unlink()
    pages.run(flow_run)
    retry = pages.page.get_by_role("button", name="Retry")
    retry.wait_for()
    pages.picture("retry")
    retry.click()
    pages.page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    pages.wait_for_state(flow_run, "COMPLETED")
    assert committed.read_bytes() == first
    assert not pages.open_rows()
    pages.artifact("mended-failure")
    pages.sees("mended goes on")


def test_cancel_stops_a_run_and_leaves_nothing(pages: Pages, tmp_path: Path) -> None:
    scorer = tmp_path / "reward.py"
    scorer.write_text(REWARD)
    (tmp_path / "slow").touch()
    before = processes(pages)
    more = {"run.id": "stopped", "train.num_iterations": 50}
    flow_run = pages.start(SMALL | more | {"reward.custom_rm_path": f"{scorer}:reward"})
    committed = Path(pages.stack.root) / "runs" / "stopped" / "it" / "000000" / "_COMMITTED.json"
    pages.wait(committed.exists, 120, lambda: pages.said(flow_run))

    pages.run(flow_run)
    pages.page.get_by_role("button", name="Cancel", exact=True).click()
    dialog = pages.page.get_by_role("dialog")
    confirm = dialog.get_by_role("button", name="Confirm")
    confirm.wait_for()
    pages.picture("cancel")
    confirm.click()
    asked = time.monotonic()
    pages.wait_for_state(flow_run, "CANCELLED", 60)
    took = time.monotonic() - asked
    pages.sees("Cancelled")
    pages.wait(lambda: processes(pages) <= before, 30, lambda: str(processes(pages) - before))
    assert not pages.open_rows()
    assert took < 10


def named(pages: Pages, name: str) -> list[str]:
    """Ids of the flow runs of a name."""
    query = {"flow_runs": {"name": {"any_": [name]}}}
    return [row["id"] for row in pages.api("flow_runs/filter", query)]


def processes(pages: Pages) -> set[str]:
    """What runs below the stack's worker and Ray and is not idle: flow runs, actors, engines."""
    found = set()
    for name in ("worker", "ray"):
        for process in psutil.Process(pages.stack.processes[name].pid).children(recursive=True):
            try:
                words = " ".join(process.cmdline()).strip()
            except psutil.Error:
                continue
            if words and not words.startswith("ray::IDLE"):
                found.add(f"{process.pid} {words[:80]}")
    return found
