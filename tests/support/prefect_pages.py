"""Prefect's pages as a person uses them: its form, a run's page and its buttons."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from flows.commands.stack import Stack

LOAD_MS = 60_000
RUN_S = 240.0
PROPERTY = "ancestor::div[contains(concat(' ', @class, ' '), ' schema-form-property ')][1]"


class Pages:
    """A browser window on the Prefect of a stack."""

    def __init__(self, page: Any, stack: Stack, pictures: Path | None) -> None:
        self.page = page
        self.stack = stack
        self._pictures = pictures
        page.set_default_timeout(LOAD_MS)

    # --- what Prefect knows -----------------------------------------------------------------------

    def api(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """An answer of Prefect's API."""
        url = f"{self.stack.api_url}/{path}"
        answer = httpx.get(url, timeout=30) if body is None else httpx.post(url, json=body)
        return answer.raise_for_status().json()

    def start(self, overrides: dict[str, Any]) -> str:
        """Start a flow run of `rl-train/local`; its id."""
        deployment = self.api("deployments/name/rl-train/local")["id"]
        body = {"parameters": {"overrides": overrides}, "state": {"type": "SCHEDULED"}}
        return str(self.api(f"deployments/{deployment}/create_flow_run", body)["id"])

    def state(self, flow_run: str) -> str:
        """The type of a flow run's state."""
        return str(self.api(f"flow_runs/{flow_run}")["state"]["type"])

    def wait_for_state(self, flow_run: str, wanted: str, seconds: float = RUN_S) -> None:
        """Wait until a flow run is in a state."""
        self.wait(lambda: self.state(flow_run) == wanted, seconds, lambda: self.said(flow_run))

    def said(self, flow_run: str) -> str:
        """A flow run's state and its latest log lines."""
        query = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_DESC"}
        lines = [line["message"] for line in self.api("logs/filter", query | {"limit": 10})]
        return "\n".join([self.state(flow_run), *lines])

    def wait(
        self, what: Callable[[], bool], seconds: float, said: Callable[[], str] = lambda: ""
    ) -> None:
        """Wait until `what` is true."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain: {said()}"
            self.page.wait_for_timeout(200)

    def open_rows(self) -> list[str]:
        """Flow runs and task runs that are neither over nor still to begin."""
        kinds = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}
        return [
            f"{row['name']} {row['state_name']}"
            for kind in ("flow_runs", "task_runs")
            for row in self.api(f"{kind}/filter", {kind: {"state": kinds}})
        ]

    # --- pages ------------------------------------------------------------------------------------

    def form(self) -> None:
        """Open the page `Custom run` of `rl-train/local`, from that of the deployment."""
        deployment = self.api("deployments/name/rl-train/local")["id"]
        self.page.goto(f"{self.stack.page}/deployments/deployment/{deployment}")
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_text("Custom run").click()
        self.field("cluster", "colocate").wait_for()

    def field(self, section: str, name: str) -> Any:
        """A setting in the form: its label, help and input."""
        return self._property(self._property(self.page, section.capitalize()), name)

    def _property(self, within: Any, name: str) -> Any:
        label = f"normalize-space()='{name}' or normalize-space()='{name} (Optional)'"
        span = f".//span[contains(@class, 'schema-form-property__label')][{label}]"
        return within.locator(f"xpath={span}/{PROPERTY}").first

    def fill(self, section: str, name: str, value: str) -> None:
        """Fill in a setting."""
        self.field(section, name).locator("input, textarea").first.fill(value)

    def run(self, flow_run: str, tab: str = "Logs") -> None:
        """Open a tab of a flow run's page."""
        self.page.goto(f"{self.stack.page}/runs/flow-run/{flow_run}")
        self.tab(tab)

    def tab(self, name: str) -> None:
        """Turn to a tab of the page."""
        self.page.get_by_role("tab", name=name).or_(
            self.page.locator(".p-tab", has_text=name)
        ).first.click()

    def artifact(self, key: str) -> None:
        """Open the newest artifact of a key."""
        query = {"artifacts": {"key": {"any_": [key]}}}
        [found] = self.api("artifacts/latest/filter", query)
        self.page.goto(f"{self.stack.page}/artifacts/artifact/{found['latest_id']}")

    def sees(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.page.get_by_text(text).first.wait_for()

    def picture(self, name: str) -> None:
        """Keep what the window shows, for the docs, where pictures are asked for."""
        if self._pictures is None:
            return
        self.page.wait_for_timeout(1000)
        self._pictures.mkdir(parents=True, exist_ok=True)
        shot = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        shot.quantize(192).save(self._pictures / f"{name}.png", optimize=True)
