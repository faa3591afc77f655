"""What the user says about a transform: that it is random, or that it is deterministic."""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

from stallfree.errors import InputError

T = TypeVar("T")

MARK = "_stallfree_random"
"""The attribute that carries a mark: True for random, False for deterministic."""

DREW = "_stallfree_drew"
"""The attribute of a transform or data set that was seen to draw random numbers."""

_refusers: dict[tuple[int, ...], tuple[object, bool]] = {}
"""Marks of objects that take no attributes. The object is held, so that its identity is never given to another."""


_drew: dict[tuple[int, ...], object] = {}
"""Objects that drew and take no attributes."""


def mark_random(transform: T) -> T:
    """Say that `transform` may give another output for the same input; returns `transform` itself.

    Works on functions, classes (also as a decorator) and instances, and counts before any other sign. A class that is
    marked random marks its subclasses too. The mark is an attribute of `transform`; for an object that refuses
    attributes (a builtin, a bound method, an instance with slots) it is kept in a table of this process, which also
    keeps the object alive and which does not travel with a pickle.
    """
    return _mark(transform, True)


def mark_deterministic(transform: T) -> T:
    """Say that `transform` always gives the same output for the same input; returns `transform` itself.

    Works as `mark_random` does, but a class that is marked deterministic does not mark its subclasses, which may have
    added randomness.
    """
    return _mark(transform, False)


def mark_of(transform: object) -> bool | None:
    """True when `transform` is marked random, False when it is marked deterministic, None when it is not marked."""
    entry = _refusers.get(_identity(transform))
    if entry is not None:
        return entry[1]
    mark = getattr(transform, MARK, None)
    if mark is False and not _own(transform):
        return None
    return mark if isinstance(mark, bool) else None


def note_drew(transform: object) -> bool:
    """Remember, in this process and in what is pickled, that `transform` drew. False if that is known already."""
    if drew(transform):
        return False
    try:
        setattr(transform, DREW, True)
    except (AttributeError, TypeError):
        _drew[_identity(transform)] = transform
    return True


def drew(transform: object) -> bool:
    """Whether `note_drew` was called with `transform`."""
    return _identity(transform) in _drew or getattr(transform, DREW, False) is True


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
    if isinstance(transform, MethodType):  # every access to a method makes a new object
        return id(transform.__self__), id(transform.__func__)
    return (id(transform),)


def _own(transform: Any) -> bool:
    """Whether the mark lies on `transform` itself or on its very class, and is not inherited from a base class."""
    if isinstance(transform, MethodType):
        transform = transform.__func__
    if MARK in getattr(transform, "__dict__", ()):
        return True
    return not isinstance(transform, type) and MARK in vars(type(transform))
