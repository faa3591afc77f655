"""A progress bar of an analysis on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

RUNS = {
    "G": "G: batches on the device",
    "copy": "copies to the device",
    "P": "P: records in memory, no device",
    "P_hit": "P of hits: out of the cache",
    "S": "S: cold files, no prep",
    "C": "C: out of the cache, no prep",
    "cold": "the job, cold",
    "warm": "the job, all in memory",
}
"""The runs of an analysis, in their order."""


class Bar:
    """A progress bar for the runs of an analysis, on standard error if it is a terminal."""

    def __init__(self, wanted: bool, rounds: int) -> None:
        self._names = list(RUNS)
        self._total = rounds * len(RUNS)
        self._progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (wanted and sys.stderr is not None and sys.stderr.isatty()),
        )

    def __enter__(self) -> Callable[[int, str, float], None]:
        self._progress.start()
        self._task = self._progress.add_task("reading some samples", total=self._total)
        return self._show

    def _show(self, round_: int, name: str, share: float) -> None:
        done = round_ * len(RUNS) + self._names.index(name) + share
        self._progress.update(self._task, description=RUNS[name], completed=done)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
