"""The frame of all pages: one self-contained HTML file with its data."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from stallfree.errors import file_unreadable, missing_extra

# With this policy a browser makes no network requests, whatever the scripts do.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def document(title: str, body: str, data: Mapping[str, Any], *, assets: Iterable[str]) -> str:
    """A self-contained HTML page.

    Args:
        title: of the window; plain text.
        body: HTML, already escaped.
        data: embedded as JSON, in the element with the id "data".
        assets: names of this package's style sheets and scripts, without `base.css` and `base.js`, which come first.

    Raises `MissingExtraError` if `plotly` is not installed.
    """
    plotly = chart_library()
    names = ["base.css", "base.js", *assets]
    styles = "".join(f"<style>\n{asset(name)}</style>\n" for name in names if name.endswith(".css"))
    scripts = "".join(f"<script>\n{asset(name)}</script>\n" for name in names if name.endswith(".js"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n{styles}</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        f"<script>{plotly()}</script>\n{scripts}</body>\n</html>\n"
    )


def chart_library() -> Callable[[], str]:
    """Returns the function that gives the source of plotly. Raises `MissingExtraError` if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra("plotly", "report", "A page with charts") from error
    source: Callable[[], str] = get_plotlyjs
    return source


def asset(name: str) -> str:
    """The text of a file of this package."""
    return (resources.files("stallfree.report") / "assets" / name).read_text(encoding="utf-8")


def embedded(data: Mapping[str, Any]) -> str:
    """`data` as JSON that no HTML parser mistakes for the end of its element, or for a comment.

    Raises `InputError` for a number that JSON does not support, such as infinity.
    """
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise file_unreadable(
            f"this {data['format']} holds a number that is none ({error}): give null for it"
        ) from error
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def escape(text: object) -> str:
    """`text` escaped for HTML, also within quotes."""
    return html.escape(str(text))


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, classes: str = "") -> str:
    """A table whose first column contains row headings.

    Args:
        caption: plain text.
        headings: plain text.
        rows: cells of HTML, already escaped.
        classes: CSS classes.
    """
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>\n"
        for first, *rest in rows
    )
    return (
        f'<table class="{classes}"><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n"
    )
