"""The reference names everything that users can import, once; the pictures are those that the script draws."""

from __future__ import annotations

import functools
import inspect
import re
import runpy
from collections import Counter
from typing import Any

import pytest
from doc_pages import PAGES, ROOT

import stallfree as sf

_MODULES = {
    "clara": "docs/reference/clara.md",
    "testing": "docs/reference/testing.md",
    "vision": "docs/reference/vision.md",
}
"""Public names that are modules, and the pages that describe them."""


def documented() -> Counter[str]:
    """How often each name is taken into the reference."""
    texts = [page.read_text() for page in PAGES if page.parent.name == "reference"]
    return Counter(re.findall(r"^::: stallfree\.(\S+)$", "\n".join(texts), re.MULTILINE))


def test_every_public_name_is_documented_once() -> None:
    found = documented()
    assert {name for name in found if "." not in name} == set(sf.__all__) - set(_MODULES)
    assert set(found.values()) == {1}


def test_modules_have_a_page_of_their_own() -> None:
    assert {name for name in sf.__all__ if hasattr(getattr(sf, name), "__path__")} == set(_MODULES)
    for name, page in _MODULES.items():
        text = (ROOT / page).read_text()
        for member in getattr(sf, name).__all__:
            if member not in sf.__all__:
                assert f"::: stallfree.{name}.{member}\n" in text


def test_members_that_a_page_lists_exist() -> None:
    """mkdocstrings leaves out silently what does not exist."""
    for page in PAGES:
        for name, members in re.findall(
            r"^::: stallfree\.(\S+)\n    options:\n      members: \[(.*)\]", page.read_text(), re.M
        ):
            for member in members.split(", "):
                assert hasattr(_named(name), member) or member == "make_cache", f"{page.name}: {name}.{member}"


@pytest.mark.parametrize("name", sorted(name for name in documented() if not name.startswith("integrations.")))
def test_arguments_that_are_described_exist(name: str) -> None:
    described = _described(inspect.getdoc(_named(name)) or "")
    assert not described or described <= set(inspect.signature(_named(name)).parameters)


def _named(name: str) -> Any:
    """The public object behind a dotted name."""
    return functools.reduce(getattr, name.split("."), sf)


def _described(text: str) -> set[str]:
    """The names in the section `Args` of a docstring; one line may describe several."""
    section = re.search(r"^Args:\n((?:(?: .*)?\n)+)", text + "\n", re.MULTILINE)
    found = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*):", section[1] if section else "", re.MULTILINE)
    return {word.strip() for words in found for word in words.split(",")}


def test_pictures_are_drawn_by_the_script() -> None:
    folder = ROOT / "docs" / "pictures"
    drawn = dict(runpy.run_path(str(folder / "draw.py"))["pictures"]())
    assert {path.name for path in folder.glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        assert (folder / name).read_text() == text, f"{name}: run python docs/pictures/draw.py"


def test_every_page_is_in_the_navigation() -> None:
    """And every picture on some page."""
    settings = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        others = page.parent.name in ("errors", "results") and page.stem != "index"  # which pages there link
        if page.parent != ROOT and not others:
            assert page.relative_to(ROOT / "docs").as_posix() in settings
    shown = "\n".join(page.read_text() for page in PAGES) + settings
    for picture in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert f"pictures/{picture.name}" in shown


def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:examples|benchmarks|docs)/[\w./-]+\.\w+)`", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_every_extra_is_on_the_first_page() -> None:
    declared = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", declared, re.MULTILINE)) - {"test", "browser", "docs", "check"}
    named = (ROOT / "docs" / "index.md").read_text().split("| extra |")[1].split("\n\n")[0]
    assert extras == set(re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|\n", "|\n", named)))
