"""How errors and warnings reach the user: notes, short tracebacks, the user's line, and the log.

An error of the user's code is raised as it is: its class, arguments, attributes and cause, with a note what was being
done, with which sample, in which worker. Only a `StopIteration` is not, since it would end the loop that takes the
batches.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from stallfree.errors import StallfreeError, stop_iteration, text_of

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

log = logging.getLogger("stallfree")

_OURS = os.path.dirname(__file__) + os.sep

PREFIX = "stallfree: "
"""The beginning of each note."""

_SHOWN_IDS = 8


def add_note(error: BaseException, doing: str) -> None:
    """Add the note `doing` to an error, with the worker process if this is one."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    worker = None if torch_data is None else torch_data.get_worker_info()
    place = "" if worker is None else f", in worker {worker.id} (process {os.getpid()})"
    note = f"{PREFIX}{doing}{place}"
    with contextlib.suppress(Exception):  # the class of an error may forbid new attributes
        if note not in notes_of(error):  # an object that is raised again and again
            error.add_note(note)


def note_sample(error: BaseException, source: object, id: int, doing: str) -> None:
    """Add a note to an error that occurred while `doing` (fetching, preparing, ...) sample `id` of `source`."""
    where = ""
    with contextlib.suppress(Exception):  # it only helps to find the sample
        where = source.where(id)  # type: ignore[attr-defined]
    add_note(error, f"{doing} sample {id}{f' ({where})' if where else ''}")


def note_samples(error: BaseException, ids: Sequence[int], doing: str) -> None:
    """Add a note to an error that occurred while `doing` (fetching, collating) the samples `ids`."""
    shown = ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")
    add_note(error, f"{doing} the samples [{shown}]")


def described(error: BaseException) -> str:
    """Return an error in one line: its type, its text, and what was being done."""
    doing = next((f"{note.removeprefix(PREFIX)} failed: " for note in notes_of(error) if note.startswith(PREFIX)), "")
    return f"{doing}{type(error).__name__}: {text_of(error)}".replace("\n", " ")


def is_users(error: BaseException) -> bool:
    """Return whether an error has such a note, and so was raised by the user's code."""
    return any(note.startswith(PREFIX) for note in notes_of(error))


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error."""
    return [str(note) for note in getattr(error, "__notes__", ())]


def raisable(error: E) -> E | StallfreeError:
    """Return `error`; a `BatchError` with its notes in place of a `StopIteration`."""
    if not isinstance(error, StopIteration):
        return error
    stopped = stop_iteration(
        "the data set, a transform or collate_fn raised StopIteration, which would end the loop. Let it raise another "
        "error"
    )
    for note in notes_of(error):
        stopped.add_note(note)
    stopped.__cause__ = error
    return stopped


# -- tracebacks -------------------------------------------------------------------------------------------------------


def users_level() -> int:
    """The `stacklevel` with which a warning names the user's line, for whichever function of this package warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level


def users_traceback(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package; None if there are no others."""
    entries, kept = [], None
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(entries):
        if not entry.tb_frame.f_code.co_filename.startswith(_OURS):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def shorten(error: Exception) -> None:
    """Shorten the traceback of an error that is being raised again: to nothing for one of this package.

    Its text says everything. An error of the user's code keeps the frames of that code, and of libraries; all others
    stay as they are.
    """
    cause = error.__cause__ if error.__cause__ is not None and is_users(error.__cause__) else None
    if isinstance(error, StallfreeError):
        error.__traceback__, error.__cause__ = None, cause
    elif is_users(error):
        error.with_traceback(users_traceback(error.__traceback__))
    if cause is not None:
        cause.with_traceback(users_traceback(cause.__traceback__))


def short_traceback(call: Callable[P, T]) -> Callable[P, T]:
    """Shorten the tracebacks of the errors of a public constructor or function."""

    @wraps(call)
    def called(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return call(*arguments, **options)
        except Exception as error:
            shorten(error)
            raise

    return called
