"""A real headless Chromium. Where it or playwright is absent, the tests skip, and the end of the run says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_DRAWN_MS = 60_000.0


@dataclass
class Opened:
    """A page that is drawn, with everything that it asked for and complained about."""

    tab: Any
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def drawn_ms(self) -> float:
        return float(self.tab.evaluate("document.documentElement.dataset.drawn"))

    def text(self, selector: str) -> str:
        return str(self.tab.locator(selector).first.text_content())

    def visible(self, selector: str) -> int:
        """Number of matching elements that take up space."""
        return int(
            self.tab.evaluate(
                "s => [...document.querySelectorAll(s)].filter(e => e.getClientRects().length).length", selector
            )
        )


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("no browser: chromium is not installed; tests/observe/page/install_chromium.sh installs it")
    playwright = pytest.importorskip("playwright.sync_api", reason="no browser: playwright is not installed")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a file in a new tab and waits until it is drawn."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})

    def opened(file: Path) -> Opened:
        page = Opened(context.new_page())
        page.tab.on("request", lambda request: page.requests.append(request.url))
        page.tab.on("console", lambda message: page.problems.append(f"{message.type}: {message.text}"))
        page.tab.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
        page.tab.on("dialog", lambda dialog: (page.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.tab.goto(file.as_uri())
        page.tab.wait_for_selector("html[data-drawn]", timeout=_DRAWN_MS)
        return page

    yield opened
    context.close()
