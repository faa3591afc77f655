"""Where the result of a step is to stand.

A loader that composes a batch in place offers each sample the rows of the batch that it will fill. A step that makes an
array asks `empty` for the memory, and gets such a row if one of that shape and type is still free, else memory of its
own. Steps after it work on the row itself (`given`).

The row belongs to the batch, so nothing is offered unless all steps are of classes that say `in_place`: these neither
keep nor change what they are given, beside rows of this sample.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stallfree.pipeline.compose import OnItem, Transform

Array = npt.NDArray[Any]
C = TypeVar("C", bound=type)

_MARK = "_stallfree_in_place"


class _Offer(threading.local):
    def __init__(self) -> None:
        self.free: list[Array] = []
        self.taken: list[Array] = []


_offer = _Offer()


def in_place(cls: C) -> C:
    """Say of a class, but not of its subclasses, that its steps keep to the rules above."""
    setattr(cls, _MARK, cls)
    return cls


def works_in_place(step: Transform) -> bool:
    """Whether the class of `step` says so."""
    inner: Any = step.transform if type(step) is OnItem else step
    return getattr(inner, _MARK, None) is type(inner)


def offer(rows: Sequence[Array]) -> None:
    """What the next sample that this thread prepares may take; nothing with `()`."""
    _offer.free, _offer.taken = list(rows), []


def empty(shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
    """An array that holds anything, to be filled: a row that is offered to this thread, or a new one."""
    free = _offer.free
    for at, row in enumerate(free):
        if row.shape == shape and row.dtype == dtype:
            _offer.taken.append(row)
            return free.pop(at)
    return np.empty(shape, dtype)


def given(array: Array) -> bool:
    """Whether `array` is one that `empty` gave to this sample out of what was offered, so that it may be changed."""
    return any(array is row for row in _offer.taken)
