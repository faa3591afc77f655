"""The event log of a loader, in the format of `stallfree.analysis.simulate`."""

import os
import time
from pathlib import Path

from stallfree.errors import file_unwritable
from stallfree.loader.messages import GATHERER, Result
from stallfree.raising import log

_LINES = 4096
"""Maximum number of buffered lines."""


class EventLog:
    """Writes events, in seconds since the creation of the log, on the clock that all processes of a host share.

    Args:
        path: of the file, which is created or overwritten immediately.

    Raises `InputError` if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._path = Path(path).absolute()
            self._path.write_bytes(b"")
        except (OSError, TypeError, ValueError) as error:
            raise file_unwritable(f"event_log={path!r} cannot be written: {error}. Give the path of a file") from error
        self._begun = time.monotonic()
        self._lines: list[str] = []
        self._owner = os.getpid()

    def prepared(self, result: Result, epoch: int) -> None:
        """Log a batch from a worker, a gather thread, or the training process in place of one."""
        start, number = result.started, result.number
        if not start:
            return  # it failed
        fetched = start + result.fetch_seconds
        end = fetched + result.prep_seconds
        if result.worker == GATHERER:
            self.add(start, end, "gather", "gather", number, epoch)
            return
        actor = f"loader {result.worker}"
        if result.fetch_seconds:
            self.add(start, fetched, actor, "fetch", number, epoch)
        self.add(fetched, end, actor, "prep", number, epoch)

    def add(self, start: float, end: float, actor: str, what: str, batch: int, epoch: int) -> None:
        """Log an event (see `stallfree.analysis.simulate.Event`), with the times of `time.monotonic`."""
        self._lines.append(
            f'{{"start": {start - self._begun:.6f}, "end": {end - self._begun:.6f}, "actor": "{actor}", '
            f'"what": "{what}", "batch": {batch}, "epoch": {epoch}}}\n'
        )
        if len(self._lines) >= _LINES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines. A full disk stops the log with a warning, but not the training."""
        lines, self._lines = self._lines, []
        if not lines or os.getpid() != self._owner:
            return
        try:
            with self._path.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            log.warning("the log of events %s ends here, it cannot be written: %s", self._path, error)
            self._owner = -1
