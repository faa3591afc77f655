"""Text for a terminal and self-contained HTML pages, from one list of blocks.

A report and a simulation are lists of headings, texts, tables and lists. A page adds
charts, drawn by plotly from the data that it contains. A page makes no network requests.
"""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from stallfree.errors import file_unreadable, missing_extra

if TYPE_CHECKING:
    from rich.progress import Progress

# With this policy a browser makes no network requests, whatever the scripts do.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_WIDTH = 80


@dataclass(frozen=True)
class Text:
    """A paragraph; `kind` is its style on a page: "verdict", "job", "small", ..."""

    text: str
    kind: str = ""


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


@dataclass(frozen=True)
class Raw:
    """HTML of this package, on pages only."""

    html: str


Block = Text | Heading | Table | Items | Chart | Raw


# -- the terminal -----------------------------------------------------------------------------------------------------


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
                    indents = {"initial_indent": first, "subsequent_indent": " " * len(mark)}
                    lines += wrap(_plain(part), _WIDTH, **indents)  # type: ignore[arg-type]
        elif isinstance(block, Table):
            rows = [list(map(_plain, row)) for row in (block.headings, *block.rows)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            widths[0] = min(widths[0], _WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
            for first, *cells in rows:
                heading, *more = wrap(first, widths[0]) or [""]
                figures = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
                lines += [f"{heading:<{widths[0]}}{figures}", *more]
                if (first, *cells) == tuple(rows[0]):
                    lines.append("\u2500" * (sum(widths) + 2 * len(widths[1:])))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _plain(text: object) -> str:
    """`text` in one line, without characters that a terminal obeys."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(str(text).split()))


# -- pages ------------------------------------------------------------------------------------------------------------


def as_page(kicker: str, title: str, blocks: Iterable[Block], data: Mapping[str, Any], script: str) -> str:
    """The blocks as a self-contained page.

    Args:
        kicker: the line above the title.
        title: plain text.
        blocks: the content.
        data: embedded as JSON, in the element with the id "data".
        script: name of the style sheet and the script that draws the charts, such as "report".

    Raises `MissingExtraError` if `plotly` is not installed, `InputError` for data with numbers such as infinity.
    """
    charts = plotly()
    styles = "".join(f"<style>\n{asset(f'{name}.css')}</style>\n" for name in ("base", script))
    scripts = "".join(f"<script>\n{asset(f'{name}.js')}</script>\n" for name in ("base", script))
    body, is_open = "", False
    for block in blocks:
        if isinstance(block, (Heading, Raw)):
            body, is_open = body + ("</section>\n" if is_open else ""), isinstance(block, Heading)
        body += _html(block)
    body += "</section>\n" if is_open else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>stallfree: {escape(title)}</title>\n{styles}</head>\n<body>\n<header>\n"
        f'<p class="kicker">stallfree {escape(kicker)}</p>\n<h1>{escape(title)}</h1>\n</header>\n'
        f"<main>\n{body}</main>\n"
        f'<script type="application/json" id="data">{_embedded(data)}</script>\n'
        f"<script>{charts}</script>\n{scripts}</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    """A block as HTML; a heading begins a section."""
    if isinstance(block, Heading):
        return f"<section>\n<h2>{escape(block.text)}</h2>\n"
    if isinstance(block, Text):
        return f'<p class="{block.kind}">{escape(block.text)}</p>\n'
    if isinstance(block, Items):
        tag = "ol" if block.numbered else "ul"
        items = (f"<li><strong>{escape(first)}</strong> {escape(more)}</li>\n" for first, more in block.items)
        return f"<{tag}>\n{''.join(items)}</{tag}>\n"
    if isinstance(block, Chart):
        attributes = f'id="chart-{block.name}" role="img" aria-label="{escape(block.described)}"'
        chart = f'<div class="chart" {attributes} data-mark="{escape(block.mark)}"></div>'
        return f"<figure>{chart}<figcaption>{escape(block.described)}</figcaption></figure>\n"
    if isinstance(block, Table):
        head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in block.headings)
        rows = (
            f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>\n'
            for first, *cells in block.rows
        )
        head = f"<caption>{escape(block.caption)}</caption>\n<thead><tr>{head}</tr></thead>"
        return f'<table class="numbers">{head}\n<tbody>\n{"".join(rows)}</tbody></table>\n'
    return block.html


def plotly() -> str:
    """The script that draws charts. Raises `MissingExtraError` if `plotly` is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra("plotly", "report", "A page with charts") from error
    return str(get_plotlyjs())


def asset(name: str) -> str:
    """The text of a file of this package."""
    return (resources.files("stallfree.analysis") / "assets" / name).read_text(encoding="utf-8")


def escape(text: object) -> str:
    """`text` escaped for HTML, also within quotes."""
    return html.escape(str(text))


def _embedded(data: Mapping[str, Any]) -> str:
    """`data` as JSON that no HTML parser mistakes for the end of its element, or for a comment."""
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise file_unreadable(f"this {data['format']} holds a number that is none ({error}): give null") from error
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- data and figures -------------------------------------------------------------------------------------------------


def expect_format(data: Any, form: str, keys: Iterable[str], origin: str = "this") -> None:
    """Raise `InputError` unless `data`, from `origin`, is of the format `form`, version 1, and has these keys."""
    if not isinstance(data, dict) or data.get("format") != form:
        known = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise file_unreadable(f"{origin} is no {form} (its format is {known!r}): give what stallfree saved as one")
    if data.get("version") != 1:
        raise file_unreadable(
            f"{origin} is a {form} of version {data.get('version')!r}, and version 1 can be read: make it again"
        )
    if absent := [key for key in keys if key not in data]:
        raise file_unreadable(f"{origin} is a {form} and lacks {', '.join(absent)}: make it again")


def number(value: float, width: float = 0.0) -> str:
    """`value` with three digits or, from a hundred on, without decimals: `"0.85"`, `"20.1"`, `"12,300"`.

    A narrow interval of this `width` gets up to two decimals more, so that its ends differ.
    """
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    if width > 0:
        decimals = max(decimals, min(decimals + 2, -math.floor(math.log10(width))))
    return f"{value:,.{decimals}f}"


def interval(low: float | None, high: float | None) -> str:
    """`"800 to 825"`; empty if there is none."""
    if low is None or high is None:
        return ""
    return f"{number(low, high - low)} to {number(high, high - low)}"


def percent(share: float) -> str:
    """`share` of 1 as a percentage: `"38%"`, or `"0.4%"` below one."""
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"


def speed(value: float) -> str:
    """Bytes per second in decimal units: `"530 MB/s"`."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.0f} GB/s" if value >= 999.5 else f"{value:.3g} GB/s"


def progress_bar(wanted: bool = True) -> Progress:
    """A progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = wanted and sys.stderr is not None and sys.stderr.isatty()
    columns = TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)


def plural(count: int, word: str) -> str:
    """`"1 sample"`, `"3,670 samples"`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
