"""What commands print and write: JSON, and a check of files before a measurement."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from stallfree.errors import file_unwritable

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result as JSON; with -, print it in place of the text.", metavar="FILE"),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON in place of the text.")]

STDOUT = Path("-")


def print_json(data: Any) -> None:
    """Print `data` as one JSON document."""
    typer.echo(json.dumps(data, indent=1, allow_nan=False))


def show(text: str, data: Any, json_file: Path | None) -> None:
    """Print `text`, and write `data` to the file given as `--json`, if any; with "-" print only `data`."""
    if json_file == STDOUT:
        print_json(data)
        return
    typer.echo(text)
    if json_file is not None:
        write(json_file, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file and say so."""
    path.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {path}")


def writable(*paths: Path | None) -> None:
    """Raise `InputError` if one of the files cannot be written. Called before a measurement."""
    for path in filter(None, paths):
        if path != STDOUT and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise file_unwritable(f"{path} cannot be written: give a file in a folder that exists and is yours")
