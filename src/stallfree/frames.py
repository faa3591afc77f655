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
        error.__traceback__ = users_traceback(error.__traceback__)
    if cause is not None:
        cause.__traceback__ = users_traceback(cause.__traceback__)


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
