"""The site builds without a warning, has every page and name, and its pages take nothing from elsewhere."""

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

TAKES = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Taken(HTMLParser):
    """What a page asks for when it is opened, and the names that can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if TAKES.get(tag) in values and values.get("rel") != "canonical":
            self.addresses.append(values[TAKES[tag]])
        self.addresses += re.findall(r"url\(([^)]*)\)", values.get("style", ""))


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    if not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))):
        pytest.skip("needs mkdocs-material and mkdocstrings: pip install 'stallfree[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    for page in PAGES:
        if page.parent != ROOT:
            name = page.relative_to(ROOT / "docs").with_suffix("")
            made = tmp_path / (name.parent if name.name == "index" else name) / "index.html"
            assert made.is_file(), made
    ids: set[str] = set()
    for page in tmp_path.rglob("*.html"):
        taken = Taken(page.read_text())
        ids |= taken.ids
        for address in taken.addresses:
            assert not re.match(r"(https?:)?//", address.strip("'\"")), f"{page.relative_to(tmp_path)}: {address}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text()), sheet
    assert {f"stallfree.{name}" for name in sf.__all__ if not hasattr(getattr(sf, name), "__path__")} <= ids
