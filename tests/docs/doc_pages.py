"""What the pages of the documentation hold: blocks of code, and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\n\Z")
_INLINE = re.compile(r"`(stallfree [a-z][^`]*)`")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: the file it is in, relative to the root.
        line: of its first line of code, from 1.
        language: such as "python".
        title: what stands above it on the page; may be empty.
        not_run: why it cannot be run; empty for one that can.
        text: the code.
    """

    page: str
    line: int
    language: str
    title: str
    not_run: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    """The page, relative to the root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a language on a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        if info.split(" ")[0] != language:
            continue
        title, reason = _TITLE.search(info), _NOT_RUN.search(text[: match.start()])
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(
            Block(
                name_of(page),
                line,
                language,
                title["title"] if title else "",
                reason["reason"] if reason else "",
                match["text"],
            )
        )
    return found


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """(place, command line) of everything on a page that begins with `stallfree` and is to be typed into a shell."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page, "console"):
        for number, line in enumerate(block.text.splitlines(), block.line):
            if line.startswith("$ stallfree "):
                yield f"{block.page}:{number}", line[2:]
    plain = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(plain.splitlines(), 1):
        if line.startswith("    stallfree "):
            yield f"{name_of(page)}:{number}", line.strip()
        for match in _INLINE.finditer(line):
            yield f"{name_of(page)}:{number}", match[1]
