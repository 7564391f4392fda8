"""A local stack and a browser, both started once for all tests of Prefect's pages.

With SLUICE_SCREENSHOTS set to a folder, the tests leave there the pictures that the docs show.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect_pages import Pages
from real_runs import Sluice

from flows.commands.stack import Stack

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's program; without one, or without Playwright, the tests are skipped."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("Prefect's pages are not tested: the Python package playwright is missing")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"Prefect's pages are not tested: none of {', '.join(BROWSERS)} is on PATH")
    return found


@pytest.fixture(scope="session")
def stack(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """What `sluice up` starts, with a root of its own."""
    folder = tmp_path_factory.mktemp("ui")
    sluice = Sluice(folder / "root", folder)
    sluice("up")
    try:
        yield Stack.load(str(sluice.root))
    finally:
        sluice("down")


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    """Headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def pages(stack: Stack, browser: Any) -> Iterator[Pages]:
    """Prefect's pages in a window of their own."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    pictures = os.environ.get("SLUICE_SCREENSHOTS")
    yield Pages(context.new_page(), stack, Path(pictures) if pictures else None)
    context.close()
