"""A headless Chromium for the tests of the pages; without one, or without playwright, they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


WIDTHS = {"desktop": 1280, "phone": 375}
PATIENCE = 120_000  # milliseconds that playwright waits for what must come, however busy the machine is
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In place of the check after each test: a browser keeps and starts processes as it likes. `browser` checks."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file. When it is closed, none of its processes is left."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs a Chromium: make test-browser, or apt install chromium")
    before = set(psutil.Process().children(recursive=True))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE)
        yield browser
        browser.close()
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert not psutil.wait_procs(left, timeout=30)[1]


@dataclass
class Opened:
    """A page, and what it did that it should not do.

    Attributes:
        page: playwright's.
        address: its own.
        complaints: errors and warnings of the console, exceptions, failed requests.
        requests: every address that was asked for.
    """

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """The text of the one element that is meant."""
        return self.page.locator(selector).inner_text()

    def check(self) -> None:
        """So far it has had no error and asked for nothing but itself."""
        assert self.complaints == []
        assert self.requests == [self.address]

    def until(self, condition: str) -> None:
        """Return as soon as the page is drawn and this JavaScript is true."""
        look = f"() => ({condition}) ? done() : requestAnimationFrame(look)"
        self.page.evaluate(f"new Promise((done) => {{ const look = {look}; look(); }})")


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a page from a file. At the end of the test it has had no error and asked for nothing but the file."""
    yield from opening(browser, tmp_path)


@pytest.fixture(scope="module")
def open_for_all(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens pages that the tests of a file have in common: to load one takes longer than most tests."""
    yield from opening(browser, tmp_path_factory.mktemp("pages"))


def opening(browser: Browser, folder: Path) -> Iterator[Open]:
    """What opens pages from files in `folder`. At the end they are checked and closed."""
    opened: list[Opened] = []

    def open_(html: str, width: int = WIDTHS["desktop"], scheme: str = "light") -> Opened:
        path = folder / f"page-{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(PATIENCE)
        made = Opened(page, path.as_uri())
        opened.append(made)
        page.on("console", lambda message: made.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: made.complaints.append(str(error)))
        page.on("requestfailed", lambda request: made.complaints.append(f"failed: {request.url}"))
        page.on("dialog", lambda dialog: (made.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: made.requests.append(request.url))
        page.goto(made.address)
        return made

    yield open_
    for made in opened:
        made.page.close()
        made.check()
