"""Copies of a data set in which attributes have other values, and data sets that are indexed without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
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


def lazily_made(dataset: Any) -> Callable[[], None]:
    """Returns a function that drops what `dataset`, and the data sets in its attributes, make from now on.

    That is the value of each attribute that is None or not there now: a file that is opened or a pool of threads that
    is started for the first sample. Processes that are forked later cannot use these, and make their own.
    """
    before = [(attributes, dict(attributes)) for attributes in _attributes(dataset, 0)]

    def drop() -> None:
        for attributes, old in before:
            for name, value in list(attributes.items()):
                if name not in old:
                    del attributes[name]
                elif old[name] is None and value is not None:
                    attributes[name] = None

    return drop


_DEEPEST = 8


def _attributes(dataset: Any, depth: int) -> Iterator[dict[str, Any]]:
    """The attributes of a data set, and of those that it is made of, as `Subset` and `ConcatDataset` are."""
    attributes = getattr(dataset, "__dict__", None)
    if not isinstance(attributes, dict) or depth > _DEEPEST:
        return
    yield attributes
    for value in list(attributes.values()):
        for part in value[:_DEEPEST] if type(value) in (list, tuple) else (value,):
            if hasattr(type(part), "__getitem__") and hasattr(part, "__dict__"):
                yield from _attributes(part, depth + 1)


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
