"""The documentation as a site in a real browser: no error, nothing asked from elsewhere, and one finds one's way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[1] / "docs"))  # doc_site

from doc_site import build_site, served

from conftest import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The site, and the addresses of its pages in it."""
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    found = [path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html")]
    return [str(folder), *sorted("" if name == "." else f"{name}/" for name in found)]


@pytest.fixture(scope="module")
def site(pages: list[str]) -> Iterator[str]:
    """The address of its first page."""
    with served(Path(pages[0])) as address:
        yield address


@dataclass
class Visit:
    """A page in the browser, and what it did that it should not do.

    Attributes:
        page: playwright's.
        complaints: errors and warnings of the console, exceptions, requests that failed or went elsewhere.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)

    def heading(self) -> str:
        """The title on the page, without the sign that links to it."""
        return self.page.locator("article h1").inner_text().removesuffix("¶").strip()

    def scheme(self) -> str | None:
        """The colours that the reader has chosen."""
        return self.page.locator("body").get_attribute("data-md-color-scheme")


def _failed(request: Request) -> bool:
    """Whether it failed; what a page still asks for when the next one is opened is given up."""
    return request.failure != "net::ERR_ABORTED"


@pytest.fixture
def visit(browser: Browser, site: str) -> Iterator[Callable[..., Visit]]:
    """Opens a page of the site. At the end of the test it has had no error and asked for nothing from elsewhere."""
    visits: list[Visit] = []

    def open_(name: str = "", scheme: str = "light", width: int = 1280) -> Visit:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(PATIENCE)
        made = Visit(page)
        visits.append(made)
        said = made.complaints.append
        page.on("console", lambda message: said(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said(str(error)))
        page.on("requestfailed", lambda request: said(f"failed: {request.url}") if _failed(request) else None)
        page.on("request", lambda request: None if request.url.startswith((site, "data:")) else said(request.url))
        page.on("response", lambda answer: said(f"{answer.status}: {answer.url}") if answer.status >= 400 else None)
        page.goto(site + name)
        return made

    yield open_
    for made in visits:
        made.page.close()
        assert made.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_loads_by_itself(pages: list[str], site: str, visit: Callable[..., Visit], scheme: str) -> None:
    opened = visit(scheme=scheme)
    for name in pages[1:]:
        opened.page.goto(site + name)
        assert opened.heading()
        assert opened.scheme() == {"light": "default", "dark": "slate"}[scheme]
        broken = (
            "[...document.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src)"
        )
        assert opened.page.evaluate(broken) == []


def test_one_finds_the_way_by_the_navigation(visit: Callable[..., Visit]) -> None:
    opened = visit()
    opened.page.locator(".md-tabs").get_by_text("How to", exact=True).click()
    assert opened.heading() == "Find a stall"
    opened.page.locator(".md-sidebar--primary").get_by_role("link", name="Choose a cache").click()
    assert opened.heading() == "Choose a cache"
    opened.page.locator(".md-sidebar--secondary").get_by_role("link", name="Who goes").click()
    assert opened.page.url.endswith("/howto/cache/#who-goes")


@pytest.mark.parametrize("name", ["", "compare/", "reference/loader/", "benchmarks/"])
def test_a_page_is_no_wider_than_a_phone(visit: Callable[..., Visit], name: str) -> None:
    """What is wide, such as tables and code, scrolls by itself."""
    opened = visit(name, width=375)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 375
