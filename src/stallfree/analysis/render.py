"""Text for a terminal and self-contained HTML pages, from one list of blocks.

A report and a simulation are lists of headings, texts, tables and lists. A page (`assets/page.html`) adds charts, drawn
by plotly from the data that it contains. A page makes no network requests.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from stallfree import errors

_WIDTH = 80


@dataclass(frozen=True)
class Text:
    """A paragraph; `style` is its class on a page: "verdict", "job", "small", ..."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Heading:
    """The beginning of a section."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table whose first column contains row headings."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Items:
    """A list; each item has a first line and further text."""

    items: Sequence[tuple[str, str]]
    numbered: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart, on pages only. The script draws it; `described` is for people who cannot see it."""

    name: str
    described: str
    mark: str = ""


Block = Text | Heading | Table | Items | Chart


def as_text(blocks: Iterable[Block]) -> str:
    """The blocks as text of 80 columns, without terminal control sequences."""
    lines = list[str]()
    for block in blocks:
        if isinstance(block, Heading):
            lines += ["", "", _plain(block.text)]
        elif isinstance(block, Text):
            lines += wrap(_plain(block.text), _WIDTH)
        elif isinstance(block, Items):
            for number, parts in enumerate(block.items, 1):
                mark = f"{number}. " if block.numbered else "- "
                for part, first in zip(parts, (mark, " " * len(mark)), strict=True):
                    indent = " " * len(mark)
                    lines += wrap(_plain(part), _WIDTH, initial_indent=first, subsequent_indent=indent)
        elif isinstance(block, Table):
            rows = [list(map(_plain, row)) for row in (block.headings, *block.rows)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            widths[0] = min(widths[0], _WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
            for first, *cells in rows:
                heading, *more = wrap(first, widths[0]) or [""]
                figures = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
                lines += [f"{heading:<{widths[0]}}{figures}", *more]
                if [first, *cells] == rows[0]:
                    lines.append("\u2500" * (sum(widths) + 2 * len(widths[1:])))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _plain(text: object) -> str:
    """`text` in one line, without characters that a terminal obeys."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(str(text).split()))


def as_page(name: str, kicker: str, title: str, blocks: Iterable[Block], data: Mapping[str, Any]) -> str:
    """The blocks as a self-contained page.

    Args:
        name: of its template, style sheet and script: "report" or "simulation".
        kicker: the line above the title.
        title: plain text.
        blocks: the content.
        data: embedded as JSON, in the element with the id "data".

    Raises `MissingExtraError` if `plotly` is not installed, `ValueError` for data with numbers such as infinity.
    """
    charts = plotly()
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    loader = PackageLoader("stallfree.analysis", "assets")
    environment = Environment(loader=loader, autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    content = {"name": name, "kicker": kicker, "title": title, "blocks": blocks, "data": data}
    shown = {"plotly": Markup(charts), "asset": lambda file: Markup(loader.get_source(environment, file)[0])}
    return environment.get_template(f"{name}.html").render(**content, **shown)


def plotly() -> str:
    """The script that draws charts. Raises `MissingExtraError` if `plotly` is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise errors.missing_extra("plotly", "report", "A page with charts") from error
    return str(get_plotlyjs())


# -- figures ----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """`value` with three digits or, from a hundred on, without decimals: `"0.85"`, `"20.1"`, `"12,300"`."""
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def interval(low: float | None, high: float | None) -> str:
    """`"800 to 825"`; empty if there is none."""
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def percent(share: float) -> str:
    """`share` of 1 as a percentage: `"38%"`, or `"0.4%"` below one."""
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"


def speed(value: float) -> str:
    """Bytes per second as text: `"530 MB/s"`."""
    return f"{number(value / 1e6)} MB/s"


def progress_bar(wanted: bool = True) -> Any:
    """A progress bar of rich on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    shown = wanted and sys.stderr is not None and sys.stderr.isatty()
    return Progress(console=Console(stderr=True), transient=True, disable=not shown)


def plural(count: int, word: str) -> str:
    """`"1 sample"`, `"3,670 samples"`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
