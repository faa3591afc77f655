"""Notices that attributes of a data set or of its steps have changed."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from stallfree.errors import StallfreeWarning
from stallfree.frames import users_level
from stallfree.pipeline.objects import attribute, comes_from
from stallfree.pipeline.reached import attributes_used

_ITEMS, _SPREAD = 1 << 20, 256
"""Maximum number of items of a container that are compared; of larger ones and of arrays, `_SPREAD` are."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath, np.generic, range)
_NAMESPACES = {"types", "argparse", "functools"}
"""Modules of Python whose objects hold settings."""
_OWN = {"pipeline", "sources", "vision", "clara"}
"""Packages of stallfree whose objects do."""


class Settings:
    """The attributes of `things` and of the objects in them, to notice those that change.

    Numbers, texts and containers are compared by value, item by item; arrays and tensors by identity and a sample of
    their elements; all other objects by identity, and by their own attributes. Left out are attributes that the code
    of these objects does not name.
    """

    def __init__(self, *things: Any) -> None:
        self._things = things
        self._known = self._saved()

    def note(self) -> None:
        """Take the present values as unchanged."""
        self._known = self._saved()

    def changes(self) -> list[str]:
        """Return what has changed since the last call of `note` or of this method."""
        before, self._known = self._known, self._saved()
        return [
            _describe(key[1], owner, before[key][1], state)
            for key, (owner, state) in self._known.items()
            if key in before and not _is_same(before[key][1], state)
        ]

    def _saved(self) -> dict[tuple[int, str], tuple[object, _State]]:
        """Return the state of each attribute, by the identity of its owner, which is kept alive, and its name."""
        used = (each for thing in self._things for each in attributes_used(thing))
        return {(id(owner), name): (owner, _state_of(value)) for owner, name, value in used if _is_setting(owner, name)}

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings, ()  # in another process, which does not look for changes


def warn_of_changes(settings: Settings) -> None:
    """Warn of attributes that have changed since samples were cached."""
    for change in settings.changes():
        warnings.warn(
            f"{change}: the cached samples do not change. Make a new CachedDataset, or move the code that uses it to a "
            "step marked with stallfree.mark_random",
            StallfreeWarning,
            stacklevel=users_level(),
        )


def _is_setting(owner: Any, name: str) -> bool:
    """Return whether an attribute is a setting.

    Those of locks and files, of this package's caches, and of objects with a fingerprint of their own are not.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    top, *inner = kind.__module__.split(".")
    if top == "stallfree":
        return inner[0] in _OWN
    # A step with a fingerprint states its settings there. Data sets and sources state their identity only.
    reads = hasattr(kind, "__getitem__") or hasattr(kind, "fetch")
    if (not reads and callable(getattr(kind, "fingerprint", None))) or (top == "albumentations" and name == "params"):
        return False  # albumentations keeps the parameters of the last call there
    return top in _NAMESPACES or top not in sys.stdlib_module_names


_State = tuple[type, Any, Any]
"""The type of a value, a reference to it if its identity counts, and what is compared of its content."""


def _state_of(value: Any) -> _State:
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, None, value
    if isinstance(value, (set, frozenset)):
        return kind, None, frozenset(value)
    if isinstance(value, (list, tuple, deque)):
        few = len(value) <= _ITEMS
        return kind, None, (len(value), list(value) if few else [value[at] for at in _some(len(value))])
    if isinstance(value, dict):
        return kind, None, (len(value), dict(value) if len(value) <= _ITEMS else None)
    content: Any = None
    if isinstance(value, torch.Tensor):
        content = value.shape, value.dtype, attribute(value, "_version")
    elif isinstance(value, np.ndarray):
        mapped = isinstance(value, np.memmap)  # whose pages would be read
        content = value.shape, value.dtype, mapped or value.flat[[*_some(value.size)]].tobytes()
    try:
        return kind, weakref.ref(value), content
    except TypeError:
        return kind, lambda: value, content


def _is_same(before: _State, now: _State) -> bool:
    if before[0] is not now[0] or (now[1] is not None and before[1]() is not now[1]()):
        return False
    try:
        return bool(before[2] == now[2])
    except Exception:  # items without a truth, such as arrays
        return False


def _some(count: int) -> range:
    return range(0, count, max(1, -(-count // _SPREAD)))


def _describe(name: str, owner: object, before: _State, now: _State) -> str:
    kind = owner if isinstance(owner, type) else type(owner)
    ours = comes_from(kind, "stallfree")
    what = f"the {name} of type {now[0].__name__}" if ours else f"the attribute {name!r} of {kind.__name__}"
    if issubclass(before[0], _PLAIN) and issubclass(now[0], _PLAIN):
        return f"{what} was {before[2]!r:.80} when samples were cached, and is {now[2]!r:.80} now"
    return f"{what} is not what it was when samples were cached"
