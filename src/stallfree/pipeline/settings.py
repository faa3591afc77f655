"""Attributes of a data set and its steps, to notice those that change after samples were cached."""

import copy
import sys
import warnings
import weakref
from itertools import islice
from typing import Any

import numpy as np
import torch

from stallfree.errors import StallfreeWarning
from stallfree.frames import users_level
from stallfree.pipeline.objects import CONTAINERS, VALUES, attribute, attributes_used, comes_from

_ITEMS, _SPREAD = 1 << 20, 256
"""Maximum number of items of a container that are compared; of larger ones and of arrays, `_SPREAD` are."""
_NAMESPACES = {"types", "argparse", "functools"}
"""Modules of Python whose objects hold settings."""
_OWN = {"pipeline", "sources", "vision", "clara"}
"""Packages of stallfree whose objects do."""

_State = tuple[type, Any, Any]
"""The type of a value, a reference to it if its identity counts, and what is compared of its content."""


class Settings:
    """The attributes of `things` and of the objects in them, to notice those that change.

    Numbers, texts and containers are compared by value, item by item; arrays and tensors by identity and a sample of
    their elements; all other objects by identity, and by their own attributes. Left out are attributes that the code
    of these objects does not name.
    """

    def __init__(self, *things: Any) -> None:
        self._things = things
        self.note()

    def note(self) -> None:
        """Take the present values as unchanged."""
        used = (each for thing in self._things for each in attributes_used(thing))
        self._states = {  # by the identity of the owner, which is kept alive, and the name
            (id(owner), name): (owner, _state_of(value)) for owner, name, value in used if _is_setting(owner, name)
        }

    def changes(self) -> list[str]:
        """Return what has changed since the last call of `note` or of this method."""
        before = self._states
        self.note()
        return [
            _described(key[1], owner, before[key][1], state)
            for key, (owner, state) in self._states.items()
            if key in before and not _is_same(before[key][1], state)
        ]

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


def _state_of(value: Any) -> _State:
    kind, content = type(value), None
    if isinstance(value, CONTAINERS):
        few = len(value) <= _ITEMS
        return kind, None, (len(value), copy.copy(value) if few else [*islice(value, 0, None, len(value) // _SPREAD)])
    if isinstance(value, torch.Tensor):
        content = value.shape, value.dtype, attribute(value, "_version")
    elif isinstance(value, np.ndarray):
        mapped = isinstance(value, np.memmap)  # whose pages would be read
        content = value.shape, value.dtype, mapped or value.flat[:: max(1, value.size // _SPREAD)].tobytes()
    elif isinstance(value, (*VALUES, range)):
        return kind, None, value
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


def _described(name: str, owner: object, before: _State, now: _State) -> str:
    kind = owner if isinstance(owner, type) else type(owner)
    ours = comes_from(kind, "stallfree")
    what = f"the {name} of type {now[0].__name__}" if ours else f"the attribute {name!r} of {kind.__name__}"
    if before[1] is None is now[1] and not isinstance(now[2], tuple):
        return f"{what} was {before[2]!r:.80} when samples were cached, and is {now[2]!r:.80} now"
    return f"{what} is not what it was when samples were cached"
