"""Scans the code that a step can reach for sources of randomness that generator states do not show.

The bytecode of the step's own functions is read, and that of the user functions they call. Each name is resolved to its
object, so `np.random.default_rng` is found under any alias. Calls inside libraries are not read; `trace` sees those
that a trial makes.
"""

from __future__ import annotations

import builtins
import dis
import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from stallfree.pipeline._objects import attribute, attributes, class_functions, closure_values, is_library
from stallfree.pipeline.generators import CONTAINERS, GENERATOR_TYPES, is_opaque, reachable, references

_ENTROPY = {
    "os": ("urandom", "getrandom"),
    "uuid": ("uuid1", "uuid4", "uuid6", "uuid7", "uuid8"),
    "secrets": ("choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe", "SystemRandom"),
    "random": ("SystemRandom",),
    "torch": ("seed",),
    "torch.random": ("seed",),
}
_CLOCKS = {
    "time": (
        *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"),
        *("process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns"),
    ),
    "os": ("getpid", "times"),
    "threading": ("get_ident", "get_native_id", "current_thread"),
    "builtins": ("id",),
}
_NOW = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
_GENERATORS = (random.Random, np.random.RandomState, np.random.SeedSequence, np.random.BitGenerator)
"""Without a seed, these take one from the operating system, as `default_rng` does."""
_MODULES = ("random", "numpy.random", "secrets", "os", "time", "uuid")
_DEVICES = ("/dev/urandom", "/dev/random")

_CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__setstate__", "__getstate__", "__reduce__", "__del__")
_UNCALLED = (*_CONSTRUCTORS, "__repr__", "__str__", "__format__")
_ENTRIES = ("__call__", "forward", "__getitem__", "__getitems__")
_SKIPPED = frozenset({"PUSH_NULL", "PRECALL", "CACHE", "NOP", "EXTENDED_ARG", "KW_NAMES", "NOT_TAKEN"})
_CALLS = frozenset({"CALL", "CALL_FUNCTION", "CALL_METHOD"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_LOADS = _ATTRIBUTES | {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
_COPIES = frozenset({"COPY", "DUP_TOP", "DUP_TOP_TWO"})
_WRITES = frozenset({"append", "add", "extend", "update"})
_NAMED = (FunctionType, BuiltinFunctionType, type)
_UNKNOWN = object()


@dataclass(frozen=True)
class Finding:
    """A source of randomness in the code of a step.

    Attributes:
        what: its name, such as `time.time`.
        certain: whether its results are random, as those of an unseeded generator are. A clock may only measure.
    """

    what: str
    certain: bool


@dataclass(frozen=True)
class Scan:
    """The result of scanning a step's code.

    Attributes:
        finding: what makes the step random or doubtful, certain findings first; None if there is nothing.
        read: names of attributes and variables that the code reads. A name that is only written, such as a counter for
            statistics, does not influence the output.
    """

    finding: Finding | None
    read: frozenset[str]


def scan(step: object) -> Scan:
    """Scan the code that `step` can reach: its functions and methods, and the user functions that they call."""
    calls = _Calls(step)
    findings = [*_kept_sources(step), *calls.findings()]
    findings.sort(key=lambda finding: not finding.certain)
    return Scan(findings[0] if findings else None, frozenset(calls.read))


def sources() -> dict[object, Finding]:
    """Return the functions and classes of loaded modules whose results do not depend on their arguments alone."""
    found: dict[object, Finding] = {}
    for table, certain in ((_ENTROPY, True), (_CLOCKS, False)):
        for module, names in table.items():
            there = vars(sys.modules[module]) if module in sys.modules else {}
            found.update((there[name], Finding(f"{module}.{name}", certain)) for name in names if name in there)
    return found


def _kept_sources(step: object) -> Iterator[Finding]:
    """Yield the sources held by the objects to which `step` refers."""
    known = sources()
    for thing in reachable(step):
        if isinstance(thing, random.SystemRandom):
            yield Finding("random.SystemRandom", True)
        elif isinstance(thing, _NAMED) and thing in known:
            yield known[thing]
        elif isinstance(thing, GeneratorType) or (
            type(thing).__module__ in ("builtins", "itertools") and hasattr(type(thing), "__next__")
        ):
            yield Finding(f"an iterator that it keeps ({type(thing).__name__})", False)


class _Calls:
    """The functions of user code that a step can call, found by following names."""

    def __init__(self, step: object) -> None:
        self.read: set[str] = set()
        self._sources = sources()
        self._updated: dict[str, Finding] = {}
        self._todo: list[tuple[CodeType, dict[str, Any], dict[str, Any]]] = []
        self._codes: set[CodeType] = set()
        self._names: set[str] = set(_ENTRIES)
        self._methods: list[FunctionType] = []  # methods of reachable objects: called if their name is used
        self._classes: set[type] = set()
        self._held: dict[int, object] = {}
        self._found: list[Finding] = []
        self._cached: set[CodeType | None] = set()
        self._hold(step)

    def findings(self) -> Iterator[Finding]:
        known = [step for step in self._methods if self._is_used(step.__name__)]
        while known or self._todo:
            self._methods = [step for step in self._methods if not self._is_used(step.__name__)]
            for function in known:
                self._function(function)
            while self._todo:
                yield from self._follow(*self._todo.pop())
            known = [step for step in self._methods if self._is_used(step.__name__)]
        yield from self._found
        yield from (finding for name, finding in self._updated.items() if name in self.read)

    def _is_used(self, name: str) -> bool:
        special = name.startswith("__") and name.endswith("__")
        return (name in self._names or special) and name not in _UNCALLED

    def _hold(self, thing: Any) -> None:
        """Register what `thing` is or holds as callable: functions, also in containers, and methods of objects."""
        root, todo = thing, [thing]
        while todo:
            thing = todo.pop()
            if id(thing) in self._held or (is_opaque(thing) and not isinstance(thing, type)):
                continue
            self._held[id(thing)] = thing
            if thing is not root and _makes_generators(thing):
                self._found.append(Finding(f"{thing.__module__}.{thing.__name__}, which it keeps", False))
            if attribute(thing, "cache_info") is not None:  # results of functools.cache outlive the call
                self._cached.add(attribute(attribute(thing, "__wrapped__"), "__code__"))
            if isinstance(thing, FunctionType):
                self._function(thing)
                todo += (*closure_values(thing).values(), *(thing.__defaults__ or ()))
            elif isinstance(thing, (BuiltinFunctionType, MethodType, functools.partial, *CONTAINERS)):
                todo += references(thing)
            elif isinstance(thing, type):
                self._made(thing)
            elif not isinstance(thing, GENERATOR_TYPES):
                self._object(thing)
                todo += attributes(thing).values()

    def _made(self, cls: type) -> None:
        """Register that an instance of `cls` may be created."""
        if not is_library(cls):
            self._class(cls)
            for base in cls.__mro__:
                for function in class_functions(base):
                    if function.__name__ in _CONSTRUCTORS:
                        self._function(function)

    def _function(self, function: FunctionType) -> None:
        if is_library(function):
            return
        self._code(function.__code__, function.__globals__, closure_values(function))

    def _code(self, code: CodeType, names: dict[str, Any], closure: dict[str, Any]) -> None:
        if code not in self._codes and code.co_name != "__annotate__":  # evaluates annotations (PEP 649)
            self._codes.add(code)
            self._todo.append((code, names, closure))

    def _object(self, thing: Any) -> None:
        """Register that the methods of `thing` may be called."""
        for cls in type(thing).__mro__:
            if not is_library(cls):
                self._class(cls)

    def _class(self, cls: type) -> None:
        libraries = [base for base in cls.__mro__ if base is not object and is_library(base)]
        for base in cls.__mro__:
            if base not in self._classes and not is_library(base):
                self._classes.add(base)
                for function in class_functions(base):
                    self._methods.append(function)
                    if any(hasattr(library, function.__name__) for library in libraries):
                        self._names.add(function.__name__)  # the library calls it

    def _follow(self, code: CodeType, names: dict[str, Any], closure: dict[str, Any]) -> Iterator[Finding]:
        """Walk the instructions of `code` and yield findings for the objects that they load."""
        steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
        imported: dict[str, Any] = {}
        module: Any = _UNKNOWN
        there: Any = _UNKNOWN  # the object loaded by the last instructions
        for place, step in enumerate(steps):
            op, name, owner = step.opname, step.argval, there
            there = _UNKNOWN
            if op in ("LOAD_GLOBAL", "LOAD_NAME"):
                there = names.get(name, vars(builtins).get(name, _UNKNOWN))
            elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
                there = closure.get(name, _UNKNOWN)
            elif op.startswith("LOAD_FAST"):
                there = imported.get(name[-1] if isinstance(name, tuple) else name, _UNKNOWN)
            elif op in _ATTRIBUTES:
                there = _attribute(owner, name)
                self._names.add(name)
                if isinstance(owner, type) and owner.__module__ == "datetime" and (owner.__name__, name) in _NOW:
                    yield Finding(f"{owner.__name__}.{name}", False)
                if name == "seed" and _arguments(steps, place + 1) == 0:
                    yield Finding("seed() without a number", True)
            elif op == "IMPORT_NAME":
                whole = steps[place - 1].argval is not None  # from a.b import ..., not import a.b
                there = module = sys.modules.get(name if whole else name.partition(".")[0], _UNKNOWN)
            elif op == "IMPORT_FROM":
                there = _attribute(module, name)
            elif op == "STORE_FAST" and isinstance(name, str) and owner is not _UNKNOWN:
                imported[name] = owner
            elif op == "LOAD_CONST" and isinstance(name, CodeType):
                self._code(name, names, closure)
            elif op == "LOAD_CONST" and any(each in str(name) for each in _DEVICES):
                yield Finding("/dev/urandom", True)
            if op in _LOADS and not _is_update(steps, place):
                self.read.add(name)
            if (kept := _updated(steps, place, code)) is not None:
                self._updated[kept] = Finding(f"{kept}, which each call may change", False)
            if there is not _UNKNOWN:
                if not isinstance(there, ModuleType):
                    self._hold(there)
                elif there.__name__ in _MODULES and _is_passed_on(steps, place):
                    yield Finding(f"the module {there.__name__} as a value", False)
                source = self._sources.get(there) if isinstance(there, _NAMED) else None
                yield from _made(there, steps, place, code in self._cached) if source is None else (source,)


def _attribute(owner: Any, name: str) -> Any:
    """Return the attribute `name` of a module or class, without calling descriptors."""
    if isinstance(owner, ModuleType):
        return vars(owner).get(name, _UNKNOWN)
    if isinstance(owner, type):
        for cls in owner.__mro__:
            if name in vars(cls):
                found = vars(cls)[name]
                return getattr(found, "__func__", found)
    return _UNKNOWN


def _made(thing: Any, steps: list[dis.Instruction], place: int, cached: bool) -> Iterator[Finding]:
    """Yield a finding if `thing`, loaded at `place`, makes a generator without a seed, or one that outlives the call.

    The result of a function outlives the call if its results are `cached`.
    """
    if thing is object and _arguments(steps, place + 1) == 0:
        yield Finding("object()", False)
    elif thing is torch.Generator:  # its seed is constant unless it is set
        if cached or _is_kept(steps, place):
            yield Finding("torch.Generator, which a call makes and keeps", False)
    elif _makes_generators(thing):
        name, given = f"{thing.__module__}.{thing.__name__}", _arguments(steps, place + 1)
        after = steps[place + 1] if place + 1 < len(steps) else None
        if given == 0:
            yield Finding(f"{name}() without a seed", True)
        elif after is None or after.opname.startswith(("STORE_", "RETURN_")):
            yield Finding(name, False)
        elif after.opname == "LOAD_CONST" and after.argval is None and _arguments(steps, place + 2) == 1:
            yield Finding(f"{name}(None), which has no seed", True)
        elif given is None and (cached or _is_kept(steps, place)):
            yield Finding(f"{name}, a generator that a call makes and keeps", False)


def _makes_generators(thing: Any) -> bool:
    if isinstance(thing, type):
        return issubclass(thing, _GENERATORS)
    return thing is np.random.default_rng


def _is_kept(steps: list[dis.Instruction], place: int) -> bool:
    """Return whether the generator made by the statement at `place` is stored outside of the call."""
    for step in steps[place + 1 :]:
        if step.opname.startswith("STORE_"):
            return step.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR")
        if step.opname in _ATTRIBUTES and step.argval == "manual_seed":
            continue
        if step.opname in ("LOAD_METHOD", "POP_TOP") or step.opname.startswith(("RETURN_", "POP_JUMP")):
            return False
    return False


def _is_passed_on(steps: list[dis.Instruction], place: int) -> bool:
    """Return whether the object loaded at `place` is used as a value, not for one of its attributes."""
    after = steps[place + 1].opname if place + 1 < len(steps) else ""
    return after.startswith(("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "CALL"))


def _arguments(steps: list[dis.Instruction], place: int) -> int | None:
    """Return the number of arguments of the call at `place`; None if there is no call."""
    return steps[place].arg if place < len(steps) and steps[place].opname in _CALLS else None


def _is_update(steps: list[dis.Instruction], place: int) -> bool:
    """Return whether the object loaded at `place` is only updated, as in `n += 1`, `n[k] += 1` and `n.append(1)`."""
    after = [step.opname for step in steps[place + 1 : place + 4]]
    if place and steps[place].opname in _ATTRIBUTES and steps[place - 1].opname in _COPIES:
        return True
    if after and after[0] in _ATTRIBUTES and steps[place + 1].argval in _WRITES:
        return True
    if len(after) > 1 and after[1] in _COPIES:
        return True
    return len(after) > 2 and _in_place(steps[place + 2]) and steps[place + 3].argval == steps[place].argval


def _updated(steps: list[dis.Instruction], place: int, code: CodeType) -> str | None:
    """Return the name of a variable that outlives the call and is updated in place at `place`, such as a counter."""
    if _in_place(steps[place]):
        for step in steps[place + 1 : place + 3]:
            if step.opname in ("STORE_ATTR", "STORE_GLOBAL") or step.argval in code.co_freevars:
                return str(step.argval)
            if step.opname not in ("SWAP", "ROT_TWO"):
                break
    return None


def _in_place(step: dis.Instruction) -> bool:
    return step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
