"""A flip by a seeded generator, in the places where a generator can be: `fresh` imports them anew."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

SEED = 1
P = 0.5
HIDDEN = False
"""What the modules of this package read when they are imported."""


def fresh(seed: int, *, p: float = 0.5, hidden: bool = False) -> dict[str, Callable[[Any], Any]]:
    """Return the steps by place, with new generators; if `hidden`, ones that no name in the code of a step shows."""
    global SEED, P, HIDDEN
    SEED, P, HIDDEN = seed, p, hidden
    for name in [name for name in sys.modules if name.startswith(f"{__name__}.")]:
        del sys.modules[name]
    steps: dict[str, Callable[[Any], Any]] = importlib.import_module(f"{__name__}.places").STEPS
    return steps
