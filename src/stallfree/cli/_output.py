"""What commands print and write: JSON, and a check of files before a measurement."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stallfree.errors import file_unwritable

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result as JSON; with -, print it in place of the text.", metavar="FILE"),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON in place of the text.")]

_STDOUT = Path("-")

_FILE_WIDTH = 140
"""Minimum columns of a table written to a file or a pipe."""


def console(json_file: Path | None = None) -> Console:
    """The standard output; silent if JSON goes there."""
    out = Console(highlight=False, quiet=json_file == _STDOUT)
    if not out.is_terminal:
        out.width = max(out.width, _FILE_WIDTH)
    return out


def print_json(data: Any) -> None:
    """Print `data` as one JSON document."""
    typer.echo(json.dumps(data, indent=1, allow_nan=False))


def write_json(path: Path | None, data: Any, out: Console) -> None:
    """Write `data` to the file given as `--json`, if any, and report it on `out`."""
    if path == _STDOUT:
        print_json(data)
    elif path is not None:
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        out.out(f"wrote {path}")


def writable(path: Path | None) -> None:
    """Raise `InputError` if `path` cannot be written. Called before a measurement."""
    if path is None or path == _STDOUT:
        return
    if path.is_dir():
        raise file_unwritable(f"{path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise file_unwritable(
            f"{path} cannot be written: there is no folder {path.parent}. Make it, or give another file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise file_unwritable(f"{path} cannot be written: permission denied. Give another file")


def writable_page(path: Path | None) -> None:
    """Raise an error if a page with charts cannot be written to `path`. Called before a measurement."""
    from stallfree.analysis.render import plotly

    writable(path)
    if path is not None:
        plotly()
