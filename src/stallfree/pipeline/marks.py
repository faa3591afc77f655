"""The user's marks on transforms: random or deterministic."""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

from stallfree.errors import InputError
from stallfree.pipeline._objects import attribute

T = TypeVar("T")

MARK = "_stallfree_random"
"""Name of the attribute that carries a mark: True for random, False for deterministic."""

DREW = "_stallfree_drew"
"""Name of the attribute of a transform or data set that was observed to draw random numbers."""

_refusers: dict[tuple[int, ...], tuple[object, bool]] = {}
"""Marks of objects that accept no attributes. The object is kept alive, so that its identity is never reused."""


_drew: dict[tuple[int, ...], object] = {}
"""Objects that drew random numbers and accept no attributes."""


def mark_random(transform: T) -> T:
    """Mark `transform` as random: its output may differ for the same input.

    Returns `transform` itself.

    Works on functions, classes (also as a decorator) and instances, and takes precedence over any other evidence. A
    class marked random marks its subclasses too. The mark is an attribute of `transform`. For an object that rejects
    attributes (a builtin, a bound method, an instance with slots), a table of this process holds it; the table keeps
    the object alive and is not pickled.

    Example:
        ```python
        @sf.mark_random
        def shake(volume):
            return volume + np.random.normal(size=volume.shape)
        ```
    """
    return _mark(transform, True)


def mark_deterministic(transform: T) -> T:
    """Mark `transform` as deterministic: its output is the same for the same input.

    Returns `transform` itself.

    Works like `mark_random`, but a class marked deterministic does not mark its subclasses, which may add randomness.

    Example:
        ```python
        @sf.mark_deterministic
        def window(volume):
            return volume.clip(-57, 164)
        ```
    """
    return _mark(transform, False)


def mark_of(transform: object) -> bool | None:
    """Return True if `transform` is marked random, False if it is marked deterministic, None without a mark."""
    entry = _refusers.get(_identity(transform))
    if entry is not None:
        return entry[1]
    mark = attribute(transform, MARK)
    if mark is False and not _own(transform):
        return None
    return mark if isinstance(mark, bool) else None


def note_drew(transform: object) -> bool:
    """Record, in this process and in pickles, that `transform` drew. Returns False if this is known already."""
    if drew(transform):
        return False
    try:
        setattr(transform, DREW, True)
    except (AttributeError, TypeError):
        _drew[_identity(transform)] = transform
    return True


def drew(transform: object) -> bool:
    """Return whether `note_drew` was called with `transform`."""
    return _identity(transform) in _drew or attribute(transform, DREW) is True


def _mark(transform: T, random: bool) -> T:
    if not callable(transform) and not hasattr(type(transform), "__getitem__"):
        raise InputError(f"{transform!r:.80} cannot be marked: give a transform, a class of them, or a data set")
    try:
        setattr(transform, MARK, random)
    except (AttributeError, TypeError):
        _refusers[_identity(transform)] = (transform, random)
    else:
        _refusers.pop(_identity(transform), None)
    return transform


def _identity(transform: object) -> tuple[int, ...]:
    if isinstance(transform, MethodType):  # each access to a method makes a new object
        return id(transform.__self__), id(transform.__func__)
    return (id(transform),)


def _own(transform: Any) -> bool:
    """Return whether the mark is on `transform` itself or on its class, not inherited from a base class."""
    if isinstance(transform, MethodType):
        transform = transform.__func__
    if MARK in getattr(transform, "__dict__", ()):
        return True
    return not isinstance(transform, type) and MARK in vars(type(transform))
