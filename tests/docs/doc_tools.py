"""The pages of the documentation, and the public names that they describe."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import stallfree as sf

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: .+? -->\n\Z")
_INLINE = re.compile(r"`(stallfree [a-z][^`]*)`")
_ENTRY = re.compile(r"^::: stallfree\.(\S+)$", re.MULTILINE)

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
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[Block]:
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
