"""Progress bars for long work."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def bar(wanted: bool = True) -> Progress:
    """A progress bar on standard error, if that is a terminal."""
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (wanted and sys.stderr is not None and sys.stderr.isatty()),
    )
