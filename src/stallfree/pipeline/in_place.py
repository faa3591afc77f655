"""In-place steps: steps that write their result directly into a batch.

A loader that composes a batch in place calls these steps with `out=`, the batch rows that the sample will fill. A step
that makes an array calls `empty`, which returns such a row if a free one has that shape and dtype, else new memory.
Later steps modify the row itself (`given`).

The row belongs to the batch, so `out` is passed only if the classes of all steps are marked `in_place`: such steps
neither keep nor change their input, except for rows of this sample.
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
    """Mark a class, but not its subclasses: its steps take `out=` and follow the rules above."""
    setattr(cls, _MARK, cls)
    return cls


def works_in_place(step: Transform) -> bool:
    """Return whether the class of `step` is marked."""
    inner: Any = step.transform if type(step) is OnItem else step
    return getattr(inner, _MARK, None) is type(inner)


def empty(out: Out | None, shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
    """Return an uninitialised array: a free row of `out`, or a new one."""
    if out is not None:
        for at, row in enumerate(out.free):
            if row.shape == shape and row.dtype == dtype:
                out.taken.append(row)
                return out.free.pop(at)
    return np.empty(shape, dtype)


def given(out: Out | None, array: Array) -> bool:
    """Return whether `array` is a row that `empty` took from `out`, so that it may be changed."""
    return out is not None and any(array is row for row in out.taken)
