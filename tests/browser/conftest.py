"""A headless Chromium for the tests of the pages; without one, or without playwright, they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


PATIENCE = 120_000  # milliseconds that playwright waits for what must come, however busy the machine is
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


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
    """A page of playwright, its address, and what it did that it should not do: errors, warnings, and requests."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """The text of the one element that is meant."""
        return self.page.locator(selector).inner_text()

    def box(self, selector: str) -> Any:
        """The box of the one element that is meant: x, y, width, height."""
        box = self.page.locator(selector).bounding_box()
        assert box is not None
        return box

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
    """Opens pages from files. At the end of the test they have had no error and asked for nothing but the file."""
    opened: list[Opened] = []

    def open_(html: str, width: int = 1280, scheme: str = "light") -> Opened:
        path = tmp_path / f"page-{len(opened)}.html"
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
