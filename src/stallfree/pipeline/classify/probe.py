"""Determines by code scan and trial runs whether a step gives the same output for the same input."""

from __future__ import annotations

import contextlib
import copy
import enum
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from stallfree.errors import text_of
from stallfree.pipeline._objects import attributes
from stallfree.pipeline.classify.scan import scan
from stallfree.pipeline.classify.trace import State, changed, state_of, traced
from stallfree.pipeline.compose import Transform, as_call
from stallfree.pipeline.generators import (
    Handle,
    find_generators,
    global_generators,
    handle_of,
    preserved,
)
from stallfree.pipeline.values import plain_bytes, private

T = TypeVar("T")

_SEEDS = (0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D)


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

    random: bool | None
    """None if undecided."""
    why: str
    """Why it is random or undecided; empty otherwise."""
    output: Any
    """Result of the first call; None if there was none or it raised."""


def try_step(step: Transform, value: Any) -> Trial:
    """Scan the code of `step`, and run a copy of it twice on copies of `value`. See `try_calls`.

    A finding of the scan counts regardless of the runs, so that chance does not influence the verdict.
    """
    code = scan(step)
    doubt = "" if code.finding is None else f"it uses {code.finding.what}"
    if code.finding is not None and code.finding.certain:
        return Trial(True, doubt, None)
    trial = _copy_of(step)

    def call() -> Any:
        return _copy_of(as_call(trial)(private(value)))  # the result may be a buffer of the step

    try:
        found = try_calls(trial, (call, call), code.read)
    except Exception as error:
        return Trial(None, f"it raised {type(error).__name__}: {text_of(error)}", None)
    return Trial(None, doubt, found.output) if doubt and found.random is False else found


def try_calls(thing: object, calls: Sequence[Callable[[], Any]], read: Set[str]) -> Trial:
    """Make `calls`, which should all return the same, each from a different state of all generators.

    The result is random if a generator moved, a new one appeared, entropy was taken, or the outputs differ. It is
    undecided if a clock was read, or if each call changes a value that the code reads (`read`). All generators are
    restored. Exceptions of the calls are raised.
    """
    handles = all_generators(thing)
    outputs: list[Any] = []
    states: list[State] = []
    with preserved(handles):
        for seed, call in zip(_SEEDS, calls, strict=True):
            for place, handle in enumerate(handles):
                handle.seed(seed + place)
            before = [handle.get() for handle in handles]
            with traced() as trace:
                outputs.append(call())
            if _moved(handles, before):
                return Trial(True, "it drew random numbers", outputs[0])
            if trace.finding is not None:
                return Trial(True if trace.finding.certain else None, f"it uses {trace.finding.what}", outputs[0])
            if len(all_generators(thing)) != len(handles):
                return Trial(True, "it made a generator of random numbers", outputs[0])
            states.append(state_of(thing))
    equal = same(*outputs)
    if equal is None:
        equal = same_pickles(*outputs)
    if equal is None:
        return Trial(None, f"its outputs, of type {type(outputs[0]).__name__}, cannot be compared", outputs[0])
    if not equal:
        return Trial(True, "it returned something else for the same input", outputs[0])
    names = sorted(changed(*states) & read)
    if names:
        return Trial(None, f"each call changes {', '.join(names)}, which it reads", outputs[0])
    return Trial(False, "", outputs[0])


def run_step(step: Transform, value: Any) -> Any:
    """Return `step(value)`; step, value and generators are left unchanged. Raises the exceptions of the step."""
    trial = _copy_of(step)
    with preserved(all_generators(trial)):
        return as_call(trial)(private(value))


def all_generators(step: object) -> list[Handle]:
    """Return the global generators, those of CUDA devices if CUDA is in use, and those that `step` refers to."""
    in_use = torch.cuda.is_initialized()
    devices = torch.cuda.default_generators if in_use else ()
    return [*global_generators(), *map(handle_of, devices), *find_generators(step)]


def same(a: Any, b: Any) -> bool | None:
    """Return whether `a` and `b` have the same type and value, with NaN equal to NaN; None if that is undecidable."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _all((_same_tensor(a, b), same(vars(a), vars(b))))
    if isinstance(a, (np.ndarray, np.generic)):
        return _same_array(np.asarray(a), np.asarray(b))
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    if isinstance(a, (str, bytes, bytearray, int, complex, enum.Enum, set, frozenset, range, torch.dtype)):
        return bool(a == b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and _all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and _all(map(same, a, b))
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if image is not None and isinstance(a, image):
        return (a.mode, a.size, a.getpalette(), a.tobytes()) == (b.mode, b.size, b.getpalette(), b.tobytes())
    return _same_object(a, b)


def same_pickles(a: Any, b: Any) -> bool | None:
    """Return True if `a` and `b` have the same pickle; None if not, since pickles of equal values may differ."""
    with contextlib.suppress(Exception):
        return True if pickle.dumps(a) == pickle.dumps(b) else None
    return None


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool | None:
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
        return _all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    return a.tobytes() == b.tobytes()


def _same_object(a: Any, b: Any) -> bool | None:
    if any("__eq__" in vars(cls) for cls in type(a).__mro__[:-1]):
        try:
            return bool(a == b)
        except Exception:  # `__eq__` returns no truth value
            return None
    own = attributes(a)
    return same(own, attributes(b)) if own else None


def _all(verdicts: Any) -> bool | None:
    found = list(verdicts)
    if False in found:
        return False
    return None if None in found else True


def _moved(handles: list[Handle], before: list[Any]) -> bool:
    return any(not same(handle.get(), state) for handle, state in zip(handles, before, strict=True))


def _copy_of(thing: T) -> T:
    """Return a deep copy of `thing`, so that a trial does not change it; `thing` itself if it cannot be copied."""
    try:
        return copy.deepcopy(thing)
    except Exception:  # such as a lock, an open file or a handle of a C library
        return thing
