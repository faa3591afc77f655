"""What the pages of the documentation hold: blocks of code, and commands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\n\Z")
_INLINE = re.compile(r"`(stallfree [a-z][^`]*)`")


class Block(NamedTuple):
    """A block of code on a page, relative to the root, from a line; `not_run` is why it cannot be run, or empty."""

    page: str
    line: int
    title: str
    not_run: str
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
            title, reason = _TITLE.search(info), _NOT_RUN.search(text[: match.start()])
            line = text.count("\n", 0, match.start("text")) + 1
            named = title["title"] if title else ""
            parts.append(Block(name_of(page), line, named, reason["reason"] if reason else "", match["text"]))
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
