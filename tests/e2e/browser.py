"""The Chromium of the machine, and what a page does in it that nobody sees."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

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
TELL_OF_VIOLATIONS = """
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


expect.set_options(timeout=1000 * PATIENCE_SECONDS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """One for the tests of a module; each page is in a profile of its own."""
    if CHROMIUM is None:
        pytest.skip("no chromium is on the PATH: scripts/ensure-chromium.sh installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and what it has complained of or asked others for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # URLs, of every request

    def paths(self, beginning: str) -> list[str]:
        """Of the requests, those whose paths begin so."""
        return [url for url in self.asked if urlsplit(url).path.startswith(beginning)]

    def is_well(self, origin: str) -> None:
        """Nothing was loaded from elsewhere, forbidden by the page's policy, or complained of."""
        assert {url for url in self.asked if not url.startswith((f"{origin}/", "data:"))} == set()
        assert self.page.evaluate("window.violations") == []
        assert self.complaints == []


@contextmanager
def watched_page(browser: Browser, *, width: int = 1280, height: int = 800, **options: Any) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
    context.add_init_script(TELL_OF_VIOLATIONS)
    page = context.new_page()
    watched = Watched(page)
    page.on("console", lambda said: watched.complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    page.on("request", lambda request: watched.asked.append(request.url))
    yield watched
    context.close()
