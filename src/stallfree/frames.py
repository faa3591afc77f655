"""Frames of this package: the user's line for warnings, and short tracebacks of its own errors."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from stallfree.errors import StallfreeError
from stallfree.notes import is_users

_OURS = os.path.dirname(__file__) + os.sep

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Exception)


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


def shortened(error: E) -> E:
    """Return an error with a short traceback: nothing of an error of this package, whose text says everything.

    An error of the user's code has the frames of that code, and of libraries. All others stay as they are.
    """
    if isinstance(error, StallfreeError):
        cause = error.__cause__
        error.__cause__ = cause if cause is not None and is_users(cause) else None
        return error.with_traceback(None)
    return error.with_traceback(users_traceback(error.__traceback__)) if is_users(error) else error


def short_traceback(call: Callable[P, T]) -> Callable[P, T]:
    """Shorten the tracebacks of the errors of a public constructor or function."""

    @wraps(call)
    def called(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return call(*arguments, **options)
        except Exception as error:
            raise shortened(error)  # noqa: B904

    return called
