"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from stallfree.errors import file_unwritable


def writable(path: Path | None) -> None:
    """Raise `InputError` if `path` cannot be written. Called before a measurement."""
    if path is None:
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
    from stallfree.report import chart_library

    writable(path)
    if path is not None:
        chart_library()
