"""The site builds without a warning, and its pages take nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT

import stallfree as sf

pytestmark = pytest.mark.slow

_TAKES = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Tags with which a page asks for something, and the attribute that says what."""


class Taken(HTMLParser):
    """What a page asks for when it is opened, and the names that can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag in _TAKES and _TAKES[tag] in given and given.get("rel") != "canonical":
            self.addresses.append(given[_TAKES[tag]])
        self.addresses += re.findall(r"url\(([^)]*)\)", given.get("style", ""))


def build_site(folder: Path) -> str:
    """Build the site into `folder`, warnings being errors, and return what was printed. Skips without mkdocs."""
    if not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))):
        pytest.skip("needs mkdocs-material and mkdocstrings: pip install 'stallfree[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert "WARNING" not in build_site(folder)
    return folder


def test_no_page_takes_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        for address in Taken(page.read_text()).addresses:
            assert not re.match(r"(https?:)?//", address.strip("'\"")), f"{page.relative_to(site)}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text()), sheet


def test_every_page_of_the_folder_is_a_page_of_the_site(site: Path) -> None:
    for page in PAGES:
        if page.parent != ROOT:
            name = page.relative_to(ROOT / "docs").with_suffix("")
            made = site / (name.parent if name.name == "index" else name) / "index.html"
            assert made.is_file(), made


def test_every_public_name_can_be_linked_to(site: Path) -> None:
    """Its description has been found in the code, and is not empty."""
    ids = {id for page in (site / "reference").rglob("*.html") for id in Taken(page.read_text()).ids}
    names = {f"stallfree.{name}" for name in sf.__all__ if not hasattr(getattr(sf, name), "__path__")}
    assert names <= ids
