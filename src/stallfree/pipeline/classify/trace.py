"""Traces a running call: entropy that it takes, also inside libraries, and state that it changes."""

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
    comes_from,
    is_library,
    library_version,
    named_values,
)
from stallfree.pipeline.classify.scan import Finding, sources
from stallfree.pipeline.generators import GENERATOR_TYPES, reachable

_SEEDING = {function.__code__ for function in (random.Random.__init__, random.Random.seed)}
_SYSTEM = {function.__code__ for function in (random.SystemRandom.getrandbits, random.SystemRandom.random)}
"""NumPy also calls these for a generator that is seeded afterwards."""
_ELSEWHERE = frozenset(
    {
        *("asyncio", "concurrent", "http", "logging", "multiprocessing", "shutil", "socket", "ssl", "subprocess"),
        *("tempfile", "threading", "urllib", "warnings"),
        *("aiobotocore", "aiohttp", "azure", "boto3", "botocore", "filelock", "fsspec", "gcsfs", "google", "grpc"),
        *("huggingface_hub", "requests", "s3fs", "urllib3"),
    }
)
"""Packages that draw for file names, requests and retries, which do not affect their results."""

_LARGE = 1 << 16
_MANY = 4096


@dataclass
class Trace:
    """Sources of randomness that were used; see `traced`."""

    found: list[Finding] = field(default_factory=list)

    @property
    def finding(self) -> Finding | None:
        """The most important finding, certain ones first; None without findings."""
        return min(self.found, key=lambda finding: not finding.certain, default=None)


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Record clocks read by user code, and entropy taken by any code, in this thread and in new ones.

    An active profiler is suspended meanwhile.
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
    """Return whether this call of `random.Random` gets no seed."""
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
    """Return the values of all attributes and variables that `step` refers to, by their holder's identity and their
    name.

    Generator states are excluded. Containers are compared by content, large arrays by identity.
    """
    found: State = {}
    for thing in reachable(step):
        if isinstance(thing, GENERATOR_TYPES) or comes_from(type(thing), "albumentations"):
            continue  # albumentations records its last application in a transform
        if isinstance(thing, FunctionType):
            if is_library(thing):
                continue
            held = named_values(thing)
        elif isinstance(thing, (list, dict, tuple, set, frozenset, MethodType)):
            continue  # included with its holder
        else:
            held = attributes(thing)
        for name, value in held.items():
            found[id(thing), name] = (_content(value, 3), thing, value)  # kept alive, so that no identity is reused
    return found


def changed(before: State, after: State) -> set[str]:
    """Return the names whose values differ."""
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
