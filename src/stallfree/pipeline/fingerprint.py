"""Fingerprints of code and parameters: short texts that serve as cache keys of prepared samples."""

from __future__ import annotations

import copyreg
import enum
import functools
import inspect
import logging
import os
import pickle
import reprlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from stallfree.errors import InputError, StallfreeError
from stallfree.pipeline._objects import (
    attribute,
    closure_values,
    comes_from,
    current,
    library_version,
    module_of,
    named_values,
)
from stallfree.pipeline.generators import GENERATOR_TYPES
from stallfree.pipeline.marks import DREW, mark_of
from stallfree.pipeline.values import plain_bytes

_TRANSIENT = frozenset({"params", "applied_in_replay", "seed", "_images_was_list", "_masks_was_list"})
"""State that albumentations stores in a transform while it runs, or that concerns only its generators."""
_OF_PROCESS = frozenset({"_pid", "_cache", "_latest", "_lock"})
"""Class attributes of fsspec's file systems that differ between processes."""
_SILENT = ("threading", "_thread", "multiprocessing", "logging", "loguru", "structlog", "rich", "tqdm", "weakref")
"""Libraries whose objects do not influence samples if the code names them: locks, loggers, progress bars."""
_LONG = 256
"""Length from which a container is pickled instead of walked through: data sets list a million samples."""
_LARGE = 1 << 30
"""Bytes from which an array in memory is represented by a sample of them, as each array in a mapped file is."""
_PIECES, _PIECE = 64, 4096
"""Number of the pieces of such a sample, and bytes of each."""
_ATOMS = frozenset({type(None), bool, int, float, complex, str})
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict})
_SPECIAL = (type, FunctionType, MethodType, enum.Enum, np.ndarray, np.dtype, torch.Tensor, set, frozenset)
"""Types of objects that are never fed as `pickle` sees them."""
_MOST_DIGESTS = 10_000
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    MethodType: lambda thing: (thing.__self__, thing.__func__),
    functools.partial: lambda thing: (thing.func, thing.args, thing.keywords),
    enum.Enum: lambda thing: (type(thing), thing.name, thing.value),
    **dict.fromkeys((bytes, bytearray, memoryview), lambda thing: (np.asarray(memoryview(thing)),)),
    **dict.fromkeys((staticmethod, classmethod), lambda thing: (thing.__func__,)),
    **dict.fromkeys((ContextVar, weakref.ref), lambda thing: (current(thing),)),
    property: lambda thing: (thing.fget, thing.fset),
    functools.cached_property: lambda thing: (thing.func,),
}
"""Of what objects of some types consist."""
_VALUES = (list, tuple, dict, set, frozenset, np.ndarray, np.generic, torch.Tensor, enum.Enum, functools.partial)


def fingerprint(*objects: Any) -> str:
    """Return 32 hexadecimal digits that change when the code or a parameter of one of `objects` changes.

    The result is the same in every process and under every hash seed, for one version of Python. Covered are plain
    values (`1`, `1.0` and `True` differ), arrays, tensors and containers, with the order of their items; functions with
    their defaults, closures, attributes and the values that they name, such as `pkg.sub.SCALE`, also after an import
    inside of them; user classes with the code of their methods; instances with their attributes; marks; for libraries,
    names and versions. An array that is mapped from a file counts by file, time of modification and a sample of its
    bytes. File names, line numbers and the states of random generators are ignored.

    An object with a method `fingerprint()` without required arguments is represented by that method's result, together
    with its `pipeline` if it is a source.

    Raises `InputError`, which names the object, for an object without inspectable state, such as a lock or an open
    file. Within `tolerant`, only the type of such an object is hashed.
    """
    try:
        return _Walker().digest(*objects).hex()
    except RecursionError as error:
        unknown = _unknown.get()
        what = f"the {' and '.join(type(thing).__qualname__ for thing in objects)}"
        if unknown is None:
            raise NoFingerprintError(
                f"{what} cannot be fingerprinted, as it is nested too deeply: give it a method fingerprint()"
            ) from error
        unknown.append(f"{what}, which is nested too deeply,")
        # the part that was hashed depends on the caller's stack depth
        return _Walker().digest([f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in objects]).hex()


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

    def __init__(self) -> None:
        self.hash = xxhash.xxh3_128()
        self._numbers: dict[int, tuple[int, object]] = {}
        """Objects in progress or already fed, by identity, with their number; kept alive so that ids stay unique."""
        self._count = 0
        """The number of the next object."""
        self._pending: list[tuple[list[str], Any]] = []
        """Functions and classes that are fed after the object that refers to them, with the names that lead there."""
        self._path: list[str] = []
        """The names that lead to the object in progress, for messages."""

    def digest(self, *things: Any) -> bytes:
        """Return the digest of `things`, which does not depend on their siblings."""
        outer, known = (self.hash, self._count, self._pending, self._path), len(self._numbers)
        self.hash, self._pending, self._path = xxhash.xxh3_128(), [], list(self._path)
        try:
            for thing in things:
                self.visit(thing)
            while self._pending:
                self._path, definition = self._pending.pop(0)
                self._try(self._class if isinstance(definition, type) else self._function, definition)
            return self.hash.digest()
        finally:
            self.hash, self._count, self._pending, self._path = outer
            while len(self._numbers) > known:
                self._numbers.popitem()

    def visit(self, thing: Any) -> None:
        if self._plain(thing):
            return
        if id(thing) in self._numbers:
            self._feed("again", str(self._numbers[id(thing)][0]).encode())
            return
        self._numbers[id(thing)] = (self._count, thing)
        self._count += 1
        self._try(self._compound, thing)
        if isinstance(thing, _VALUES) or attribute(thing, "__dict__") is None:
            del self._numbers[id(thing)]  # equal values count alike, whether they are one object or two

    def _try(self, feed: Callable[[Any], None], thing: Any) -> None:
        depth = len(self._path)
        try:
            feed(thing)
        except (RecursionError, StallfreeError):
            raise
        except Exception as error:  # raised by user code
            del self._path[depth:]
            self._give_up(thing, f"{type(error).__name__}: {error}", error)

    def _feed(self, tag: str, content: bytes = b"") -> None:
        self.hash.update(f"{tag}:{len(content)}:".encode())
        self.hash.update(content)

    def _plain(self, thing: Any) -> bool:
        """Feed `thing` if it is a value without parts; returns whether it was."""
        if type(thing) in _ATOMS:
            self._feed(type(thing).__name__, pickle.dumps(thing, 4))
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
        if (mark := mark_of(thing)) is not None:
            self._feed("mark", str(mark).encode())
        if isinstance(thing, (FunctionType, type)):
            self._feed("definition")
            if not self._library(thing):
                self._pending.append((list(self._path), thing))
        elif isinstance(thing, ModuleType):
            self._feed("module", f"{thing.__name__} {library_version(thing.__name__)}".encode())
        elif isinstance(thing, CodeType):
            self._code(thing)
        elif (own := _own_fingerprint(thing)) is not None:
            # a source's own fingerprint covers only its records
            steps = pipeline if callable(pipeline := attribute(thing, "pipeline")) else None
            self._parts("own", (type(thing).__qualname__, own(), steps))
        elif isinstance(thing, (np.ndarray, np.generic)):
            self._array(thing)
        elif isinstance(thing, torch.Tensor):
            self._tensor(thing)
        elif isinstance(thing, (BuiltinFunctionType, np.ufunc)):
            self._builtin(thing)
        elif type(thing) in (list, tuple, dict, set, frozenset):
            self._container(thing)
        elif (kind := next((kind for kind in _PARTS if isinstance(thing, kind)), None)) is not None:
            self._parts(kind.__name__, _PARTS[kind](thing))
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

    def _named(self, tag: str, values: Mapping[str, Any], *, used: bool = False) -> None:
        """Feed `values` with their names. Locks and loggers that code only names (`used`) count by their type."""
        self._feed(tag, str(len(values)).encode())
        for name, value in values.items():
            self._feed("name", name.encode("utf-8", "surrogatepass"))
            self._path.append(name)
            if used and type(value).__module__.partition(".")[0] in _SILENT and not isinstance(value, weakref.ref):
                self._feed("type", type(value).__qualname__.encode())
            else:
                self.visit(value)
            self._path.pop()

    def _library(self, thing: Any) -> bool:
        """Feed name and version of a class or function of a library; returns whether it was one."""
        module = module_of(thing)
        version = library_version(module)
        if version is None:
            return False
        self._feed("library", f"{module}.{thing.__qualname__} {version}".encode())
        if isinstance(thing, FunctionType) and (thing.__closure__ is not None or thing.__name__ == "<lambda>"):
            self._code(thing.__code__)
            for name, value in closure_values(thing).items():
                with nullcontext() if callable(value) else tolerant():  # a decorator holds a function of the user's
                    self._named("closure", {name: value}, used=True)
        return True

    def _function(self, function: FunctionType) -> None:
        self._feed("function")
        self._code(function.__code__)
        self._parts("defaults", (function.__defaults__, function.__kwdefaults__))
        self._state(vars(function), FunctionType)
        self._named("named", named_values(function), used=True)

    def _code(self, code: CodeType) -> None:
        self._feed("code", code.co_code)
        self._feed("exceptions", getattr(code, "co_exceptiontable", b""))
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._feed("shape", repr((shape, names)).encode())
        self._parts("constants", code.co_consts)

    def _class(self, cls: type) -> None:
        self._feed("class", cls.__qualname__.encode())
        self._parts("bases", (*cls.__bases__, type(cls)))
        ignored = {DREW, *(_OF_PROCESS if comes_from(type(cls), "fsspec") else ())}
        members = {
            name: member
            for name, member in sorted(vars(cls).items())
            if name not in ignored
            and not inspect.ismemberdescriptor(member)
            and not inspect.isgetsetdescriptor(member)
            and (callable(member) or not (name.startswith("__") and name.endswith("__")))
            and not name.startswith(("__annotate", "_abc_"))
        }
        self._named("members", members, used=True)

    def _builtin(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__qualname__", None) or function.__name__
        module = getattr(function, "__module__", None) or ("numpy" if isinstance(function, np.ufunc) else "builtins")
        self._feed("builtin", f"{module}.{name} {library_version(module)}".encode())
        self._parts("owner", (None if isinstance(owner, ModuleType) else owner,))

    def _array(self, array: Any) -> None:
        plain = np.asarray(array)
        self._feed("array", f"{plain.dtype.str} {plain.dtype.fields} {plain.shape}".encode())
        if plain.dtype.hasobject or plain.dtype.kind == "T":
            self.visit(plain.ravel().tolist())
        else:
            self._bytes(plain, _file_of(array))
        if isinstance(array, np.ma.MaskedArray):
            self._parts("masked", (type(array), np.ma.getmaskarray(array), array.fill_value))
        elif isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap):
            self._parts("subclass", (type(array),))
            self._state(vars(array), type(array))

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._feed("tensor", f"{type(tensor).__qualname__} {tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().as_subclass(torch.Tensor)
        quantizer = ""
        if plain.is_quantized or plain.layout is not torch.strided or plain.is_nested or plain.device.type != "cpu":
            content = plain_bytes(tensor)
            if content is None:
                return self._give_up(tensor, "it has no state to look at", None)
            quantizer, plain = content
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        self._bytes(plain.resolve_conj().resolve_neg().view(whole[plain.itemsize]).numpy(), None)
        self._feed("quantizer", quantizer.encode())
        self._state(vars(tensor), type(tensor))

    def _bytes(self, array: npt.NDArray[Any], file: str | None) -> None:
        """Feed the bytes of `array`, or a sample of them if it is large or mapped from `file`, in constant memory."""
        if file is not None or array.nbytes > _LARGE:
            self._feed("sample", str(file).encode("utf-8", "surrogatepass"))
            length = max(1, _PIECE // max(1, array.itemsize))
            for start in np.linspace(0, max(0, array.size - length), _PIECES).astype(np.int64).tolist():
                self.hash.update(array.flat[start : start + length].tobytes())
        elif array.flags.c_contiguous:
            self.hash.update(array.reshape(-1).view(np.uint8).data)
        else:
            parts: Any = np.nditer(array, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=65536)
            for part in parts:
                self.hash.update(part.tobytes())

    def _container(self, container: Any) -> None:
        self._feed(type(container).__name__, str(len(container)).encode())
        if isinstance(container, (set, frozenset)):
            if set(map(type, container)) in ({str}, {int}, {bytes}):
                self._container(sorted(container))
            else:
                self._feed("items", b"".join(sorted(map(self.digest, container))))
        elif len(container) >= _LONG:
            try:
                _Pickler(self).dump(container)
            except ValueError:  # it contains itself
                self._parts("items", container.items() if isinstance(container, dict) else container)
        elif isinstance(container, dict) and all(type(key) is str for key in container):
            self._named("items", container)
        else:
            self._parts("items", container.items() if isinstance(container, dict) else container)

    def _instance(self, thing: Any) -> None:
        """Feed the class and the state of `thing`, as `copy` and `pickle` see it."""
        try:
            kind, make, arguments, state, *items = _reduced(thing)
        except RecursionError:
            raise
        except Exception as error:
            return self._give_up(thing, "it has no state to look at", error)
        self._parts("instance", (kind, make, arguments))
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            self._state(part, kind)
        self._parts("items", items)

    def _state(self, state: Any, cls: type) -> None:
        if type(state) is dict and all(type(name) is str for name in state):
            ignored = {DREW, *(_TRANSIENT if comes_from(cls, "albumentations") else ())}
            self._named("state", {name: value for name, value in sorted(state.items()) if name not in ignored})
        else:
            self.visit(state)


class _Pickler(pickle.Pickler):
    """Feeds a long container at the speed of C: plain values and instances as they are, what else it holds as digests.

    A container that contains itself raises `ValueError`.
    """

    def __init__(self, walker: _Walker) -> None:
        super().__init__(SimpleNamespace(write=walker.hash.update), 4)
        self.fast = True  # equal values count alike, whether they are one object or two
        self._walker = walker
        self._forms: dict[type, Callable[[Any], Any]] = {}
        self._digests: dict[int, tuple[bytes, object]] = {}

    def persistent_id(self, thing: Any) -> Any:
        kind = type(thing)
        if kind in _PLAIN:
            return None
        if kind not in self._forms:
            self._forms[kind] = self._form_of(kind)
        return self._forms[kind](thing)

    def _form_of(self, kind: type) -> Callable[[Any], Any]:
        """Return the function that represents instances of `kind`."""
        if issubclass(kind, PurePath):
            return lambda thing: (kind, str(thing))
        if issubclass(kind, np.number):
            return lambda thing: (kind, thing.tobytes())
        special = issubclass(kind, _SPECIAL) or kind in copyreg.dispatch_table or hasattr(kind, "fingerprint")
        if special or any("__reduce_ex__" in vars(base) for base in kind.__mro__[:-1]):
            return self._digest

        def reduced(thing: Any) -> Any:
            try:
                return _reduced(thing)
            except TypeError:  # such as a lock
                return self._digest(thing)

        return reduced

    def _digest(self, thing: Any) -> bytes:
        if id(thing) in self._digests:
            return self._digests[id(thing)][0]
        digest = self._walker.digest(thing)
        if len(self._digests) < _MOST_DIGESTS:
            self._digests[id(thing)] = digest, thing
        return digest


def _reduced(thing: Any) -> tuple[Any, ...]:
    """Return the class of `thing`, and what `pickle` keeps of it: a function, its arguments, state, items and pairs."""
    reducer = copyreg.dispatch_table.get(type(thing))
    reduced = reducer(thing) if reducer else thing.__reduce_ex__(2)
    if isinstance(reduced, str):
        return type(thing), reduced, None, None
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        make, arguments = None, arguments[1:]
    return type(thing), make, arguments, state, items and list(items), pairs and dict(pairs)


def _file_of(array: Any) -> str | None:
    """Return the part of a file that `array` is mapped from: path, size, time and place; None if it is in memory."""
    root, base = None, array
    while isinstance(base, np.ndarray):
        root = base if isinstance(base, np.memmap) else root
        base = base.base
    if root is None or base is None or root.filename is None:
        return None
    place = array.__array_interface__["data"][0] - root.__array_interface__["data"][0] + root.offset
    try:
        status = os.stat(root.filename)
    except OSError:  # removed
        return f"{root.filename} {place} {array.strides}"
    return f"{root.filename} {status.st_size} {status.st_mtime_ns} {place} {array.strides}"


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
