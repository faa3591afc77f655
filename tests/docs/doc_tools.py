"""The pages of the documentation, the public names that they describe, and a process that runs their code."""

import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import stallfree as sf
from warm import Interpreter

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: .+? -->\n\Z")
_INLINE = re.compile(r"`(stallfree [a-z][^`]*)`")
_ENTRY = re.compile(r"^::: stallfree\.(\S+)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:\n    ```python\n(?P<code>(?:    .*\n|\n)+?)    ```\Z", re.MULTILINE)

REFERENCE = [name for page in PAGES if page.parent.name == "reference" for name in _ENTRY.findall(page.read_text())]
"""The names that the pages of the reference describe."""


class Block(NamedTuple):
    """A block of code on a page, relative to the root, from a line; `runs` unless the page says why it cannot."""

    page: str
    line: int
    title: str
    runs: bool
    text: str


def name_of(page: Path) -> str:
    """The page, relative to the root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a language on a page, in order."""
    text, parts = page.read_text(encoding="utf-8"), []
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        if info.split(" ")[0] == language:
            title, runs = _TITLE.search(info), not _NOT_RUN.search(text[: match.start()])
            line = text.count("\n", 0, match.start("text")) + 1
            parts.append(Block(name_of(page), line, title["title"] if title else "", runs, match["text"]))
    return parts


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """(place, command line) of everything on a page that begins with `stallfree` and is to be typed into a shell."""
    for block in blocks(page, "console"):
        for number, line in enumerate(block.text.splitlines(), block.line):
            if line.startswith("$ stallfree "):
                yield f"{block.page}:{number}", line[2:]
    plain = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    for number, line in enumerate(plain.splitlines(), 1):
        indented = [line.strip()] if line.startswith("    stallfree ") else []
        for command in indented + _INLINE.findall(line):
            yield f"{name_of(page)}:{number}", command


# -- names ------------------------------------------------------------------------------------------------------------


def named(name: str) -> Any:
    """The public object behind a dotted name, whose modules need not be imported yet."""
    value: Any = sf
    for number, part in enumerate(name.split("."), 1):
        if not hasattr(value, part):
            importlib.import_module(".".join(["stallfree", *name.split(".")[:number]]))
        value = getattr(value, part)
    return value


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, but the tests of a test suite."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith(("_", "test_")):
            plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(plain):
                yield name, plain


class Example(NamedTuple):
    """The example of a docstring: where it is, and its code."""

    place: str
    code: str

    @property
    def needs(self) -> str:
        """What it needs beside stallfree's own requirements, as its first line says; empty for nothing."""
        needed = re.match(r"# needs (.+)", self.code)
        return needed[1] if needed else ""


def example(value: Any) -> Example | None:
    """The example of a class or function; None if its docstring has none."""
    plain = inspect.unwrap(value)
    shown = _EXAMPLE.search(inspect.getdoc(plain) or "")
    return Example(f"{plain.__module__}.{plain.__qualname__}", textwrap.dedent(shown["code"])) if shown else None


# -- runs -------------------------------------------------------------------------------------------------------------

_RUNNER = """
import gc, json, os, sys, traceback, warnings
top, came = os.getcwd(), {{}}
for name, parts in json.loads({pieces!r}):
    os.mkdir(name.replace("/", "-"))
    os.chdir(name.replace("/", "-"))
    sys.path.insert(0, os.getcwd())
    space = {{"__name__": "__main__"}}
    try:
        with warnings.catch_warnings():
            for place, line, file, code in parts:
                if file:
                    with open(file, "w") as opened:
                        opened.write(code)
                exec(compile("\\n" * (line - 1) + code, place, "exec"), space)
    except BaseException:
        came[name] = traceback.format_exc()
    space.clear()
    gc.collect()
    for module in ("train", "job"):  # files of the page
        sys.modules.pop(module, None)
    del sys.path[0]
    os.chdir(top)
print("came of it:", json.dumps(came))
"""
"""All pieces in one process, each in a folder and a namespace of its own: what one imports, the others need not."""


class Part(NamedTuple):
    """Code that is run: its file and line for tracebacks, the file that it is written to first ("" for none)."""

    place: str
    line: int
    file: str
    code: str


def tracebacks(interpreter: Interpreter, store_root: Path, pieces: dict[str, list[Part]]) -> dict[str, str]:
    """Run the parts of each piece in order. Returns the tracebacks of those that failed, by name."""
    ended = interpreter.run(_RUNNER.format(pieces=json.dumps(list(pieces.items()))))
    assert ended.code == 0, ended.err
    assert not list(store_root.iterdir()), "a cache was left behind"
    found: dict[str, str] = json.loads(ended.out.rsplit("came of it: ")[-1])
    assert found or "Traceback" not in ended.err, ended.err
    return found


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter of the tests of a module that are run in this session and use its fixture `came`."""
    items: list[Any] = [item for item in request.session.items if item.getparent(pytest.Module).obj is request.module]  # type: ignore[union-attr]
    return [item.callspec.params[name] for item in items if "came" in item.fixturenames]
