"""The names and commands on the pages are those of the package and of the command line, and each error has its page."""

import ast
import inspect
import re
import runpy
import shlex
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_tools import PAGES, ROOT, blocks, commands, name_of, named

from stallfree import errors
from stallfree.cli import app
from stallfree.errors import DOCUMENTATION, StallfreeError

_CODE = [page for page in PAGES if blocks(page, "python")]
_COMMAND: Any = typer.main.get_command(app)
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "errors_table.py"))
ERRORS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "errors").glob("*-*.md")}


@pytest.mark.parametrize("page", _CODE, ids=name_of)
def test_names_of_the_package_exist(page: Path) -> None:
    """Also in blocks that cannot be run: what they take from the package is there, with these arguments."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block.text, block.page)):
            if isinstance(node, ast.Attribute) and _path(node):
                named(".".join(_path(node)))
            if isinstance(node, ast.Call) and _path(node.func):
                taken = inspect.signature(named(".".join(_path(node.func)))).parameters
                free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
                wrong = {keyword.arg for keyword in node.keywords if keyword.arg} - set(taken)
                assert free or not wrong, f"{block.page}:{block.line}: {ast.unparse(node.func)} takes no {wrong}"


def _path(node: ast.expr) -> list[str]:
    """The names after `sf` in `sf.a.b`; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return names if isinstance(node, ast.Name) and node.id == "sf" else []


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands(page)]], ids=name_of)
def test_shown_commands_exist(page: Path) -> None:
    for place, command in commands(page):
        words, known = shlex.split(command, comments=True)[1:], _COMMAND
        while words and words[0] in getattr(known, "commands", {}):
            known, *words = known.commands[words[0]], *words[1:]
        own = [word for word in words if word.startswith("-")] if known.name != "run" else words[:1]
        options = {name for parameter in known.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.split("=")[0] for word in own if word.startswith("-")} <= {*options, "-h", "--help"}, place
        assert not words or not hasattr(known, "commands") or words[0][0] in "-[", place


def test_every_command_and_option_is_in_the_reference() -> None:
    text = next(page for page in PAGES if page.name == "cli.md").read_text()

    def check(command: Any, name: str) -> None:
        part = text.split(f"## {' '.join(name.split()[:2])}\n")[-1].split("\n## ")[0]
        for option in (option for parameter in command.params for option in parameter.opts):
            assert not option.startswith("--") or option == "--help" or option in part, f"{name} {option}"
        for word, below in getattr(command, "commands", {}).items():
            check(below, f"{name} {word}")

    check(_COMMAND, "stallfree")


@cache
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
            found.add((kind.page if given is None else ast.literal_eval(given), kind.__name__))
    return found - {("", name) for _, name in found}


def test_every_error_has_a_page_and_every_page_an_error() -> None:
    assert {page for page, _ in made()} == set(ERRORS)
    for file in ("mkdocs.yml", "pyproject.toml"):
        address = re.search(r'^(?:site_url:|Documentation =) "?([^"\n]+)', (ROOT / file).read_text(), re.MULTILINE)
        assert address is not None
        assert address[1] == DOCUMENTATION
    assert sorted(name for names in SCRIPT["TOPICS"].values() for name in names.split()) == sorted(ERRORS)
    assert SCRIPT["INDEX"].read_text(encoding="utf-8") == SCRIPT["index"](), "run: python docs/errors_table.py"
