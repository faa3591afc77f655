"""Argument checks of sample caches, the `MISS` value, and the stub of a closed cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.memory.layout import Meta
from stallfree.errors import FingerprintError, IdError, cache_ids, object_closed
from stallfree.frames import users_level
from stallfree.pipeline.fingerprint import differing_parts
from stallfree.units import format_size

Array = npt.NDArray[Any]


class _Miss:
    def __repr__(self) -> str:
        return "MISS"

    def __reduce__(self) -> str:
        return "MISS"


MISS = _Miss()
"""The value of a sample that is not in the cache; None may be a sample."""


EVERY_STEP = 1 << 20
"""More steps than any pipeline has; see `SampleCache.uncached_steps`."""


def check_same(meta: Meta, path: Path, fingerprint: str, num_ids: int, policy: str) -> None:
    """Raise `FingerprintError` if the cache in the folder `path` is not the requested one."""
    for field, found, requested in (
        ("fingerprint", meta.fingerprint, fingerprint),
        ("number of samples", meta.num_ids, num_ids),
        ("policy", meta.policy, policy),
    ):
        if found != requested:
            differences = differing_parts(str(found), str(requested)) or f"its {field} is {found}, yours is {requested}"
            raise FingerprintError(
                f"the cache {path.name!r} in {path.parent} holds other data: {differences}. "
                f"Give another name, or remove it with `stallfree cache rm {path.name}`"
            )


def warn_of_capacity(meta: Meta, path: Path, size: int) -> None:
    """Warn if the existing cache in the folder `path` has another capacity than `size` bytes."""
    if abs(meta.capacity - size) > size // 16:
        warnings.warn(
            f"the cache {path.name!r} already exists with a capacity of {format_size(meta.capacity)}: the requested "
            f"{format_size(size)} are ignored. Give another name, or remove it with "
            f"`stallfree cache rm {path.name}` when no process uses it",
            RuntimeWarning,
            stacklevel=users_level(),
        )


def checked_ids(ids: Any, num_ids: int) -> Array:
    """`ids` as an array of int64. Raises `InputError` unless they are integers, `IdError` unless 0 to `num_ids` - 1."""
    try:
        array = np.asarray(ids)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise cache_ids(f"ids={ids!r:.80}: give a sequence of integers")
    array = array.astype(np.int64, copy=False)
    if len(array) and (array.min() < 0 or array.max() >= num_ids):
        bad = array[(array < 0) | (array >= num_ids)][0]
        raise IdError(f"id {bad} is outside of the data set: ids are 0 to {num_ids - 1}")
    return array


def checked_pairs(ids: Any, values: Sequence[Any], num_ids: int) -> Array:
    """`ids` as an array of int64. Raises `InputError` as `checked_ids` does, and if `values` has another length."""
    wanted = checked_ids(ids, num_ids)
    if len(wanted) != len(values):
        raise cache_ids(f"put_many was given {len(wanted)} ids and {len(values)} values: give one value for each id")
    return wanted


def checked_scores(scores: Any, count: int) -> Array:
    """`scores` as an array of float64. Raises `InputError` unless they are `count` numbers."""
    try:
        values = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        values = np.empty((0, 0))
    if values.shape != (count,) or np.isnan(values).any():
        raise cache_ids(
            f"set_scores was given {count} ids and the scores {scores!r:.80}: give one number for each id, and no NaN"
        )
    return values


class Closed:
    """Replaces the parts of a closed cache, so that their memory is freed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise object_closed(f"the cache {self._name!r} is closed: make a new one")
