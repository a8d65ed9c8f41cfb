"""The live page in a real browser: Debian's chromium, by playwright. Without either the tests are skipped, loudly."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "observe"))  # the synthetic run

WAIT_MS = 60_000
"""No wait in these tests is longer; nothing is asserted about how long things take."""


@pytest.fixture(scope="module")  # no longer: its loop runs in this process, and asyncio.run of other tests would not
def chromium() -> Iterator[Any]:
    path = os.environ.get("ATOLL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        path = None
    if path is None:
        warnings.warn("the live page was NOT tested: chromium or playwright is missing", stacklevel=1)
        pytest.skip("needs chromium (apt-get install chromium) and playwright")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=WAIT_MS
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address. At the end of the test no error may have been logged in the browser."""
    contexts, errors = [], []

    def opened(address: str, **settings: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1400, "height": 1000}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
        page.on(
            "console",
            lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None,
        )
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Serves a page on a thread of this process, until the end of the test."""
    from atoll.page import PageOptions, serve_page

    pages = []

    def served(target: object, **options: Any) -> Any:
        page = serve_page(str(target), PageOptions(**options))
        page.start()
        pages.append(page)
        return page

    yield served
    for page in pages:
        page.stop()
