"""The random generators that a transform draws from, as handles that can be saved, seeded and restored."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from stallfree.pipeline._objects import attributes, class_functions, is_library, named_values

GENERATOR_TYPES = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)

_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    np.ndarray,
    np.generic,
    torch.Tensor,
    type,
    ModuleType,
    PurePath,
)
_WITHOUT_REFERENCES = (*_OPAQUE, *GENERATOR_TYPES)
_INERT = frozenset({str, bytes, int, float, bool, complex, type(None), type(PurePath()), type(Path())})
_MOST = 4096
"""Items of a container that are searched: data sets list a million samples, without generators among them."""

_UNCALLED = ("__repr__", "__annotate__")
"""Methods that no sample depends on. From Python 3.13 on, `__repr__` of a dataclass refers to `threading.get_ident`."""

_COMMON = (FunctionType, str, type(None))
"""Most members of a class: that they are no generators is found faster than by `GENERATOR_TYPES`."""

CONTAINERS = (dict, list, tuple, set, frozenset)  # no others: iterating over a data set would load it


@dataclass(frozen=True)
class Handle:
    """Saves, seeds and restores one generator."""

    generator: object
    seed: Callable[[int], Any]
    """Takes a seed of 0 to 2**64 - 1. Generators with a shorter seed use its low bits."""
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def handle_of(generator: Any) -> Handle:
    """Return the handle of a generator of one of `GENERATOR_TYPES`."""
    if isinstance(generator, random.Random):
        return Handle(generator, generator.seed, generator.getstate, generator.setstate)
    if isinstance(generator, torch.Generator):
        return Handle(generator, generator.manual_seed, generator.get_state, generator.set_state)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return Handle(
            generator, functools.partial(_seed_bits, bits), lambda: bits.state, functools.partial(_set_bits, bits)
        )
    get, bits = functools.partial(generator.get_state, legacy=False), generator._bit_generator
    if isinstance(bits, np.random.MT19937):
        return Handle(generator, lambda seed: generator.seed(seed & 0xFFFFFFFF), get, generator.set_state)
    return Handle(generator, functools.partial(_seed_bits, bits), get, generator.set_state)


def global_generators() -> list[Handle]:
    """Return handles of Python's, NumPy's legacy and torch's default CPU generator, in this order."""
    return [handle_of(generator) for generator in _globals()]


def _globals() -> tuple[object, ...]:
    return random.seed.__self__, np.random.mtrand._rand, torch.default_generator  # type: ignore[attr-defined]


def find_generators(transform: object) -> list[Handle]:
    """Return the generators that `transform` owns or refers to, each once, without the global ones.

    Searches attributes, slots, containers, closures, partial functions, bound methods and, in user code, default values
    and module-level names. Generators inside compiled library code, and those created only while the transform runs,
    are not found.
    """
    known = {id(generator) for generator in _globals()}
    return [
        handle_of(thing)
        for thing in reachable(transform)
        if isinstance(thing, GENERATOR_TYPES) and not isinstance(thing, random.SystemRandom) and id(thing) not in known
    ]


@contextlib.contextmanager
def preserved(handles: list[Handle]) -> Iterator[None]:
    """Restore the generators of `handles` to their initial states at the end of the block."""
    states = [handle.get() for handle in handles]
    try:
        yield
    finally:
        for handle, state in zip(handles, states, strict=True):
            handle.set(state)


def _seed_bits(bits: Any, seed: int) -> None:
    bits.state = type(bits)(seed).state


def _set_bits(bits: Any, state: Any) -> None:
    bits.state = state


def reachable(root: object) -> Iterator[object]:
    """Yield all objects reachable from `root` through references, in a fixed order, each once."""
    seen: dict[int, object] = {}  # keeps objects alive, so that no identity is reused meanwhile
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or (is_opaque(thing) and thing is not root):
            continue
        seen[id(thing)] = thing
        yield thing
        todo.extend(reversed(list(references(thing))))


def is_opaque(thing: object) -> bool:
    """Return whether `thing` is a value, class or module, which refers to no generator of its own."""
    return isinstance(thing, _OPAQUE)


def references(thing: Any) -> Iterator[object]:
    """Yield the objects that `thing` refers to."""
    if isinstance(thing, _WITHOUT_REFERENCES):
        return
    if isinstance(thing, FunctionType):
        if not is_library(thing):
            yield from thing.__defaults__ or ()
            yield from (thing.__kwdefaults__ or {}).values()
            yield from named_values(thing).values()
        elif hasattr(thing, "__wrapped__"):
            yield thing.__wrapped__
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, BuiltinFunctionType):
        yield thing.__self__
    elif isinstance(thing, CONTAINERS):
        values = thing.values() if isinstance(thing, dict) else thing
        yield from (value for value in islice(values, _MOST) if not _inert(value))
        if type(thing) not in CONTAINERS:
            yield from attributes(thing).values()
    else:
        yield from _references_of_instance(thing)


def _inert(thing: object) -> bool:
    """Return whether `thing` refers to nothing relevant; fast, for data sets that list a million samples."""
    kind = type(thing)
    return kind in _INERT or (kind in (tuple, list) and all(type(item) in _INERT for item in thing))  # type: ignore[attr-defined]


def _references_of_instance(thing: object) -> Iterator[object]:
    own = attributes(thing)
    if type(thing).__module__.partition(".")[0] not in ("logging", "threading", "multiprocessing", "weakref"):
        yield from own.values()
    for cls in type(thing).__mro__:
        yield from (
            value
            for name, value in vars(cls).items()
            if not isinstance(value, _COMMON) and isinstance(value, GENERATOR_TYPES) and name not in own
        )
        if not is_library(cls):
            for function in class_functions(cls):
                if function.__name__ not in _UNCALLED:
                    yield from named_values(function).values()
