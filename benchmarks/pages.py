"""Puts results into the benchmark pages when the documentation is built. A hook of MkDocs; standard library only.

    {{result NAME}}                            the table of a result, with bars, setup, versions and machine
    {{NAME :: row label :: column}}            one median, as `12,300`
    {{NAME :: row label :: column :: spread}}  with the lowest and the highest figure

A row label is the row's texts joined by ", ". A paragraph or table cell with a figure that has no result becomes "not
measured for this version".
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
NOT_MEASURED = "not measured for this version"
_MARK = re.compile(r"\{\{(.+?)\}\}")

Json = dict[str, Any]


class MissingResult(LookupError):
    """There is no such result, row or column."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return fill(markdown) if page.file.src_uri.startswith("benchmarks/") else markdown


def fill(markdown: str) -> str:
    """Return `markdown` with all results and figures."""
    return "\n\n".join(map(_fill_block, markdown.split("\n\n")))


def _fill_block(block: str) -> str:
    if block.startswith("{{result "):
        return table(block.removeprefix("{{result ").rstrip("} \n"))
    if block.startswith("|"):
        return "\n".join("|".join(map(_fill_text, line.split("|"))) for line in block.split("\n"))
    return _fill_text(block, f"*{NOT_MEASURED.capitalize()}.*")


def _fill_text(text: str, otherwise: str = f" {NOT_MEASURED} ") -> str:
    try:
        return _MARK.sub(lambda match: figure(*(part.strip() for part in match[1].split(" :: "))), text)
    except MissingResult:
        return otherwise


def read(name: str) -> Json:
    """Return a result. Raises `MissingResult`."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise MissingResult(f"no result {name}")
    result: Json = json.loads(path.read_text())
    return result


def figure(name: str, row: str, column: str, form: str = "") -> str:
    """Return one figure of a result in words. Raises `MissingResult`."""
    result = read(name)
    titles = [title for title, _ in result["columns"]]
    if column not in titles:
        raise MissingResult(f"{name} has no column {column!r}, only {titles}")
    position = titles.index(column)
    for cells in result["rows"]:
        if row_label(result, cells) == row and isinstance(cells[position], list):
            return show(cells[position], result["columns"][position][1], spread=form == "spread")
    raise MissingResult(f"{name} has no row {row!r} with a figure in column {column!r}")


def row_label(result: Json, cells: list[Any]) -> str:
    """Return the texts of a row that stand before its first figure."""
    return ", ".join(cell for cell in cells[: result["bars"]] if cell)


def show(cell: Any, form: str, *, spread: bool = True) -> str:
    """Return a cell as text, such as `12,300 (11,900 to 12,800)`."""
    if not isinstance(cell, list):
        return str(cell)
    median, low, high = (format(value, form) for value in cell)
    return median if low == high or not spread else f"{median} ({low} to {high})"


def table(name: str) -> str:
    """Return a result as a table, and how it was measured."""
    try:
        result = read(name)
    except MissingResult:
        return f"*{NOT_MEASURED.capitalize()}.*"
    bars = result["bars"]
    lengths = [cells[bars][0] for cells in result["rows"] if isinstance(cells[bars], list)]
    longest = max(lengths, default=1) or 1
    lines = [[title for title, _ in result["columns"]], ["---"] * len(result["columns"])]
    for cells in result["rows"]:
        texts = [show(cell, form) for cell, (_, form) in zip(cells, result["columns"], strict=True)]
        if isinstance(cells[bars], list):
            kind = "bar ours" if "stallfree" in ", ".join(texts[:bars]) else "bar"
            width = 100 * max(0, cells[bars][0]) / longest
            texts[bars] += f' <span class="{kind}" style="width:{width:.0f}%"></span>'
        lines.append([text.replace("|", "\\|") for text in texts])
    machine = result["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    below = [result["setup"], *result["notes"]]
    origin = f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, Linux {machine['kernel']}"
    below.append(f"Measured {result['date']}: {origin}; {versions}. Median (lowest to highest).")
    details = "\n".join(f"<p>{_inline(text)}</p>" for text in below)
    return (
        f'<p id="{name}"><b>{_inline(result["question"])}</b></p>\n\n'
        + "\n".join("| " + " | ".join(line) + " |" for line in lines)
        + f'\n\n<details class="measured"><summary>How it was measured</summary>\n{details}\n</details>'
    )


def _inline(text: str) -> str:
    """Return a text with `code` as HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
