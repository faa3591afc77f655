"""What happened when: the log of a pipeline that ran, or of one that was simulated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from stallfree.errors import file_unreadable


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        start: seconds since the beginning of the log.
        end: the same.
        actor: who: "loader 0" and so on, "gather" (batches straight from the cache), "copy", "device".
        what: "load" (simulated loaders), "fetch", "prep", "gather", "copy" or "compute".
        batch: its number in the order of the plan.
        epoch: its epoch; 0 in a simulation.
    """

    start: float
    end: float
    actor: str
    what: str
    batch: int
    epoch: int = 0


def write_events(path: str | Path, events: Iterable[Event]) -> None:
    """Write `events` as JSON, an object per line."""
    Path(path).write_text("".join(json.dumps(asdict(event)) + "\n" for event in events))


def read_events(path: str | Path) -> list[Event]:
    """Read what `write_events` wrote, or a loader.

    Raises `InputError` for a file that cannot be read or holds something else; it names the line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise file_unreadable(
            f"{path} cannot be read as a log of events: {error}. Give a log that stallfree wrote"
        ) from error
    return [_event(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _event(path: str | Path, number: int, line: str) -> Event:
    try:
        event = Event(**json.loads(line))
        if not (math.isfinite(event.start) and math.isfinite(event.end) and event.start <= event.end):
            raise ValueError("start and end must be numbers, start not after end")
    except (ValueError, TypeError) as error:
        raise file_unreadable(
            f"{path}, line {number}, is no event ({error}): give a log that stallfree wrote"
        ) from error
    return event
