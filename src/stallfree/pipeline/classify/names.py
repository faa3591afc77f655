"""The names by which user code refers to randomness."""

from __future__ import annotations

import re
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np

from stallfree.pipeline._objects import attribute, is_known, module_of
from stallfree.pipeline.classify.reached import reached
from stallfree.pipeline.generators import GENERATOR_TYPES

_NAMES = re.compile(
    r"rand|randn|randu|randint|randrange|randperm|randbelow|randbits|randbytes|rand(n|int)?_like|randShuffle|"
    r"random|random_|random_(sample|integers|raw|bytes|noise)|ranf|default_rng|Random|RandomState|SystemRandom|"
    r"Generator|SeedSequence|PCG64|PCG64DXSM|MT19937|Philox|SFC64|shuffle|choices?|permutation|permuted|"
    r"urandom|getrandom|getrandbits|secrets|token_(bytes|hex|urlsafe)|uuid[1467]|"
    r"gauss|\w+variate|triangular|standard_(normal|cauchy|exponential|gamma|t)|bernoulli\w*|multinomial|rvs|"
    r"(normal|uniform|exponential|cauchy|geometric|log_normal)_|effect_(spread|noise)"
)
"""Names that make or use randomness, whatever has them."""
_LIBRARY_NAMES = re.compile(r"[rR]and\w*|normal|poisson")
"""Further names that do if they are of a known library."""
_MODULES = {"random", "secrets", "mtrand"}
_TYPES = {"collections.abc", "typing"}
"""Modules of types, one of which is `Generator`."""


def random_name(thing: Any) -> str | None:
    """Return where the user's code that a call of `thing` runs names a source of randomness.

    Such as "default_rng in Flip.__call__"; None if it names none.
    """
    found = [(isinstance(value, ModuleType), label) for value, label in reached(thing) if _is_source(value)]
    return min(found, key=itemgetter(0))[1] if found else None  # a module says the least


def _is_source(value: Any) -> bool:
    if isinstance(value, str):
        return any(_NAMES.fullmatch(part) for part in value.split("."))
    if isinstance(value, (*GENERATOR_TYPES, np.random.BitGenerator, np.random.SeedSequence)):
        return True
    module = module_of(value)
    if not is_known(module) or module in _TYPES:
        return False
    if _MODULES.intersection(module.split(".")):
        return True
    name = attribute(value, "__name__") if callable(value) else None
    return isinstance(name, str) and any(names.fullmatch(name) for names in (_NAMES, _LIBRARY_NAMES))
