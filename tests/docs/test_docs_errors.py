"""Every error has a page, every page an error, and the link of a message leads to its page."""

import ast
import re
import runpy
from functools import partial
from typing import Any

import pytest
from doc_tools import ROOT

from stallfree import errors
from stallfree.errors import DOCUMENTATION, StallfreeError

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "errors_table.py"))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "errors").glob("*-*.md")}


def made() -> set[tuple[str, str]]:
    """(page, class) of each call in the source that makes an error."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src" / "stallfree").rglob("*.py")]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = set()
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        given = {keyword.arg: keyword.value for keyword in call.keywords}.get("page")
        if name in classes and classes[name].bases and not hasattr(errors, name):  # one of another module
            pages = [part.value for part in classes[name].body if ast.unparse(part).startswith("page = ")]  # type: ignore[attr-defined]
            given, name = (pages or [given])[0], ast.unparse(classes[name].bases[0])
        kind = getattr(errors, name, None)
        if isinstance(kind, partial):
            found.add((kind.keywords["page"], kind.func.__name__))
        elif isinstance(kind, type) and issubclass(kind, StallfreeError) and not isinstance(given, ast.Attribute):
            page = kind.page if given is None else ast.literal_eval(given)
            found.add((page, kind.__name__))
    return found - {("", name) for _, name in found}


MADE = made()


def test_every_error_has_a_page_and_every_page_an_error() -> None:
    assert {page for page, _ in MADE} == set(PAGES)
    for file in ("mkdocs.yml", "pyproject.toml"):
        address = re.search(r'^(?:site_url:|Documentation =) "?([^"\n]+)', (ROOT / file).read_text(), re.MULTILINE)
        assert address is not None
        assert address[1] == DOCUMENTATION
    named = [name for names in SCRIPT["TOPICS"].values() for name in names.split()]
    assert sorted(named) == sorted(PAGES)
    assert SCRIPT["INDEX"].read_text(encoding="utf-8") == SCRIPT["index"](), "run: python docs/errors_table.py"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_has_a_message_its_causes_its_cures_and_its_classes(name: str) -> None:
    found = re.fullmatch(
        rf"# {name}\n\n[^#]+?\n\n```text\n.+?\n```\n\n## Usual causes\n\n- .+\n\n"
        r"## What to do\n\n- .+\n\nClass: (?P<classes>[^\n]+)\. \[All messages\]\(index\.md\)\n",
        PAGES[name],
        re.DOTALL,
    )
    assert found is not None
    assert set(re.findall(r"\[`(\w+)`\]", found["classes"])) == {kind for page, kind in MADE if page == name}
