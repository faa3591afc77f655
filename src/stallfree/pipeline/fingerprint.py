"""Fingerprints of code and parameters: short texts that serve as cache keys of prepared samples.

Objects are pickled into a hash by `pickle` of the standard library, at the speed of C: plain values and containers as
they are, all others as a tuple of what they consist of, by `_form`.
"""

import copyreg
import enum
import functools
import inspect
import os
import pickle
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash

from stallfree.errors import CodecError, StallfreeError, no_fingerprint
from stallfree.pipeline import objects
from stallfree.pipeline.codec import array_of, encode
from stallfree.pipeline.compose import DREW, Array, mark_of
from stallfree.pipeline.values import private

_TRANSIENT = frozenset({"params", "applied_in_replay", "seed", "_images_was_list", "_masks_was_list", "_key2func"})
"""State of albumentations that it stores while it runs, that concerns only its generators, or of any order."""
_SILENT = ("threading", "_thread", "multiprocessing", "logging", "loguru", "structlog", "rich", "tqdm", "weakref")
"""Libraries whose objects do not influence samples if the code names them: locks, loggers, progress bars."""
_LARGE = 1 << 30
"""Bytes from which an array in memory is represented by a sample of them, as each array in a mapped file is."""
_PIECES, _PIECE = 64, 4096
"""Number of the pieces of such a sample, and bytes of each."""
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict})
_VALUES = (set, frozenset, np.ndarray, np.generic, np.dtype, torch.Tensor, enum.Enum, functools.partial, PurePath)
"""Types of which equal values count alike, whether they are one object or two."""


def fingerprint(*things: Any) -> str:
    """Return 32 hexadecimal digits that change when the code or a parameter of one of `things` changes.

    The result is the same in every process and under every hash seed, for one version of Python. Covered are plain
    values (`1`, `1.0` and `True` differ), arrays, tensors and containers, with the order of their items; functions with
    their defaults, closures, attributes and the values that they name, such as `pkg.sub.SCALE`, also after an import
    inside of them; user classes with the code of their methods; instances with their attributes, also those that a
    class leaves out of its pickles, if they have fingerprints; marks; for libraries, names and versions. An array that
    is mapped from a file counts by file, time of modification and a sample of its bytes. File names, line numbers and
    the states of random generators are ignored.

    An object with a method `fingerprint()` without required arguments is represented by that method's result, together
    with its `pipeline` if it is a source.

    Raises `InputError`, which names the object, for an object without inspectable state, such as a lock or an open
    file, and for containers that contain themselves. Within `tolerant`, only the type of such an object is hashed.
    """
    unknown = _unknown.get(None)
    if unknown is None:
        with tolerant() as unknown:
            text = fingerprint(*things)
        if unknown:
            raise no_fingerprint(
                f"{unknown[0]} cannot be fingerprinted: give it, or the transform that holds it, a method "
                "fingerprint() that returns a text which changes when its parameters change"
            )
        return text
    try:
        return _digest(things, {}).hex()
    except StallfreeError:  # of an object's own method
        raise
    except (RecursionError, ValueError):
        names = [objects.describe(type(thing)) for thing in things]
        unknown.append(f"the {' and '.join(names)}, which is nested too deeply or contains itself,")
        return _digest(names, {}).hex()


_unknown: ContextVar[list[str]] = ContextVar("unknown")


@contextmanager
def tolerant() -> Iterator[list[str]]:
    """Hash only the type of objects without a fingerprint inside the block. Yields the list of such objects."""
    found: list[str] = []
    token = _unknown.set(found)
    try:
        yield found
    finally:
        _unknown.reset(token)


def same(a: Any, b: Any) -> bool | None:
    """Return whether `a` and `b` have the same type and value, bit for bit; None if that is undecidable."""
    with suppress(CodecError, RecursionError):  # equal records prove it; equal values may have different pickles
        (structure, arrays), (other, others) = encode(a, allow_pickle=True), encode(b, allow_pickle=True)
        if structure is other and all(map(np.array_equal, arrays, others)):
            return True
    with tolerant() as unknown:
        equal = fingerprint(private(a)) == fingerprint(private(b))
    return None if unknown else equal


def key_of(**parts: Any) -> str:
    """Return the fingerprint of `parts`, followed by one per part: texts unchanged, other objects as fingerprints."""
    parts_of = {name: part if isinstance(part, str) else fingerprint(part) for name, part in parts.items()}
    return f"{fingerprint(sorted(parts_of.items()))} " + ";".join(f"{name}={part}" for name, part in parts_of.items())


def differing_parts(there: str, wanted: str) -> str:
    """Return the parts in which two keys of `key_of` differ, as text; empty for other texts."""
    parts = [dict(pair.split("=", 1) for pair in key[33:].split(";") if "=" in pair) for key in (there, wanted)]
    return "; ".join(
        f"its {name} is {parts[0].get(name)}, yours is {part}"
        if name in ("form", "format", "window")
        else f"its {name} differ{'' if name.endswith('s') else 's'} from yours in code, parameters or files"
        for name, part in parts[1].items()
        if parts[0] and parts[0].get(name) != part
    )


def _digest(things: Any, numbers: dict[int, tuple[int, object]]) -> bytes:
    """Return the digest of `things`, which may refer to objects of `numbers`, and does not add to them.

    Raises `ValueError` for containers that contain themselves, and `RecursionError`.
    """
    known, hashed = len(numbers), xxhash.xxh3_128()
    walker = _Walker(things, numbers, hashed.update)
    try:
        walker.dump(things)
        for definition in walker.pending:
            walker.dump(walker.form_of(_definition, definition))
        return hashed.digest()
    finally:
        while len(numbers) > known:
            numbers.popitem()


class _Walker(pickle.Pickler):
    """Pickles what objects consist of.

    Args:
        root: what is pickled.
        numbers: objects with attributes, by identity, with their number; kept alive so that ids stay unique.
        write: gets the bytes.
    """

    def __init__(self, root: Any, numbers: dict[int, tuple[int, object]], write: Callable[[bytes], Any]) -> None:
        super().__init__(types.SimpleNamespace(write=write), 4)
        self.root, self.numbers = root, numbers
        self.fast = True  # else it would matter whether two equal values are one object
        self.pending: list[Any] = []
        """The user's functions and classes, which follow after the objects that refer to them."""

    def persistent_id(self, thing: Any) -> Any:
        """Return None for a plain value, else a tuple in its place."""
        kind = type(thing)
        if kind in _PLAIN:
            return None
        numbered = kind.__dictoffset__ != 0 and not issubclass(kind, _VALUES)
        if numbered:
            if id(thing) in self.numbers:
                return "again", self.numbers[id(thing)][0]
            self.numbers[id(thing)] = len(self.numbers), thing
        form = self.form_of(_form, thing)
        if callable(thing) or (numbered and hasattr(kind, "__getitem__")):
            return kind.__name__, form, mark_of(thing)
        return kind.__name__, form

    def form_of(self, form: Callable[[Any, Any], Any], thing: Any) -> Any:
        """Return `form(thing, self)`; for an object without a fingerprint, `"unknown"` and its type."""
        try:
            return form(thing, self)
        except (RecursionError, StallfreeError):
            raise
        except Exception:  # it cannot be copied, or code of the user's raised it
            unknown = _unknown.get()
            label = "" if unknown else objects.label_of(thing, (*self.root, *self.pending))
            unknown.append(f"{label or 'an object'} of type {objects.describe(type(thing))}")
            return "unknown", objects.describe(type(thing))


@functools.singledispatch
def _form(thing: Any, walker: _Walker) -> Any:
    """Return what stands for `thing`: by default its class and state, as `copy` and `pickle` see it."""
    own = objects.attribute(thing, "fingerprint") if hasattr(type(thing), "fingerprint") else None
    if inspect.ismethod(own) and not any(
        part.default is part.empty and "VAR" not in part.kind.name
        for part in inspect.signature(own).parameters.values()
    ):
        pipeline = objects.attribute(thing, "pipeline")  # a source's own fingerprint covers only its records
        inherits = objects.is_library(own)  # a class of the user's may change what it inherits it for
        return own(), pipeline if callable(pipeline) else None, type(thing) if inherits else None
    if objects.is_library(type(thing)) and isinstance(objects.attribute(thing, "__wrapped__"), types.FunctionType):
        return thing.__wrapped__
    reducer = copyreg.dispatch_table.get(type(thing))
    reduced = reducer(thing) if reducer else thing.__reduce_ex__(2)
    if isinstance(reduced, str):
        return type(thing), pickle.dumps(thing)  # an error unless that is its name
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    hidden = _left_out(thing, state, walker) if _pickles_itself(type(thing)) else []  # type: ignore[arg-type]
    if isinstance(state, tuple) and len(state) == 2:
        state = tuple(_state(part, type(thing)) for part in state)
    form = type(thing), make, arguments, _state(state, type(thing)), items and list(items), pairs and dict(pairs)
    return (*form, hidden) if hidden else form


@functools.lru_cache(4096)
def _pickles_itself(cls: type) -> bool:
    """Return whether a user's class decides what of its instances is pickled."""
    names = ("__getstate__", "__reduce__", "__reduce_ex__")
    own = any(getattr(cls, name, None) is not getattr(object, name) for name in names)
    return own and objects.library_version(objects.module_of(cls)) is None


def _left_out(thing: Any, state: Any, walker: _Walker) -> list[tuple[str, bytes]]:
    """Return digests of the attributes that a class leaves out of its pickles, or changes, such as large tables.

    Those without a fingerprint, such as locks and open files, do not count.
    """
    attributes, hidden = objects.attributes(thing), []
    for name in sorted(attributes):
        if type(state) is not dict or name not in state or state[name] is not attributes[name]:
            with tolerant() as unknown, suppress(Exception):  # such as an object whose own code fails
                digest = _digest((attributes[name],), walker.numbers)
                hidden += [(name, digest)] * (not unknown)
    return hidden


def _state(state: Any, cls: type) -> Any:
    """Return the state of an instance of `cls` without what is of no account, in the order of its names."""
    if type(state) is not dict or not all(type(name) is str for name in state):
        return state
    transient = any(objects.comes_from(base, "albumentations") for base in cls.__mro__)
    ignored = {DREW, *(_TRANSIENT if transient else ())}
    return {name: state[name] for name in sorted(state) if name not in ignored}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that code names. Locks, loggers and their like count by their type.

    So do the user's modules: what code names of them is named, too.
    """

    def silent(value: Any) -> bool:
        module = objects.module_of(type(value))
        library = module.partition(".")[0] in _SILENT and module not in ("weakref", "multiprocessing.sharedctypes")
        return library or (isinstance(value, types.ModuleType) and not objects.is_library(value))

    return {name: type(value).__qualname__ if silent(value) else value for name, value in values.items()}


@_form.register(types.FunctionType)
@_form.register(type)
def _form_of_definition(thing: Any, walker: _Walker) -> Any:
    """Of a library, the name and the version; with the user's functions that a decorator of a library holds."""
    module = objects.module_of(thing)
    version = objects.library_version(module)
    if version is None:
        walker.pending.append(thing)
        return None
    name = f"{module}.{thing.__qualname__} {version}"
    if isinstance(thing, type) or (thing.__closure__ is None and thing.__name__ != "<lambda>"):
        return name
    with tolerant():  # of the values of a library
        held = {
            name: value if callable(value) else _digest((value,), walker.numbers)
            for name, value in _named(objects.closure_values(thing)).items()
        }
    return name, thing.__code__, held


def _definition(thing: Any, walker: _Walker) -> Any:
    """Return what stands for a function or class of the user's: its code, and what its code names."""
    if isinstance(thing, types.FunctionType):
        values = _named(objects.named_values(thing))
        return thing.__code__, thing.__defaults__, thing.__kwdefaults__, _state(vars(thing), type(thing)), values
    members = {
        name: member
        for name, member in sorted(vars(thing).items())
        if name != DREW
        and (callable(member) or not (name.startswith("__") and name.endswith("__")))
        and not name.startswith(("__annotate", "_abc_"))
    }
    return thing.__qualname__, thing.__bases__, type(thing), _named(members)


@_form.register(types.CodeType)
def _form_of_code(code: types.CodeType, walker: _Walker) -> Any:
    """Without file names and line numbers."""
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, code.co_exceptiontable, shape, names, code.co_consts


@_form.register(types.BuiltinFunctionType)
def _form_of_builtin(function: Any, walker: _Walker) -> Any:
    owner = objects.attribute(function, "__self__")
    name = objects.attribute(function, "__qualname__") or function.__name__
    module = objects.attribute(function, "__module__") or "builtins"
    return f"{module}.{name} {objects.library_version(module)}", None if isinstance(owner, types.ModuleType) else owner


@_form.register(types.ModuleType)
def _form_of_module(module: Any, walker: _Walker) -> Any:
    if objects.is_library(module):
        return f"{module.__name__} {objects.library_version(module.__name__)}"
    return module.__name__, _named({name: value for name, value in vars(module).items() if name[:2] != "__"})


@_form.register(set)
@_form.register(frozenset)
def _form_of_set(items: Any, walker: _Walker) -> Any:
    if type(items) not in (set, frozenset):
        return type(items), frozenset(items), objects.attributes(items)
    if set(map(type, items)) in ({str}, {int}, {bytes}):
        return sorted(items)
    return sorted(_digest((item,), walker.numbers) for item in items)


@_form.register(np.ndarray)
@_form.register(np.generic)
def _form_of_array(array: Any, walker: _Walker) -> Any:
    plain = np.asarray(array)
    form = array.dtype.str, str(array.dtype.fields), plain.shape, content(plain, _file_of(array))
    if isinstance(array, np.ma.MaskedArray):
        return *form, type(array), np.ma.getmaskarray(array), array.fill_value
    if isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap):
        return *form, type(array), _state(vars(array), type(array))
    return form


@_form.register(torch.Tensor)
def _form_of_tensor(tensor: torch.Tensor, walker: _Walker) -> Any:
    if str(tensor.layout).startswith("torch.sparse"):
        return tensor.__reduce_ex__(2)[1], _state(vars(tensor), torch.Tensor)
    array = array_of(tensor.detach().as_subclass(torch.Tensor).cpu())
    if array is None:
        raise TypeError("it has no plain bytes")
    return str(tensor.dtype), tuple(tensor.shape), _bytes(array), _state(vars(tensor), torch.Tensor)


def content(array: Array, file: str | None = None) -> Any:
    """Return what stands for the values of `array`; bytes between fields and inside of long numbers are of no account.

    Args:
        file: what stands for the part of a file that the array is mapped from.
    """
    if array.dtype.names and file is None:
        return [content(array[name]) for name in array.dtype.names]
    if array.dtype.hasobject or array.dtype.kind == "T":
        return array.ravel().tolist()
    if array.dtype.char in "gG" and np.finfo(array.dtype).nmant == 63 and file is None:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).ravel()
        array = array.view(np.uint8).reshape(-1, np.longdouble().itemsize)[:, :10]
    return _bytes(array, file)


def _bytes(array: Array, file: str | None = None) -> Any:
    """Return a digest of `array`; of a sample if it is large or mapped from `file`. Takes no memory."""
    hashed = xxhash.xxh3_128()
    if file is not None or array.nbytes > _LARGE:
        length = max(1, _PIECE // max(1, array.itemsize))
        for start in np.linspace(0, max(0, array.size - length), _PIECES).astype(np.int64).tolist():
            hashed.update(array.flat[start : start + length].tobytes())
        return file, hashed.digest()
    if array.flags.c_contiguous:
        hashed.update(array.reshape(-1).view(np.uint8).data)
    else:
        parts: Any = np.nditer(array, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=65536)
        for part in parts:
            hashed.update(part.tobytes())
    return hashed.digest()


def _file_of(array: Any) -> str | None:
    """Return the part of a file that `array` is mapped from: path, size, time and place; None if it is in memory."""
    root, base = None, array
    while isinstance(base, np.ndarray):
        root = base if isinstance(base, np.memmap) else root
        base = base.base
    if root is None or base is None or root.filename is None:
        return None
    place = array.__array_interface__["data"][0] - root.__array_interface__["data"][0] + root.offset
    status = os.stat(root.filename)
    return f"{root.filename} {status.st_size} {status.st_mtime_ns} {place} {array.strides}"


_FORMS: list[tuple[tuple[type, ...], Callable[[Any], Any]]] = [
    ((PurePath, complex), str),
    ((*objects.GENERATOR_TYPES, type(np.ma.masked)), lambda thing: None),
    ((types.MethodType,), lambda thing: (thing.__self__, thing.__func__)),
    ((functools.partial,), lambda thing: (type(thing), thing.func, thing.args, thing.keywords)),
    ((enum.Enum,), lambda thing: (type(thing), thing.name, thing.value)),
    ((bytearray, memoryview), lambda thing: np.asarray(memoryview(thing))),
    ((staticmethod, classmethod), lambda thing: thing.__func__),
    ((ContextVar, weakref.ref), objects.current),
    ((property,), lambda thing: (thing.fget, thing.fset)),
    ((functools.cached_property,), lambda thing: thing.func),
]
for _kinds, _parts in _FORMS:
    for _kind in _kinds:
        _form.register(_kind, lambda thing, walker, parts=_parts: parts(thing))
