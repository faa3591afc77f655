"""Files that are moved away, and the files that this process really opens."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def gone(folder: Path) -> Iterator[None]:
    """Within it, the folder is not where it was."""
    away = folder.with_name(folder.name + "-away")
    folder.rename(away)
    try:
        yield
    finally:
        away.rename(folder)


_opened: list[str] | None = None


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(args[0], (str, bytes)):
        _opened.append(os.fsdecode(args[0]))


@contextmanager
def opens_below(folder: Path) -> Iterator[list[str]]:
    """Gives the list of the paths below `folder` that are really opened within it, in this process; full at the end."""
    global _opened
    if not getattr(sys, "_opens_hook", False):
        sys.addaudithook(_note)
        sys._opens_hook = True  # type: ignore[attr-defined]
    found: list[str] = []
    _opened = []
    try:
        yield found
    finally:
        found += [path for path in _opened if path.startswith(str(folder))]
        _opened = None
