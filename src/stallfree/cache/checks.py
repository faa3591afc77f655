"""What a sample cache is given, checked; what it gives for a sample that is not there; what is left of a closed one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError

Array = npt.NDArray[Any]


class _Miss:
    def __repr__(self) -> str:
        return "MISS"

    def __reduce__(self) -> str:
        return "MISS"


MISS = _Miss()
"""Stands for a sample that is not in the cache, where None might be a sample."""


def checked_ids(ids: Any, num_ids: int) -> Array:
    """`ids` as an array of int64. Raises `InputError` for what is no list of integers from 0 to `num_ids` - 1."""
    try:
        array = np.asarray(ids)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(f"ids must be a sequence of integers, not {ids!r:.80}")
    array = array.astype(np.int64, copy=False)
    if len(array) and (array.min() < 0 or array.max() >= num_ids):
        bad = array[(array < 0) | (array >= num_ids)][0]
        raise InputError(f"id {bad} is outside of the data set: ids are 0 to {num_ids - 1}")
    return array


def checked_scores(scores: Any, count: int) -> Array:
    """`scores` as an array of float64. Raises `InputError` for what is not `count` numbers."""
    try:
        values = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        values = np.empty((0, 0))
    if values.shape != (count,) or np.isnan(values).any():
        raise InputError(
            f"set_scores was given {count} ids and the scores {scores!r:.80}: give a number for each id, and no NaN"
        )
    return values


class Closed:
    """Stands for the parts of a cache that was closed, so that they are not kept in memory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise InputError(f"the cache {self._name!r} is closed")
