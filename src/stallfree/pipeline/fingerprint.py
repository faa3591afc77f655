"""Fingerprints of code and parameters: short texts that serve as cache keys of prepared samples."""

from __future__ import annotations

import copyreg
import enum
import functools
import inspect
import logging
import reprlib
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

from stallfree.errors import InputError, StallfreeError
from stallfree.pipeline._objects import attribute, closure_values, comes_from, library_version, used_globals
from stallfree.pipeline.generators import GENERATOR_TYPES
from stallfree.pipeline.marks import DREW, MARK
from stallfree.pipeline.values import plain_bytes

_TRANSIENT = frozenset({"params", "applied_in_replay", "seed", "_images_was_list", "_masks_was_list"})
"""State that albumentations stores in a transform while it runs, or that concerns only its generators."""
_OF_PROCESS = frozenset({"_pid", "_cache", "_latest", "_lock"})
"""Class attributes of fsspec's file systems that differ between processes."""
_MANY = 256
"""Length from which a list of plain values is hashed in bulk: data sets list a million samples."""
_VALUES = (list, tuple, dict, set, frozenset, np.ndarray, np.generic, torch.Tensor, enum.Enum, functools.partial)


def fingerprint(*objects: Any) -> str:
    """Return 32 hexadecimal digits that change when the code or a parameter of one of `objects` changes.

    The result is the same in every process and under every hash seed, for one version of Python. Covered are plain
    values (`1`, `1.0` and `True` differ), arrays, tensors and containers; functions with their defaults, closures and
    the module-level values that they use; user classes with the code of their methods; instances with their attributes;
    for libraries, names and versions. File names, line numbers, the order of a mapping's keys and the states of random
    generators are ignored.

    An object with a method `fingerprint()` without required arguments is represented by that method's result, together
    with its `pipeline` if it is a source.

    Raises `InputError`, which names the object, for an object without inspectable state, such as a lock or an open
    file. Within `tolerant`, only the type of such an object is hashed.
    """
    walker = _Walker({}, 0)
    try:
        for thing in objects:
            walker.visit(thing)
    except RecursionError as error:
        unknown = _unknown.get()
        what = f"the {' and '.join(type(thing).__qualname__ for thing in objects)}"
        if unknown is None:
            raise NoFingerprintError(
                f"{what} cannot be fingerprinted, as it is nested too deeply: give it a method fingerprint()"
            ) from error
        unknown.append(f"{what}, which is nested too deeply,")
        walker = _Walker({}, 0)  # the part that was hashed depends on the caller's stack depth
        walker.visit([f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in objects])
    return walker.hash.hexdigest()


class NoFingerprintError(InputError):
    """Raised for an object without a fingerprint."""

    page = "no-fingerprint"


_unknown: ContextVar[list[str] | None] = ContextVar("unknown", default=None)


@contextmanager
def tolerant() -> Iterator[list[str]]:
    """Hash only the type of objects without a fingerprint inside the block. Yields the list of such objects."""
    found: list[str] = []
    token = _unknown.set(found)
    try:
        yield found
    finally:
        _unknown.reset(token)


def key_of(**parts: Any) -> str:
    """Return the fingerprint of `parts`, followed by one per part: texts unchanged, other objects as fingerprints."""
    parts_of = {name: part if isinstance(part, str) else fingerprint(part) for name, part in parts.items()}
    return f"{fingerprint(sorted(parts_of.items()))} " + ";".join(f"{name}={part}" for name, part in parts_of.items())


def differing_parts(there: str, wanted: str) -> str:
    """Return the parts in which two keys of `key_of` differ, as text; empty for other texts."""
    parts = [dict(pair.split("=", 1) for pair in key[33:].split(";") if "=" in pair) for key in (there, wanted)]
    if not all(parts):
        return ""
    return "; ".join(
        f"its {name} {'is ' if name in _SHOWN else 'differ' if name.endswith('s') else 'differs'}"
        + (f"{parts[0].get(name)}, yours is {part}" if name in _SHOWN else " from yours in code, parameters or files")
        for name, part in parts[1].items()
        if parts[0].get(name) != part
    )


_SHOWN = ("form", "format", "window")


class _Walker:
    """Feeds objects to a hash in sequence, each as a tag, a length and its content."""

    def __init__(self, numbers: dict[int, tuple[int, object]], count: int) -> None:
        self.hash = xxhash.xxh3_128()
        self._numbers = numbers
        """Objects in progress or already fed, by identity, with their number; kept alive so that ids stay unique."""
        self._count = count
        """The number of the next object."""
        self._path: list[str] = []
        """The names that lead to the object in progress, for messages."""

    def visit(self, thing: Any) -> None:
        if self._plain(thing):
            return
        if isinstance(thing, MethodType):
            self._feed("method")
            self.visit(thing.__self__)
            self.visit(thing.__func__)
            return
        if id(thing) in self._numbers:
            self._feed("again", str(self._numbers[id(thing)][0]).encode())
            return
        self._numbers[id(thing)] = (self._count, thing)
        self._count += 1
        depth = len(self._path)
        try:
            self._compound(thing)
        except (RecursionError, StallfreeError):
            raise
        except Exception as error:  # raised by user code
            del self._path[depth:]
            self._give_up(thing, f"{type(error).__name__}: {error}", error)
        if isinstance(thing, _VALUES) or attribute(thing, "__dict__") is None:
            del self._numbers[id(thing)]  # equal values count alike, whether they are one object or two

    def _feed(self, tag: str, content: bytes | memoryview = b"") -> None:
        self.hash.update(f"{tag}:{len(content)}:".encode())
        self.hash.update(content)

    def _plain(self, thing: Any) -> bool:
        """Feed `thing` if it is a value without parts; returns whether it was."""
        kind = type(thing)
        if thing is None or kind is bool:
            self._feed(kind.__name__, repr(thing).encode())
        elif kind is int:
            self._feed("int", f"{thing:x}".encode())
        elif kind is float:
            self._feed("float", struct.pack("<d", thing))
        elif kind is complex:
            self._feed("complex", struct.pack("<dd", thing.real, thing.imag))
        elif kind is str:
            self._feed("str", thing.encode("utf-8", "surrogatepass"))
        elif isinstance(thing, (bytes, bytearray, memoryview)):
            self._feed(kind.__name__, bytes(thing))
        elif isinstance(thing, PurePath):
            self._feed("path", str(thing).encode("utf-8", "surrogatepass"))
        elif isinstance(thing, GENERATOR_TYPES):
            self._feed("generator")
        elif isinstance(thing, logging.Logger):
            self._feed("logger", thing.name.encode())
        else:
            return False
        return True

    def _compound(self, thing: Any) -> None:
        if isinstance(thing, FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self._class(thing)
        elif isinstance(thing, ModuleType):
            self._feed("module", f"{thing.__name__} {library_version(thing.__name__)}".encode())
        elif isinstance(thing, CodeType):
            self._code(thing)
        elif (own := _own_fingerprint(thing)) is not None:
            self._feed("own", type(thing).__qualname__.encode())
            self.visit(own())
            if callable(pipeline := attribute(thing, "pipeline")):
                self.visit(pipeline)  # a source's fingerprint covers only its records
        elif isinstance(thing, enum.Enum):
            self._feed("enum", f"{type(thing).__qualname__}.{thing.name}".encode())
            self.visit(thing.value)
        elif isinstance(thing, (np.ndarray, np.generic)):
            self._array(np.asarray(thing))
        elif isinstance(thing, torch.Tensor):
            self._tensor(thing)
        elif isinstance(thing, functools.partial):
            self._parts("partial", (thing.func, thing.args, thing.keywords))
        elif isinstance(thing, (BuiltinFunctionType, np.ufunc)):
            self._builtin(thing)
        elif isinstance(thing, (list, tuple, dict, set, frozenset)):
            self._container(thing)
        elif isinstance(thing, (staticmethod, classmethod)):
            self._parts(type(thing).__name__, (thing.__func__,))
        elif isinstance(thing, property):
            self._parts("property", (thing.fget, thing.fset))
        elif isinstance(thing, functools.cached_property):
            self._parts("property", (thing.func,))
        elif isinstance(attribute(thing, "__wrapped__"), FunctionType):
            self._parts("wrapped", (thing.__wrapped__,))
        else:
            self._instance(thing)

    def _give_up(self, thing: Any, why: str, error: Exception | None) -> None:
        """Handle an object without a fingerprint: raise, or within `tolerant` feed its type."""
        kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
        name = ".".join(self._path)
        what = f"{name} ({reprlib.repr(thing)} of type {kind})" if name else f"{reprlib.repr(thing)} of type {kind}"
        unknown = _unknown.get()
        if unknown is None:
            raise NoFingerprintError(
                f"{what} cannot be fingerprinted, as {why}. Give it, or the transform that holds it, a method "
                "fingerprint() that returns a text which changes when its parameters change"
            ) from error
        unknown.append(f"{name} of type {kind}" if name else f"an object of type {kind}")
        self._feed("unknown", kind.encode())

    def _parts(self, tag: str, parts: Iterable[Any]) -> None:
        things = list(parts)
        self._feed(tag, str(len(things)).encode())
        for thing in things:
            self.visit(thing)

    def _named(self, tag: str, values: dict[str, Any], visit: Callable[[Any], None]) -> None:
        self._feed(tag, str(len(values)).encode())
        for name in sorted(values):
            self._feed("name", name.encode("utf-8", "surrogatepass"))
            self._path.append(name)
            visit(values[name])
            self._path.pop()

    def _unordered(self, tag: str, things: Iterable[Any]) -> None:
        digests = sorted(self._separately(thing) for thing in things)
        self._feed(tag, b"".join(digests))

    def _separately(self, thing: Any) -> bytes:
        """Return the digest of `thing`, independent of its position among its siblings."""
        walker = _Walker(dict(self._numbers), self._count)
        walker._path = list(self._path)
        walker.visit(thing)
        return walker.hash.digest()

    def _leniently(self, thing: Any) -> None:
        """Feed `thing`, or only its type if it has no fingerprint: a name in the code may refer to a lock or a file."""
        walker = _Walker(dict(self._numbers), self._count)
        token = _unknown.set(None)
        try:
            walker.visit(thing)
        except InputError:
            self._feed("type", type(thing).__qualname__.encode())
        else:
            self._numbers, self._count = walker._numbers, walker._count
            self._feed("lenient", walker.hash.digest())
        finally:
            _unknown.reset(token)

    def _library(self, thing: Any) -> bool:
        """Feed name and version of a class or function of a library; returns whether it was one."""
        version = library_version(thing.__module__ or "builtins")
        if version is None:
            return False
        self._feed("library", f"{thing.__module__}.{thing.__qualname__} {version}".encode())
        return True

    def _function(self, function: FunctionType) -> None:
        library = self._library(function)
        if library and function.__closure__ is None and function.__name__ != "<lambda>":
            return
        self._feed("function")
        self._code(function.__code__)
        self.visit(function.__defaults__)
        self.visit(function.__kwdefaults__)
        self._named("closure", closure_values(function), self._leniently if library else self.visit)
        if not library:
            self._named("globals", used_globals(function), self._leniently)

    def _code(self, code: CodeType) -> None:
        self._feed("code", code.co_code)
        self._feed("exceptions", getattr(code, "co_exceptiontable", b""))
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._feed("shape", repr((shape, names)).encode())
        self._parts("constants", code.co_consts)

    def _class(self, cls: type) -> None:
        if self._library(cls):
            return
        self._feed("class", cls.__qualname__.encode())
        self._parts("bases", cls.__bases__)
        ignored = {MARK, DREW, *(_OF_PROCESS if comes_from(type(cls), "fsspec") else ())}
        members = {
            name: member
            for name, member in vars(cls).items()
            if name not in ignored
            and not inspect.ismemberdescriptor(member)
            and not inspect.isgetsetdescriptor(member)
            and (callable(member) or not (name.startswith("__") and name.endswith("__")))
            and not name.startswith(("__annotate", "_abc_"))
        }
        self._named("members", members, self._leniently)

    def _builtin(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__qualname__", None) or function.__name__
        module = getattr(function, "__module__", None) or ("numpy" if isinstance(function, np.ufunc) else "builtins")
        self._feed("builtin", f"{module}.{name} {library_version(module)}".encode())
        if owner is not None and not isinstance(owner, ModuleType):
            self.visit(owner)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self._feed("array", f"{array.dtype.str} {array.dtype.fields} {array.shape}".encode())
        if array.dtype.hasobject or array.dtype.kind == "T":
            self._parts("items", array.ravel().tolist())
        else:
            self._feed("bytes", array.tobytes())

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._feed("tensor", f"{type(tensor).__qualname__} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content = plain_bytes(tensor)
        if content is None:
            return self._give_up(tensor, "it has no state to look at", None)
        self._feed("bytes", content[1].numpy().data)
        if content[0]:
            self._feed("quantizer", content[0].encode())
        self._state(vars(tensor), type(tensor))

    def _container(self, container: Any) -> None:
        if type(container) in (list, tuple, dict, set, frozenset):
            self._feed(type(container).__name__)
        else:
            self.visit(type(container))
        if isinstance(container, dict):
            if all(type(key) is str for key in container):
                self._named("items", container, self.visit)
            else:
                self._unordered("pairs", container.items())
        elif isinstance(container, (set, frozenset)):
            self._unordered("items", container)
        elif len(container) < _MANY or not self._in_bulk(container):
            self._parts("items", container)

    def _in_bulk(self, items: Any) -> bool:
        """Feed the items of a long list or tuple in bulk, if all have one supported type; returns whether they have."""
        kinds = set(map(type, items))
        kind = kinds.pop()
        if kinds:
            return False
        if kind is str:
            texts = [text.encode("utf-8", "surrogatepass") for text in items]
            self._feed("lengths", np.fromiter(map(len, texts), "<i8", len(texts)).data.cast("B"))
            self._feed("strs", b"".join(texts))
        elif kind is int or kind is bool:
            try:
                numbers = np.fromiter(items, "<i8", len(items))
            except OverflowError:
                return False
            self._feed(f"{kind.__name__}s", numbers.data.cast("B"))
        elif kind is float:
            self._feed("floats", np.fromiter(items, "<f8", len(items)).data.cast("B"))
        elif kind is tuple and items[0] and len(set(map(len, items))) == 1:
            self._feed("rows", f"{len(items)} {len(items[0])}".encode())
            for place in range(len(items[0])):
                self._container([row[place] for row in items])
        else:
            return False
        return True

    def _instance(self, thing: Any) -> None:
        """Feed the class and the state of `thing`, as `copy` and `pickle` see it."""
        try:
            reducer = copyreg.dispatch_table.get(type(thing))
            reduced = reducer(thing) if reducer else thing.__reduce_ex__(2)
        except RecursionError:
            raise
        except Exception as error:
            return self._give_up(thing, "it has no state to look at", error)
        self._feed("instance")
        self.visit(type(thing))
        if isinstance(reduced, str):
            self._feed("global", reduced.encode())
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        self.visit(make)
        self.visit(arguments)
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            self._state(part, type(thing))
        self.visit(None if items is None else list(items))
        self.visit(None if pairs is None else dict(pairs))

    def _state(self, state: Any, cls: type) -> None:
        if type(state) is dict:
            transient = _TRANSIENT if comes_from(cls, "albumentations") else frozenset()
            state = {name: value for name, value in state.items() if name not in (MARK, DREW, *transient)}
        self.visit(state)


def _own_fingerprint(thing: Any) -> Callable[[], Any] | None:
    """Return the method `fingerprint()` of `thing` if it has one without required arguments."""
    method = attribute(thing, "fingerprint")
    if not inspect.ismethod(method):
        return None
    try:
        inspect.signature(method).bind()
    except TypeError:
        return None
    return method
