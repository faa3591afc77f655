"""Frames of this package: the user's line for warnings, and short tracebacks of its own errors."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from stallfree.errors import StallfreeError

_OURS = os.path.dirname(__file__) + os.sep

P = ParamSpec("P")
T = TypeVar("T")


def users_level() -> int:
    """The `stacklevel` with which a warning names the user's line, for whichever function of this package warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level


def short_traceback(call: Callable[P, T]) -> Callable[P, T]:
    """Leave this package's frames and causes out of the tracebacks of its own errors, whose text says everything.

    For public constructors and functions.
    """

    @wraps(call)
    def called(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return call(*arguments, **options)
        except StallfreeError as error:
            raise error.with_traceback(None) from None

    return called
