"""Every error has a page, every page an error, and the link of a message leads to its page."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
from doc_pages import ROOT

from stallfree import errors
from stallfree.cache import layout as cache_index
from stallfree.errors import DOCUMENTATION, StallfreeError
from stallfree.pipeline import codec
from stallfree.pipeline.fingerprint import fingerprint

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "errors_table.py"))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "errors").glob("*-*.md")}
KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, partial)}
CLASSES = {
    name: kind
    for module in (errors, cache_index, fingerprint, codec)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, StallfreeError)
}


class Site(NamedTuple):
    """A call in the source that makes an error."""

    place: str
    kind: type[StallfreeError]
    page: str
    message: re.Pattern[str]


def sites(source: str, name: str) -> Iterator[Site]:
    """The calls of classes and kinds of errors, except those that take over the page of another error."""
    tree = ast.parse(source)
    texts: dict[str, ast.expr] = {}  # those of the module stay
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        own = list(_own(scope))
        texts |= {node.targets[0].id: node.value for node in own if _sets_a_name(node)}  # type: ignore[attr-defined]
        for call in own:
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute)):
                continue
            called = call.func.id if isinstance(call.func, ast.Name) else call.func.attr  # as in `errors.lock_held`
            made: Any = KINDS.get(called) or CLASSES.get(called)
            given = {keyword.arg: keyword.value for keyword in call.keywords}.get("page")
            if made is None or isinstance(given, ast.Attribute):
                continue
            page = made.keywords["page"] if isinstance(made, partial) else made.page
            kind = made.func if isinstance(made, partial) else made
            text = _pattern(call.args[0], texts) if call.args else ""
            message = re.compile(text if re.search("[a-z]{2}", text) else "(?!)", re.DOTALL)  # else it is passed on
            yield Site(f"{name}:{call.lineno}", kind, ast.literal_eval(given) if given else page, message)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from _own(node)


def _sets_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def _pattern(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """A regular expression for the texts that an expression gives."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value).replace("\n", " "))
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(value, texts) for value in node.values)
    if isinstance(node, ast.BinOp):
        return _pattern(node.left, texts) + _pattern(node.right, texts)
    if isinstance(node, ast.Name) and node.id in texts:
        return _pattern(texts[node.id], {})
    return ".*"


SITES = [
    site
    for path in sorted((ROOT / "src" / "stallfree").rglob("*.py"))
    for site in sites(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
]


def test_every_error_has_a_page_and_every_page_an_error() -> None:
    assert len(SITES) > 300
    assert {site.page for site in SITES} == set(PAGES)
    for name, kind in KINDS.items():
        assert str(kind("a message")) == f"a message\n{DOCUMENTATION}errors/{name.replace('_', '-')}/"
        assert name.replace("_", "-") in PAGES
    for file in ("mkdocs.yml", "pyproject.toml"):
        address = re.search(r'^(?:site_url:|Documentation =) "?([^"\n]+)', (ROOT / file).read_text(), re.MULTILINE)
        assert address
        assert address[1] == DOCUMENTATION


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_has_a_real_message_its_causes_its_cures_and_its_classes(name: str) -> None:
    text = PAGES[name]
    found = re.fullmatch(
        rf"# {name}\n\n(?P<summary>[^#]+?)\n\n```text\n(?P<message>.+?)\n```\n\n## Usual causes\n\n- .+\n\n"
        r"## What to do\n\n- .+\n\nClass: (?P<classes>[^\n]+)\. \[All messages\]\(index\.md\)\n",
        text,
        re.DOTALL,
    )
    assert found
    own = [site for site in SITES if site.page == name]
    message = " ".join(found["message"].split())
    assert any(site.message.fullmatch(message) for site in own), f"{message!r} is no message of {name}"
    named = {next(base.__name__ for base in site.kind.__mro__ if base in vars(errors).values()) for site in own}
    assert set(re.findall(r"\[`(\w+)`\]", found["classes"])) == named


def test_the_index_shows_the_pages() -> None:
    named = [name for names in SCRIPT["TOPICS"].values() for name in names.split()]
    assert sorted(named) == sorted(PAGES)
    assert SCRIPT["INDEX"].read_text(encoding="utf-8") == SCRIPT["index"](), "run: python docs/errors_table.py"
