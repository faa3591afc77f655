"""The code of the documentation runs, and the commands it shows are those of the command line."""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_pages import PAGES, Block, blocks, commands, name_of
from doc_runs import Part, tracebacks
from doc_setups import SETUPS, Setup

import stallfree as sf
from stallfree.cli import app
from warm import Interpreter

_CODE = [page for page in PAGES if blocks(page, "python")]
_SHOWN = [(place, command) for page in PAGES for place, command in commands(page)]


def _parts(page: Path) -> list[Part]:
    """All that is run for a page."""
    setup = SETUPS.get(name_of(page), Setup())
    parts = [Part("setup", 1, "", setup.world)]
    for number, block in enumerate(block for block in blocks(page, "python") if not block.not_run):
        parts.append(Part("setup", 1, "", setup.before.get(number, "")))
        file = block.title if block.title.endswith(".py") and " " not in block.title else ""
        parts.append(Part(block.page, block.line, file, setup.shrink(block.text)))
    return parts


@pytest.fixture(scope="module")
def came(interpreter: Interpreter, store_root: Path) -> dict[str, str]:
    """The tracebacks of the pages whose blocks failed."""
    return tracebacks(interpreter, store_root, {name_of(page): _parts(page) for page in _CODE})


@pytest.mark.parametrize("page", _CODE, ids=name_of)
def test_blocks_of_a_page_run(page: Path, came: dict[str, str]) -> None:
    """In order, in one namespace, in an empty folder. A traceback names the page and its line."""
    assert name_of(page) not in came, came[name_of(page)]


@pytest.mark.parametrize(
    "block", [block for page in _CODE for block in blocks(page, "python")], ids=lambda block: block.place
)
def test_names_of_the_package_exist(block: Block) -> None:
    """Also in blocks that cannot be run: what they take from the package is there, with these arguments."""
    tree = ast.parse(block.text, block.place)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _path(node):
            _found(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _path(node.func):
            called = _found(node.func)
            taken = inspect.signature(called).parameters
            free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
            wrong = {given.arg for given in node.keywords if given.arg} - set(taken)
            assert free or not wrong, f"{block.place}: {ast.unparse(node.func)} takes no {wrong}"


def _path(node: ast.expr) -> list[str]:
    """The names after `sf` in `sf.a.b`; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return names if isinstance(node, ast.Name) and node.id == "sf" else []


def _found(node: ast.Attribute) -> Any:
    """What `sf.a.b` is; raises `AttributeError` where it is nothing."""
    value: Any = sf
    for name in _path(node):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("place", "command"), _SHOWN, ids=[place for place, _ in _SHOWN])
def test_shown_commands_exist(place: str, command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    known: Any = typer.main.get_command(app)
    for word in _own(words):
        if hasattr(known, "commands") and not word.startswith("-"):
            assert word in known.commands, f"{place}: there is no command {word!r}"
            known = known.commands[word]
        elif word.startswith("-"):
            assert word.split("=")[0] in _options(known), f"{place}: {command.split(' -')[0]!r} takes no {word}"


def _own(words: list[str]) -> Iterator[str]:
    """The words that stallfree itself reads: behind the script of `stallfree run` all are the script's."""
    own = iter(words)
    for word in own:
        yield word
        if words[0] == "run" and word != "run" and not word.startswith("-"):
            return
        if words[0] == "run" and word == "--json":
            next(own)


def _options(command: Any) -> set[str]:
    given = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name for name in given if name.startswith("-")} | {"-h", "--help", "[OPTIONS]"}


def test_every_command_and_option_is_in_the_reference() -> None:
    text = next(page for page in PAGES if page.name == "cli.md").read_text()
    missing = []
    for name, command in _all_commands(typer.main.get_command(app), "stallfree"):
        part = text.split(f"## {' '.join(name.split()[:2])}\n")[-1].split("\n## ")[0]
        missing += [
            f"{name} {option}" for option in _options(command) if option.startswith("--") and option not in part
        ]
    assert not [entry for entry in missing if not entry.endswith("--help")]


def _all_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from _all_commands(below, f"{name} {word}")
