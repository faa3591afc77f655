"""Comparison of samples, bit for bit."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stallfree.pipeline._objects import attributes
from stallfree.pipeline.values import pickled, plain_bytes

_PLAIN = {int, bool, str, bytes, type(None)}
"""Types of which lists are compared at once: of tokens, or the state of a generator."""


def same(a: Any, b: Any) -> bool | None:
    """Return whether `a` and `b` have the same type and value, with NaN equal to NaN; None if that is undecidable."""
    equal = _same(a, b)
    if equal is None:
        with contextlib.suppress(Exception):  # equal pickles prove it; equal values may have different ones
            return True if pickled(a) == pickled(b) else None
    return equal


def _same(a: Any, b: Any) -> bool | None:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        equal = _same_tensor(a, b)
        return equal if a.is_nested else _all((equal, _same(vars(a), vars(b))))
    if isinstance(a, (np.ndarray, np.generic)):
        return _same_array(np.asarray(a), np.asarray(b))
    if isinstance(a, (float, complex)):
        kind = float if isinstance(a, float) else complex
        return kind.__repr__(a) == kind.__repr__(b)  # 0.0 and -0.0 are equal, NaN is not equal to itself
    if isinstance(a, (str, bytes, bytearray, int, enum.Enum, set, frozenset, range, torch.dtype)):
        return bool(a == b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and _all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        kinds = list(map(type, a))
        if type(a) in (list, tuple) and _PLAIN.issuperset(kinds) and a == b and kinds == list(map(type, b)):
            return True
        return len(a) == len(b) and _all(map(_same, a, b))
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if image is not None and isinstance(a, image):
        return (a.mode, a.size, a.getpalette(), a.tobytes()) == (b.mode, b.size, b.getpalette(), b.tobytes())
    return _same_object(a, b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    if a.is_nested or b.is_nested:  # they have no shapes that can be compared, but equal pickles if they are equal
        return None if a.is_nested and b.is_nested else False
    if (a.dtype, a.shape, a.device, a.layout) != (b.dtype, b.shape, b.device, b.layout):
        return False
    left, right = plain_bytes(a), plain_bytes(b)
    if left is None or right is None:
        return None
    return left[0] == right[0] and torch.equal(left[1], right[1])


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        return _all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
    return a.tobytes() == b.tobytes()


def _same_object(a: Any, b: Any) -> bool | None:
    if any("__eq__" in vars(cls) for cls in type(a).__mro__[:-1]):
        try:
            return bool(a == b)
        except Exception:  # `__eq__` returns no truth value
            return None
    own = attributes(a)
    return _same(own, attributes(b)) if own else None


def _all(verdicts: Any) -> bool | None:
    found = list(verdicts)
    if False in found:
        return False
    return None if None in found else True
