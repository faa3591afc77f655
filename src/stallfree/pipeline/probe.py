"""Finding out by trial whether a step gives the same output for the same input."""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from stallfree.pipeline._objects import attributes, code_names
from stallfree.pipeline.compose import Transform, as_call
from stallfree.pipeline.generators import (
    Handle,
    find_generators,
    global_generators,
    handle_of,
    has_system_random,
    preserved,
    used_functions,
)

UNSEEN = frozenset({"default_rng", "SystemRandom", "urandom", "getrandom", "secrets", "uuid1", "uuid4"})
T = TypeVar("T")

_SEEDS = (0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D)


@dataclass(frozen=True)
class Trial:
    """What a trial showed."""

    random: bool | None
    """None when it could not be decided."""
    why: str
    """Why it could not be decided; empty otherwise."""
    output: Any
    """What the step returned in the first run; None when it raised."""


def try_step(step: Transform, value: Any) -> Trial:
    """Run a copy of `step` on copies of `value` from two states of all generators that it may draw from.

    The step is random when a generator moved, a new one appeared or the outputs differ. All generators are put back.
    """
    if has_system_random(step):
        return Trial(True, "", None)
    trial = _copy_of(step)
    handles = all_generators(trial)
    outputs: list[Any] = []
    with preserved(handles):
        try:
            for seed in _SEEDS:
                for place, handle in enumerate(handles):
                    handle.seed(seed + place)
                before = [handle.get() for handle in handles]
                outputs.append(_copy_of(as_call(trial)(copy.deepcopy(value))))  # it may be a buffer of the step
                if _moved(handles, before) or len(all_generators(trial)) != len(handles):
                    return Trial(True, "", outputs[0])
        except Exception as error:
            return Trial(None, f"it raised {type(error).__name__}: {error}", None)
    equal = same(*outputs)
    if equal is None:
        return Trial(None, f"its outputs, of type {type(outputs[0]).__name__}, cannot be compared", outputs[0])
    suspects = UNSEEN & {name for function in used_functions(step) for name in code_names(function.__code__)}
    if equal and suspects:
        return Trial(None, f"it uses {', '.join(sorted(suspects))}, whose numbers a trial cannot control", outputs[0])
    return Trial(not equal, "", outputs[0])


def run_step(step: Transform, value: Any) -> Any:
    """What `step` gives for `value`; step, value and generators stay as they are. Raises what the step raises."""
    trial = _copy_of(step)
    with preserved(all_generators(trial)):
        return as_call(trial)(copy.deepcopy(value))


def all_generators(step: Transform) -> list[Handle]:
    """The global generators, those of CUDA devices when CUDA is in use, and those that `step` refers to."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.default_generators if in_use else ()
    return [*global_generators(), *map(handle_of, devices), *find_generators(step)]


def same(a: Any, b: Any) -> bool | None:
    """Whether `a` and `b` have the same type and value, NaN being equal to NaN; None when that cannot be told."""
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


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    if (a.dtype, a.shape, a.device, a.layout) != (b.dtype, b.shape, b.device, b.layout):
        return False
    try:
        left, right = (x.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg() for x in (a, b))
        return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))
    except (RuntimeError, NotImplementedError):  # layouts that have no plain bytes, such as sparse ones
        return None


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
        except Exception:  # an __eq__ that gives no truth value
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
    """A deep copy of `thing`, so that a trial leaves no trace in it; `thing` itself when it cannot be copied."""
    try:
        return copy.deepcopy(thing)
    except Exception:  # a lock, an open file, a handle of a C library
        return thing
