"""Copies of a data set in which attributes have other values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any


def value_at(dataset: Any, name: str) -> Any:
    """The value of a dotted attribute such as `"inner.transform"` or `"datasets.0.transform"`.

    Raises `AttributeError` or `LookupError` if there is none.
    """
    for part in name.split("."):
        dataset = _get(dataset, part)
    return dataset


def with_values(dataset: Any, values: Mapping[str, Any]) -> Any:
    """A shallow copy of `dataset` with `values` at their dotted attributes. Objects on the way are copied too.

    Raises `AttributeError`, `LookupError` or `TypeError` if an attribute does not exist or cannot be set.
    """
    copies: dict[tuple[str, ...], Any] = {(): copy.copy(dataset)}
    for name, value in values.items():
        *path, last = name.split(".")
        for depth, part in enumerate(path):
            above, here = tuple(path[:depth]), tuple(path[: depth + 1])
            if here not in copies:
                copies[here] = copy.copy(_get(copies[above], part))
                _set(copies[above], part, copies[here])
        _set(copies[tuple(path)], last, value)
    return copies[()]


def set_attribute(thing: Any, name: str, value: Any) -> None:
    """Set an attribute, also of a frozen dataclass."""
    try:
        setattr(thing, name, value)
    except AttributeError:
        object.__setattr__(thing, name, value)


def is_same(value: Any, other: Any) -> bool:
    """Whether both are one object; each access to a bound method makes a new one."""
    return value is other or (isinstance(value, MethodType) and bool(value == other))


def _get(thing: Any, part: str) -> Any:
    if isinstance(thing, (list, tuple)):
        return thing[_place(part)]
    return thing[part] if isinstance(thing, dict) else getattr(thing, part)


def _set(thing: Any, part: str, value: Any) -> None:
    if isinstance(thing, (list, tuple)):
        thing[_place(part)] = value  # type: ignore[index]
    elif isinstance(thing, dict):
        thing[part] = value
    else:
        set_attribute(thing, part, value)


def _place(part: str) -> int:
    if not part.isdigit():
        raise LookupError(f"{part!r} is no position in a list")
    return int(part)
