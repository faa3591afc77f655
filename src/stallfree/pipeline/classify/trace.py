"""Sees what a call does while it runs: entropy that it takes, also inside libraries, and state that it changes."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from stallfree.pipeline._objects import (
    attributes,
    closure_values,
    comes_from,
    is_library,
    library_version,
    used_globals,
)
from stallfree.pipeline.classify.scan import Finding, sources
from stallfree.pipeline.generators import GENERATOR_TYPES, reachable

_SEEDING = {function.__code__ for function in (random.Random.__init__, random.Random.seed)}
_SYSTEM = {function.__code__ for function in (random.SystemRandom.getrandbits, random.SystemRandom.random)}
"""NumPy calls these also for a generator that then gets a seed."""
_ELSEWHERE = frozenset(
    {
        *("asyncio", "concurrent", "http", "logging", "multiprocessing", "shutil", "socket", "ssl", "subprocess"),
        *("tempfile", "threading", "urllib", "warnings"),
        *("aiobotocore", "aiohttp", "azure", "boto3", "botocore", "filelock", "fsspec", "gcsfs", "google", "grpc"),
        *("huggingface_hub", "requests", "s3fs", "urllib3"),
    }
)
"""Packages that draw for names of files, requests and retries, which do not change what they return."""

_LARGE = 1 << 16
_MANY = 4096


@dataclass
class Trace:
    """Sources of randomness that were used; see `traced`."""

    found: list[Finding] = field(default_factory=list)

    @property
    def finding(self) -> Finding | None:
        """What was found, something certain before all else."""
        return min(self.found, key=lambda finding: not finding.certain, default=None)


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Notes clocks that the user's code reads, and entropy that anything takes, in this thread and in new ones.

    A profiler that is active is set aside meanwhile.
    """
    trace, known = Trace(), sources()

    def see(frame: FrameType, event: str, called: Any) -> None:
        finding = None
        if event == "c_call" and frame.f_code not in _SYSTEM:
            finding = _of_builtin(called, known)
            if finding is not None and not finding.certain and _in_library(frame):
                return
        elif event == "call" and frame.f_code in _SEEDING and _is_unseeded(frame):
            finding = Finding("random.Random() without a seed", True)
        if finding is not None and not _is_elsewhere(frame):
            trace.found.append(finding)

    before = sys.getprofile()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def _of_builtin(called: Any, known: dict[object, Finding]) -> Finding | None:
    owner = getattr(called, "__self__", None)
    if isinstance(owner, torch.Generator):
        return Finding("torch.Generator.seed", True) if called.__name__ == "seed" else None
    try:
        return known.get(called)
    except TypeError:  # not hashable
        return None


def _is_unseeded(frame: FrameType) -> bool:
    """Whether this call of `random.Random` gets no seed."""
    values = frame.f_locals
    return values.get("x", values.get("a", 0)) is None and not isinstance(values.get("self"), random.SystemRandom)


def _in_library(frame: FrameType) -> bool:
    return library_version(str(frame.f_globals.get("__name__"))) is not None


def _is_elsewhere(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _ELSEWHERE:
            return True
        frame = frame.f_back
    return False


State = dict[tuple[int, str], tuple[Any, Any, Any]]


def state_of(step: object) -> State:
    """The values of all attributes and variables that `step` refers to, by the object that holds them and the name.

    States of generators do not count. Containers count with what they hold, large arrays by identity.
    """
    found: State = {}
    for thing in reachable(step):
        if isinstance(thing, GENERATOR_TYPES) or comes_from(type(thing), "albumentations"):
            continue  # albumentations notes in a transform what it last did
        if isinstance(thing, FunctionType):
            if is_library(thing):
                continue
            held = {**used_globals(thing), **closure_values(thing)}
        elif isinstance(thing, (list, dict, tuple, set, frozenset, MethodType)):
            continue  # counts with what holds it
        else:
            held = attributes(thing)
        for name, value in held.items():
            found[id(thing), name] = (_content(value, 3), thing, value)  # held, so that no identity is given again
    return found


def changed(before: State, after: State) -> set[str]:
    """The names under which something is not what it was."""
    return {key[1] for key in before.keys() | after.keys() if _value(before, key) != _value(after, key)}


def _value(state: State, key: tuple[int, str]) -> Any:
    return state[key][0] if key in state else None


def _content(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value).__name__, repr(value) if value != value else value
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _LARGE and not value.dtype.hasobject
        return id(value), value.tobytes() if small else value.shape
    if isinstance(value, torch.Tensor):
        return id(value), value._version if not value.is_inference() else 0
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        if depth == 0 or len(value) > _MANY:
            return type(value).__name__, len(value)
        items = value.items() if isinstance(value, dict) else value
        return type(value).__name__, tuple(_content(item, depth - 1) for item in items)
    return id(value)
