"""Tracebacks as the user needs them: their own frames, and none of this package."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from stallfree.errors import StallfreeError

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")

_OURS = os.path.dirname(__file__) + os.sep
_OPENERS = os.path.join(_OURS, "sources", "reads") + os.sep
"""What stands for `open` and the like: their caller is where an error came up."""

_CARRIERS = os.path.join("concurrent", "futures") + os.sep
"""What carries an error from a thread that fetches."""


def short_traceback(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Decorates what users call: errors that leave it show none of this package's frames. See `shorten`.

    On Python 3.10 the frame of `short` itself stays, because `raise` there ignores a new `__traceback__`.
    """

    @functools.wraps(function)
    def short(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        try:
            return function(*args, **kwargs)
        except StopIteration:
            raise
        except BaseException as error:
            shorten(error)
            raise  # which adds no entry for this frame, as `raise error` would

    return short


class ShortTracebacks(Iterator[Any]):
    """A generator of this package as an iterator, with the same care. Has its `close`."""

    def __init__(self, items: Generator[Any, None, None]) -> None:
        self._items = items
        self.close = items.close

    @short_traceback
    def __next__(self) -> Any:
        return next(self._items)


def users_level() -> int:
    """The `stacklevel` with which a warning names the user's line, for whichever function of this package warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level


def shorten(error: BaseException) -> None:
    """Take this package's frames out of the tracebacks of `error` and of its causes.

    An error that is not raised on purpose keeps the innermost one, which says where it came up.
    """
    on_purpose = isinstance(error, StallfreeError) or not isinstance(error, Exception)
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _without_ours(link.__traceback__, keep_last=not (link is error and on_purpose))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _without_ours(trace: TracebackType | None, *, keep_last: bool) -> TracebackType | None:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept = [entry for entry in entries if not _is_ours(entry)]
    if keep_last and entries and _is_ours(entries[-1]) and not _opens(entries[-1]):
        kept.append(entries[-1])
    if sys.version_info < (3, 11) and entries and _is_ours(entries[0]) and entries[0] not in kept:
        entries[0].tb_next = kept[0] if kept else None  # `raise` continues with this entry
    for number, entry in enumerate(kept, 1):
        entry.tb_next = kept[number] if number < len(kept) else None
    return kept[0] if kept else None


def _opens(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OPENERS)


def _is_ours(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(_OURS) or _CARRIERS in file
