"""The reference names everything that users can import, once; pages, pictures and packages are complete; and the site
builds without a warning, has every page and name, and its pages take nothing from elsewhere.
"""

import inspect
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_tools import PAGES, REFERENCE, ROOT, named

import stallfree as sf

SOURCE = ROOT / "src" / "stallfree"
TAGS = r"link(?! rel=\"canonical)|script|img|iframe|source|object"
TAKEN = rf"<(?:{TAGS})\b[^>]*? (?:href|src|data)=\"?((?:https?:)?//[^\" >]*)"
"""What a page asks for elsewhere when it is opened."""


def test_every_public_name_is_documented_once() -> None:
    modules = {name for name in sf.__all__ if inspect.ismodule(getattr(sf, name))}
    inner = {f"{name}.{member}" for name in modules for member in getattr(sf, name).__all__ if member not in sf.__all__}
    assert set(Counter(REFERENCE).values()) == {1}
    assert {name for name in REFERENCE if "." not in name} == set(sf.__all__) - modules
    assert inner <= set(REFERENCE)
    for page in PAGES:  # mkdocstrings leaves out silently what does not exist
        entries = r"^::: stallfree\.(\S+)\n    options:\n      members: \[(.*)\]"
        for name, members in re.findall(entries, page.read_text(), re.MULTILINE):
            for member in members.split(", "):
                assert hasattr(named(name), member) or member == "make_cache", f"{page.name}: {name}.{member}"


def test_pages_pictures_and_files_are_complete() -> None:
    """Every page is in the navigation, every picture on a page and drawn by the script, every file that is named."""
    settings = (ROOT / "mkdocs.yml").read_text()
    shown = "\n".join(page.read_text() for page in PAGES) + settings
    for page in PAGES:
        others = page.parent.name in ("errors", "results") and page.stem != "index"  # which pages there link
        if page.parent != ROOT and not others:
            assert page.relative_to(ROOT / "docs").as_posix() in settings
    for name in re.findall(r"`((?:examples|benchmarks|docs)/[\w./-]+\.\w+)`", shown):
        assert (ROOT / name).is_file(), name
    folder = ROOT / "docs" / "pictures"
    drawn = dict(runpy.run_path(str(folder / "draw.py"))["pictures"]())
    assert {path.name for path in folder.glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        assert (folder / name).read_text() == text, f"{name}: run python docs/pictures/draw.py"
        assert f"pictures/{name}" in shown


def test_each_package_is_small_and_its_page_has_a_line_for_each_file() -> None:
    for folder in {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}:
        files = {path.name for path in folder.glob("*.py")}
        assert len(files) <= 16, folder
        page = folder / "README.md"
        if page.exists() or len(files) > 5:
            listed = re.findall(r"^\| `(\w+\.py)` \|", page.read_text(), re.MULTILINE)
            assert sorted(listed) == sorted(files - {"__init__.py"}), folder


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
            assert (tmp_path / (name.parent if name.name == "index" else name) / "index.html").is_file(), name
    text = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert re.findall(TAKEN, text) == []
    names = {f"stallfree.{name}" for name in sf.__all__ if not hasattr(getattr(sf, name), "__path__")}
    assert names <= set(re.findall(r' id="(stallfree\.\w+)"', text))
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text()), sheet
