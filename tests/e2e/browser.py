"""Chromium for tests, and pages that record their requests, errors and policy violations."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.e2e.processes import PATIENCE_SECONDS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
RECORD_VIOLATIONS = """
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


expect.set_options(timeout=1000 * PATIENCE_SECONDS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for the tests of a module. Each page has its own profile."""
    if CHROMIUM is None:
        pytest.skip("no chromium is on the PATH: scripts/ensure-chromium.sh installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@dataclass
class RecordedPage:
    """A page with the URLs of its requests and its errors and warnings."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)  # URLs of all requests

    def paths(self, beginning: str) -> list[str]:
        """The requested URLs whose paths begin with `beginning`."""
        return [url for url in self.requested if urlsplit(url).path.startswith(beginning)]

    def assert_clean(self, origin: str) -> None:
        """Assert that nothing was loaded from another origin, violated the page's policy or logged an error."""
        assert {url for url in self.requested if not url.startswith((f"{origin}/", "data:"))} == set()
        assert self.page.evaluate("window.violations") == []
        assert self.errors == []


@contextmanager
def recorded_page(browser: Browser, *, width: int = 1280, height: int = 800, **options: Any) -> Iterator[RecordedPage]:
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
    context.add_init_script(RECORD_VIOLATIONS)
    page = context.new_page()
    recorded = RecordedPage(page)

    def record_error(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            recorded.errors.append(message.text)

    page.on("console", record_error)
    page.on("pageerror", lambda error: recorded.errors.append(str(error)))
    page.on("request", lambda request: recorded.requested.append(request.url))
    yield recorded
    context.close()
