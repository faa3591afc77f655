"""Steps that write their result where it is needed: into a batch.

A loader that composes a batch in place calls such steps with `out=`, the rows of the batch that the sample will fill. A
step that makes an array asks `empty` for the memory, and gets such a row if one of that shape and type is still free,
else memory of its own. Steps after it work on the row itself (`given`).

The row belongs to the batch, so `out` is passed only if all steps are of classes that say `in_place`: these neither
keep nor change what they are given, beside rows of this sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stallfree.pipeline.compose import OnItem, Transform

Array = npt.NDArray[Any]
C = TypeVar("C", bound=type)

_MARK = "_stallfree_in_place"


class Out:
    """Rows of a batch that one sample may fill."""

    def __init__(self, rows: Sequence[Array]) -> None:
        self.free = list(rows)
        self.taken: list[Array] = []


def in_place(cls: C) -> C:
    """Say of a class, but not of its subclasses, that its steps take `out=` and keep to the rules above."""
    setattr(cls, _MARK, cls)
    return cls


def works_in_place(step: Transform) -> bool:
    """Whether the class of `step` says so."""
    inner: Any = step.transform if type(step) is OnItem else step
    return getattr(inner, _MARK, None) is type(inner)


def empty(out: Out | None, shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
    """An array that holds anything, to be filled: a free row of `out`, or a new one."""
    if out is not None:
        for at, row in enumerate(out.free):
            if row.shape == shape and row.dtype == dtype:
                out.taken.append(row)
                return out.free.pop(at)
    return np.empty(shape, dtype)


def given(out: Out | None, array: Array) -> bool:
    """Whether `array` is one that `empty` took from `out`, so that it may be changed."""
    return out is not None and any(array is row for row in out.taken)
