"""The record format of samples: values as flat bytes, without pickle.

A *value* is a tree of dict, OrderedDict, list, tuple and named tuple. Its leaves are of five kinds: tensors, arrays,
numbers (also NumPy's), texts and bytes, and pickles for the rest where these are allowed. None belongs to the tree. An
image of Pillow is a node of its pixels and its `info`. `encode` splits a value into a `Structure`, which describes
everything but the data, and one flat array of bytes per leaf, which shares memory with the value where possible:

    structure, arrays = encode((image, label))
    out = np.empty(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, out)
    image, label = read_record(out, copy=True)

The *key* of a structure is a text, the same in every process. It has one line per node of the tree, each followed by
those of its children:

    t COUNT, l COUNT            tuple, list
    d KEYS, o KEYS              dict, OrderedDict; the keys are a list in JSON
    n [MODULE, NAME, FIELDS]    named tuple, in JSON
    p MODE                      image of Pillow: its pixels and its `info`
    s ORDER                     tensor or array whose dimensions are permuted, in JSON
    -                           None
    KIND, or KIND SHAPE DTYPE   a leaf

A *record* describes itself. All numbers are in the host's byte order (others fail at the magic number):

    u32 magic, u32 length of the key, u32 number of variable leaves, u32 zero
    the key of the structure
    u64 length of each variable leaf, from the next multiple of 8
    the data, from the next multiple of 64; a leaf of 64 bytes or more begins at a multiple of 64, one of 16 or more
    at a multiple of 16 (torch's complex numbers need it), others at a multiple of 8

Types match exactly: a subclass of a type above is not that type, because a cache hit must return the same as a miss.
"""

import ast
import json
import math
import pickle
import struct
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from stallfree.errors import CodecError, value_unstorable
from stallfree.pipeline import values
from stallfree.pipeline.values import BANDS, CARRIERS, TORCH_DTYPES, TORCH_NAMES, U8

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
MAGIC = 0x5AFE0D01
_HEAD = struct.Struct("=IIII")
_DEPTH = 100  # deeper nesting is treated as a value that contains itself
_MALFORMED = (
    *(ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError, SyntaxError, RuntimeError),
    *(BufferError, struct.error),
)
"""What parsing and reading raise for a record that is damaged or forged."""
_LARGEST, _LONGEST = 1 << 62, 1000  # bytes of a leaf, and characters of a dtype
_SHORT, _MEDIUM = 1024, 65536  # bytes of keys: 4,096 short ones are remembered, 64 medium ones, and no long ones
_MANY_LINES = 64
"""Lines of a key from which a structure is not remembered by them."""
_MANY = 8
"""Items from which a container of leaves is made from a slice of them, and in a record for processes of this job, of
plain values, is one pickle."""
_KEY_TYPES = {str, int, bool, type(None)}
_SIMPLE = {*_KEY_TYPES, float, complex, bytes}


class MissingClassError(CodecError):
    """Raised if a record contains a named tuple whose class is not imported here.

    Attributes:
        module: the module that defines the class.
    """

    page = "record-class"

    def __init__(self, message: str, module: str = "") -> None:
        super().__init__(message)
        self.module = module


# --- leaves ---------------------------------------------------------------------------------------------------------

_Line = Any  # of a key: a text, or what `_leaf_line` makes one of
_Reader = Callable[[Any, int, int], Any]  # (buffer, start, nbytes) -> the leaf's value, a view of buffer if possible


class Leaf(NamedTuple):
    """One leaf of a structure.

    `kind` is "tensor", "array", "scalar" (of NumPy), "int", "float", "bool", or of variable length: "bytes", "str",
    "npstr", "npbytes" (of NumPy, whose own pickles lose zeros at their end), "pickle".
    """

    kind: str
    dtype: str  # the name of a torch dtype, or a NumPy dtype as text; "" for other kinds
    shape: tuple[int, ...]
    nbytes: int  # bytes of the data; -1 if variable
    read: _Reader


class _Plain(NamedTuple):
    """A kind of leaves without a dtype."""

    pack: Callable[[Any], bytes]
    read: _Reader
    dtype: np.dtype[Any] | None  # of the data of numbers; None if their length is variable


def _number(code: str) -> _Plain:
    form = struct.Struct(f"={code}")
    return _Plain(form.pack, lambda buffer, start, nbytes: form.unpack_from(buffer, start)[0], np.dtype(code))


def _text(pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]) -> _Plain:
    return _Plain(pack, lambda buffer, start, nbytes: unpack(buffer[start : start + nbytes].tobytes()), None)


_utf8 = partial(str.encode, encoding="utf-8", errors="surrogatepass")


def _unpickled(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CodecError(f"a pickled leaf cannot be loaded: {error}") from error


_PLAIN = {
    "int": _number("q"),
    "float": _number("d"),
    "bool": _number("?"),
    "bytes": _text(bytes, bytes),
    "str": _text(_utf8, lambda data: data.decode("utf-8", "surrogatepass")),
    "npstr": _text(_utf8, lambda data: np.str_(data.decode("utf-8", "surrogatepass"))),
    "npbytes": _text(bytes, np.bytes_),
    "pickle": _text(values.pickled, _unpickled),
}
_TYPES = {kind.__name__: kind for kind in (int, float, bool, bytes, str)} | {"npstr": np.str_, "npbytes": np.bytes_}
_PACKS: dict[type, tuple[str, Callable[[Any], bytes]]] = {_TYPES[kind]: (kind, _PLAIN[kind].pack) for kind in _TYPES}


def _leaf_line(kind: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{kind} {','.join(map(str, shape))} {dtype}"


@lru_cache(4096)
def _leaf_of(line: str) -> Leaf:
    kind, *details = line.split(" ", 2)
    if kind in _PLAIN and not details:
        plain = _PLAIN[kind]
        return Leaf(kind, "", (), plain.dtype.itemsize if plain.dtype else -1, plain.read)
    dims, text = details
    shape = tuple([int(part) for part in dims.split(",")]) if dims else ()
    if ",".join(map(str, shape)) != dims or min(shape, default=0) < 0:
        raise ValueError(f"{dims!r} is no shape")
    if kind not in ("tensor", "array", "scalar") or (kind == "scalar" and shape):
        raise ValueError(f"a leaf of unknown kind {kind!r}")
    dtype, seen_as = leaf_dtypes(kind, text)
    if math.prod([dim for dim in shape if dim]) * dtype.itemsize > _LARGEST:
        raise ValueError(f"a leaf of the shape {shape} is too large")
    read = _array_reader(kind, shape, dtype, seen_as)
    return Leaf(kind, text, shape, math.prod(shape) * dtype.itemsize, read)


@lru_cache(4096)
def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a NumPy dtype as text; "" if it cannot be stored."""
    with suppress(TypeError, ValueError, SyntaxError):
        text = dtype.str if dtype.names is None else ascii(dtype.descr)
        if dtype.itemsize and not dtype.hasobject and dtype_of(text) == dtype:
            return text
    return ""


def dtype_of(text: str) -> np.dtype[Any]:
    """Return the NumPy dtype that a leaf names, as files of NumPy do."""
    if len(text) > _LONGEST:
        raise ValueError("the dtype is too long")
    return np.dtype(text) if text[:1] != "[" else np.lib.format.descr_to_dtype(ast.literal_eval(text))


def leaf_dtypes(kind: str, text: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """Return the NumPy dtype of a leaf's data, and the torch dtype to view it as if NumPy lacks that dtype."""
    if kind == "tensor":
        torch_dtype = TORCH_DTYPES[text]
        carrier = CARRIERS.get(torch_dtype)
        return np.dtype(TORCH_NAMES[carrier] if carrier else text), torch_dtype if carrier else None
    dtype = dtype_of(text)
    if dtype_text(dtype) != text:
        raise ValueError(f"{text!r} is no dtype that is stored")
    return dtype, None


def _array_reader(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seen_as: torch.dtype | None) -> _Reader:
    ndarray = np.ndarray
    from_numpy = torch.from_numpy if dtype != np.complex128 else values.aligned_tensor
    if kind == "array":
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start)
    if kind == "scalar":
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start).copy()[()]
    if seen_as is None:
        return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start))
    return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start)).view(seen_as)


# --- structures -----------------------------------------------------------------------------------------------------


class Structure:
    """Everything about a value except its data. Immutable; there is one object per key, so `is` compares structures.

    Attributes:
        key: the whole description as bytes, the same in every process; `structure_of(key)` returns the structure.
        leaves: the leaves, in order.
        fixed: no leaf is of variable length, so all values of this structure have the same size.
        offsets: start of each leaf's data in the packed data; empty if not fixed.
        size: bytes of the packed data, a multiple of 8; -1 if not fixed.
        pickled: some leaf is a pickle.
        has_views: some leaf is a tensor or an array.
        head: the first bytes of each record of this structure.
        nbytes, readers: per leaf, the bytes of its data (-1 if variable) and its reader.
        starts: start of each leaf's data in a record; empty if not fixed.
        make: makes the value of the sequence of the leaves' values.
    """

    def __init__(self, key: bytes) -> None:
        """Parse a key; use `structure_of`, which parses each key once."""
        leaves: list[Leaf] = []
        try:
            lines = iter(key.decode("utf-8", "surrogatepass").split("\n"))
            expression = _expression(lines, leaves, 0)
            flat = key[:2] == b"t " and key.count(b"\n") == len(leaves)  # the common case
            self.make: Callable[[Sequence[Any]], Any] = tuple if flat else _maker(expression)
            if next(lines, None) is not None:
                raise ValueError(f"it has more than {len(leaves)} leaves")
        except (*_MALFORMED, StopIteration) as error:
            raise CodecError(f"malformed description of a value: {error}") from error
        self.key, self.leaves = key, tuple(leaves)
        self.readers: tuple[_Reader, ...] = tuple([leaf.read for leaf in leaves])
        self.nbytes = tuple([leaf.nbytes for leaf in leaves])
        self.fixed = -1 not in self.nbytes
        self.pickled = any(leaf.kind == "pickle" for leaf in leaves)
        self.has_views = any(leaf.kind in ("tensor", "array") for leaf in leaves)
        variable = self.nbytes.count(-1)
        head = _HEAD.pack(MAGIC, len(key), variable, 0) + key
        head += bytes(-len(head) % (8 if variable else 64))
        self.head: Bytes = np.frombuffer(head, U8)
        self.offsets, self.size = _lay_out(self.nbytes) if self.fixed else ((), -1)
        self.starts = tuple([len(head) + offset for offset in self.offsets])

    def with_rows(self, count: int) -> "Structure":
        """Return this structure with `count` rows in each leaf, which has rows."""
        lines = self.key.split(b"\n")
        at = [number for number, line in enumerate(lines) if line[1:2] not in (b"", b" ")]
        for number, leaf in zip(at, self.leaves, strict=True):
            lines[number] = _leaf_line(leaf.kind, (count, *leaf.shape[1:]), leaf.dtype).encode()
        return structure_of(b"\n".join(lines))

    def __repr__(self) -> str:
        return f"Structure({self.key!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return structure_of, (self.key,)


_alive: weakref.WeakValueDictionary[bytes, Structure] = weakref.WeakValueDictionary()


def structure_of(key: bytes) -> Structure:
    """Return the structure that a key describes. Raises CodecError if the key is malformed."""
    if len(key) <= _SHORT:
        return _structure_of_short(key)
    return _structure_of_medium(key) if len(key) <= _MEDIUM else _intern(key)


def _intern(key: bytes) -> Structure:
    structure = _alive.get(key)
    return structure if structure is not None else _alive.setdefault(key, Structure(key))


_structure_of_short, _structure_of_medium = lru_cache(4096)(_intern), lru_cache(64)(_intern)


def _lay_out(nbytes: Sequence[int], start: int = 0) -> tuple[tuple[int, ...], int]:
    """Return the start of each leaf of these sizes if the data starts at `start`, and the end of the data."""
    offsets = []
    for size in nbytes:
        start = start + 63 & ~63 if size >= 64 else start + 15 & ~15 if size >= 16 else start + 7 & ~7
        offsets.append(start)
        start += size
    return tuple(offsets), start + 7 & ~7


def _expression(lines: Iterator[str], leaves: list[Leaf], depth: int) -> str:
    """Parse a node, and append its leaves; return the Python expression for its value, from the leaves' values `v`.

    It consists of numbers and of literals by `ascii`, so that a forged record cannot put code into it.
    """
    line = next(lines)
    if line == "-":
        return "None"
    if line[1:2] != " ":
        leaves.append(_leaf_of(line))
        return f"v[{len(leaves) - 1}]"
    if depth > _DEPTH:
        raise ValueError("nested too deeply")
    letter = line[0]
    details: Any = line[2:] if letter == "p" else json.loads(line[2:])

    def children(count: int) -> list[str]:
        first = len(leaves)
        items = [_expression(lines, leaves, depth + 1) for _ in range(count)]
        flat = count > _MANY and items == [f"v[{number}]" for number in range(first, first + count)]
        return [f"*v[{first}:{first + count}]"] if flat else items

    if letter == "t" and type(details) is int:
        return f"({''.join([f'{item},' for item in children(details)])})"
    if letter == "l" and type(details) is int:
        return f"[{','.join(children(details))}]"
    if letter in ("d", "o") and type(details) is list and _KEY_TYPES.issuperset(map(type, details)):
        items = children(len(details))
        if letter == "d" and len(items) == len(details):
            return f"{{{','.join([f'{key!a}:{item}' for key, item in zip(details, items, strict=True)])}}}"
        return f"{'dict' if letter == 'd' else 'ordered'}_of({','.join([ascii(details), *items])})"
    if letter == "p" and details in BANDS:
        return f"image_of({details!a},{','.join(children(2))})"
    if letter == "s" and sorted(details) == [*range(len(details))]:
        return f"permuted({details!a},{','.join(children(1))})"
    if letter == "n":
        module, qualname, fields = details
        if all(type(name) is str and name for name in (module, qualname, *fields)):
            return f"named_of({','.join([ascii((module, qualname, tuple(fields))), *children(len(fields))])})"
    raise ValueError(f"a node of unknown kind {letter!r}")


@lru_cache(512)
def _maker(expression: str) -> Callable[[Sequence[Any]], Any]:
    make: Callable[[Sequence[Any]], Any] = eval(f"lambda v: {expression}", _NODES)
    return make


def _named_of(described: tuple[str, str, tuple[str, ...]], *values: Any) -> Any:
    # Looked up each time, since a class may be redefined; `tuple.__new__` runs no code of that class.
    return tuple.__new__(_named_tuple(*described), values)


def _permuted(order: Sequence[int], value: Any) -> Any:
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        raise CodecError("a record holds permuted dimensions of what has none")
    return value.permute(*order) if isinstance(value, torch.Tensor) else value.transpose(order)


def _image_of(mode: str, pixels: Any, info: Any) -> Any:
    """Return the image, with memory of its own. Raises `CodecError` for what no image was made of."""
    from PIL import Image

    shape = np.shape(pixels)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or not isinstance(info, dict):
        raise CodecError("a record holds an image without pixels")
    if (shape[2] if len(shape) == 3 else 1) != BANDS[mode] or len(shape) != (2 if BANDS[mode] == 1 else 3):
        raise CodecError(f"a record holds an image of mode {mode} with pixels of shape {shape}")
    image = Image.frombytes(mode, (shape[1], shape[0]), np.ascontiguousarray(pixels).data)
    image.info = info
    return image


def _named_tuple(module: str, qualname: str, fields: tuple[str, ...]) -> type:
    """Return the named tuple class of that name, if it is imported and has these fields.

    The name may come from a forged record. Therefore nothing is imported, and names are looked up only in the
    dictionaries of modules and classes: no descriptor and no `__getattr__` runs.
    """
    owner: Any = sys.modules.get(module)
    names = _DICT_OF_MODULE(owner) if issubclass(type(owner), ModuleType) else {}
    for name in qualname.split("."):
        owner = names.get(name)
        names = _DICT_OF_CLASS(owner) if issubclass(type(owner), type) else {}
    if names and tuple in (bases := _MRO(owner)):
        known = next((body["_fields"] for base in bases if "_fields" in (body := _DICT_OF_CLASS(base))), None)
        if type(known) is tuple and known == fields:
            return owner  # type: ignore[no-any-return]
    raise MissingClassError(
        f"a record holds a named tuple {module}.{qualname} with the fields {', '.join(map(str, fields))}, whose class "
        f"is not here: import {module} where the data set is defined, or remove the cache if the class has changed",
        module,
    )


_DICT_OF_MODULE, _DICT_OF_CLASS = (vars(kind)["__dict__"].__get__ for kind in (ModuleType, type))
_MRO: Callable[[Any], tuple[type, ...]] = vars(type)["__mro__"].__get__

_NODES: dict[str, Any] = {
    "__builtins__": {},
    "dict_of": lambda keys, *values: dict(zip(keys, values, strict=True)),
    "ordered_of": lambda keys, *values: OrderedDict(zip(keys, values, strict=True)),
    "image_of": _image_of,
    "named_of": _named_of,
    "permuted": _permuted,
}
"""The functions that an expression of `_expression` calls."""


# --- encoding a value -----------------------------------------------------------------------------------------------


class _Unstorable(Exception):
    """Raised if `value`, somewhere in the tree, cannot be stored; never leaves this module."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value, self.reason = value, reason


_REFUSE, _PICKLE, _OWN = range(3)
"""What happens to values of other types: an error, a pickle, or a pickle in a record for processes of this job."""
_OTHER = (
    "cannot be stored without pickle; make it a plain tensor, array, bytes, str, number, None, or a plain dict, list "
    "or tuple of these"
)
_EMPTY = np.empty(0, U8)


def encode(value: Any, *, allow_pickle: bool = False) -> tuple[Structure, list[Bytes]]:
    """Split `value` into its structure and the bytes of each leaf, as 1-D uint8 arrays.

    The arrays share memory with the value where it is contiguous, so write them before the value changes. Values of
    other types are pickled if `allow_pickle` is true; otherwise CodecError names their type and position.
    """
    return _encode(value, _PICKLE if allow_pickle else _REFUSE)


def encode_own(value: Any) -> tuple[Structure, list[Bytes]]:
    """Like `encode` with `allow_pickle`, for values read only by processes of this job: tensors keep their strides.

    Lists, tuples and dicts of many strings and numbers become one pickle, since a batch may hold thousands of them.
    """
    return _encode(value, _OWN)


def _encode(value: Any, mode: int) -> tuple[Structure, list[Bytes]]:
    lines: list[_Line] = []
    arrays: list[Bytes] = []
    try:
        _walk(value, lines, arrays, 0, mode)
    except _Unstorable as problem:
        place, bad, kind = "", problem.value, type(problem.value)
        with suppress(RecursionError, ValueError):  # it contains itself
            pairs, _ = tree_flatten_with_path(value, is_leaf=lambda part: part is bad)
            place = next((keystr(path) for path, part in pairs if part is bad), "")
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise value_unstorable(f"sample{place}: {name}: {problem.reason}") from problem.__cause__
    return (_structure_of_lines if len(lines) <= _MANY_LINES else _parsed)(tuple(lines)), arrays


def _parsed(lines: tuple[_Line, ...]) -> Structure:
    texts = [line if type(line) is str else _leaf_line(*line) for line in lines]
    return structure_of("\n".join(texts).encode("utf-8", "surrogatepass"))


_structure_of_lines = lru_cache(4096)(_parsed)


def _walk(value: Any, lines: list[_Line], arrays: list[Bytes], depth: int, mode: int) -> None:
    """Append the lines of `value` to `lines`, and the bytes of its leaves to `arrays`."""
    kind = type(value)
    if kind is torch.Tensor:
        array = array_of(value)
        if array is not None:
            return _add_array("tensor", array, TORCH_NAMES[value.dtype], lines, arrays, mode)
        what = f"{value.layout}{', nested' * value.is_nested}, {value.dtype}, on {value.device}"
        reason = f"is {what}{', and requires grad' * value.requires_grad}; make it dense, on the CPU and detached"
        return _add_pickle(value, reason, lines, arrays, mode)
    packs = _PACKS.get(kind)
    if packs is not None:
        name, pack = packs
        try:
            data = pack(value)
        except struct.error:
            return _add_pickle(value, "is beyond 64 bits; make it a text", lines, arrays, mode)
        lines.append(name)
        return arrays.append(np.frombuffer(data, U8) if data else _EMPTY)
    if kind is np.ndarray:
        text = dtype_text(value.dtype)
        if text:
            return _add_array("array", value, text, lines, arrays, mode)
        reason = f"has the dtype {value.dtype!r}, which has no portable description; convert it"
        return _add_pickle(value, reason, lines, arrays, mode)
    if value is None:
        return lines.append("-")
    if depth >= _DEPTH:
        raise _Unstorable(value, f"is nested more than {_DEPTH} levels deep, or contains itself")
    children = value
    if kind is tuple:
        line = f"t {len(value)}"
    elif kind is list:
        line = f"l {len(value)}"
    elif kind is dict or kind is OrderedDict:
        line, children = _dict_line(kind, tuple(value), tuple(map(type, value))), value.values()
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        line = _OTHER if getattr(value, "__dict__", None) else _named_tuple_line(kind)
    elif values.is_image(value):
        line, children = f"p {value.mode}", (np.asarray(value), value.info)
    elif issubclass(kind, np.generic) and (text := dtype_text(value.dtype)) and kind is dtype_of(text).type:
        return _add_array("scalar", np.array(value), text, lines, arrays, mode)
    else:  # also a subclass of a scalar, and one of two types of the same width
        line = _OTHER
    if line[1] != " ":
        return _add_pickle(value, line, lines, arrays, mode)
    if mode == _OWN and kind in (tuple, list, dict) and len(value) > _MANY and _SIMPLE.issuperset(map(type, children)):
        lines.append("pickle")
        return arrays.append(np.frombuffer(pickle.dumps(value, 5), U8))
    lines.append(line)
    depth += 1
    for child in children:
        _walk(child, lines, arrays, depth, mode)


def array_of(tensor: torch.Tensor) -> Any:
    """Return the elements of a tensor as an array; None if it is not dense, on the CPU and detached."""
    carrier = CARRIERS.get(tensor.dtype)
    if tensor.requires_grad or tensor.dtype not in TORCH_NAMES:
        return None
    try:
        return tensor.numpy() if carrier is None else tensor.resolve_conj().resolve_neg().view(carrier).numpy()
    except (TypeError, RuntimeError):
        lazy = tensor.device.type == "cpu" and (tensor.is_conj() or tensor.is_neg())
        return array_of(tensor.resolve_conj().resolve_neg()) if lazy else None


def _add_array(kind: str, array: Any, dtype: str, lines: list[_Line], arrays: list[Bytes], mode: int) -> None:
    if mode == _OWN and not array.flags.c_contiguous:
        array, order = values.in_order(array)
        if order:
            lines.append(f"s {json.dumps(order)}")
    lines.append((kind, array.shape, dtype))
    arrays.append(array.ravel().view(U8))


def _add_pickle(value: Any, reason: str, lines: list[_Line], arrays: list[Bytes], mode: int) -> None:
    """Append a pickle of a value that cannot be stored otherwise for a `reason`."""
    if mode == _REFUSE:
        raise _Unstorable(value, f"{reason}, or pass allow_pickle=True")
    try:
        data = values.pickled(value)
    except Exception as error:
        raise _Unstorable(value, f"{reason}. It cannot be pickled either: {error}") from error
    lines.append("pickle")
    arrays.append(np.frombuffer(data, U8))


@lru_cache(4096)
def _dict_line(kind: type, keys: tuple[Any, ...], types: tuple[type, ...]) -> str:
    """Return the line of a dict with these keys, or why it has none."""
    bad = next((each for each in types if each not in _KEY_TYPES), None)
    if bad is not None:
        return f"has a key of type {bad.__qualname__}; use str, int, bool or None"
    return f"{'d' if kind is dict else 'o'} {json.dumps(keys, ensure_ascii=False)}"


@lru_cache(4096)
def _named_tuple_line(kind: type) -> str:
    """Return the line of a named tuple, or why it has none."""
    described = kind.__module__, kind.__qualname__, kind._fields  # type: ignore[attr-defined]
    try:
        if _named_tuple(*described) is kind:
            return f"n {json.dumps(described)}"
    except CodecError:
        return "is not found under its name; define the named tuple at the top level of a module"
    return "another class has its name in its module"


# --- records --------------------------------------------------------------------------------------------------------


def _layout(structure: Structure, nbytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the start of each leaf of these sizes in a record, and the end of the record."""
    if structure.fixed:
        return structure.starts, structure.head.size + structure.size
    return _lay_out(nbytes, structure.head.size + 8 * structure.nbytes.count(-1) + 63 & ~63)


def record_size(structure: Structure, arrays: Sequence[Bytes]) -> int:
    """Return the size in bytes of the record of these leaves."""
    return _layout(structure, [array.size for array in arrays])[1]


def write_record(structure: Structure, arrays: Sequence[Bytes], out: Bytes) -> int:
    """Write the record of these leaves at the start of `out` (1-D uint8, writable); return the bytes used.

    Bytes between leaves keep the contents of `out`.
    """
    nbytes = [array.size for array in arrays]
    for region, array in zip(open_record(structure, out, nbytes), arrays, strict=True):
        region[:] = array
    return _layout(structure, nbytes)[1]


def open_record(structure: Structure, out: Bytes, nbytes: Sequence[int] | None = None) -> list[Bytes]:
    """Write the head of a record of leaves of these sizes, of a fixed structure by default, at the start of `out`.

    Return the part of `out` (1-D uint8, writable) for each leaf's data, so that the record is composed in place. Bytes
    between leaves keep the contents of `out`. Raises CodecError if `out` is too small, or the sizes do not fit.
    """
    sizes = structure.nbytes if nbytes is None else nbytes
    starts, end = _layout(structure, sizes)
    if end > out.size or len(sizes) != len(structure.leaves) or -1 in sizes:
        raise CodecError(f"a record of {end} bytes and {len(structure.leaves)} leaves, not {out.size} and {sizes}")
    used = structure.head.size
    out[:used] = structure.head
    if not structure.fixed:
        lengths = [size for size, fixed in zip(sizes, structure.nbytes, strict=True) if fixed < 0]
        out[used : used + 8 * len(lengths)] = np.array(lengths, np.uint64).view(U8)
    return [out[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def read_record(buffer: Bytes, *, copy: bool, allow_pickle: bool = False) -> Any:
    """Return the value of the record at the start of `buffer` (1-D uint8, may be longer than the record).

    With `copy`, all arrays and tensors of a value share one new block of memory. Without, they are views of `buffer`
    and keep it alive: a `weakref.finalize` on it runs when the last of them is freed. For that, `buffer` must be an
    array whose base is not an array (made by `np.frombuffer` or `np.empty`, not a slice), since NumPy views refer to
    the topmost array. A read-only buffer is always copied, because tensors cannot be read-only.

    A malformed or truncated record raises CodecError, as does a pickled leaf unless `allow_pickle`. Nothing is
    imported: a named tuple whose class is not imported yet raises `MissingClassError`.
    """
    try:
        available = buffer.size
        if available < _HEAD.size or buffer.dtype != U8 or buffer.ndim != 1:
            raise CodecError(f"malformed record: {available} elements of {buffer.dtype}, expected uint8 and a header")
        magic, key_size, variable, _ = _HEAD.unpack_from(buffer)  # type: ignore[arg-type]
        if magic != MAGIC or _HEAD.size + key_size > available:
            raise CodecError("malformed record: wrong magic number or truncated")
        structure = structure_of(buffer[_HEAD.size : _HEAD.size + key_size].tobytes())
        base, nbytes, starts = structure.head.size, structure.nbytes, structure.starts
        end = base + structure.size
        if variable or not structure.fixed:
            if variable != nbytes.count(-1):
                raise CodecError("malformed record: wrong number of variable leaves")
            lengths = iter(np.frombuffer(buffer, np.uint64, variable, base).tolist())
            nbytes = tuple([next(lengths) if size < 0 else size for size in nbytes])
            starts, end = _layout(structure, nbytes)
        if end > available:
            raise CodecError(f"malformed record: {available} bytes of {end}")
        if structure.pickled and not allow_pickle:
            raise CodecError("the record holds a pickled leaf, which is loaded only with allow_pickle=True")
        if structure.has_views and (copy or not buffer.flags.writeable):
            buffer = buffer[base & ~63 : end].copy()
            starts = structure.offsets if structure.fixed else tuple([start - (base & ~63) for start in starts])
        return structure.make(
            [read(buffer, at, n) for read, at, n in zip(structure.readers, starts, nbytes, strict=True)]
        )
    except CodecError:
        raise
    except _MALFORMED as error:
        raise CodecError(f"malformed record: {error}") from error


def read_own_record(buffer: Bytes, *, copy: bool) -> Any:
    """Like `read_record`, for records of this job's workers: as with pickle, classes are imported.

    Exceptions of a failed import are raised.
    """
    while True:
        try:
            return read_record(buffer, copy=copy, allow_pickle=True)
        except MissingClassError as error:
            if error.module in sys.modules:
                raise
            import_module(error.module)


def read_leaves(structure: Structure, data: Bytes) -> Any:
    """Return the value of a fixed structure from packed data (a record without head). Leaves are views of `data`."""
    pairs = zip(structure.readers, structure.offsets, structure.nbytes, strict=True)
    return structure.make([read(data, at, nbytes) for read, at, nbytes in pairs])


def stack_build(structure: Structure, columns: Sequence[Bytes], count: int) -> list[Any]:
    """Return `count` values of a fixed structure, from one uint8 column per leaf of shape (count, leaf.nbytes).

    The columns are C-contiguous. Tensors and arrays are views of them, so they should belong to the caller only. The
    tensors of one column are views of one tensor: to keep a few of many, clone them.
    """
    if not structure.fixed or len(columns) != len(structure.leaves):
        raise CodecError("stack_build needs a fixed structure and one column per leaf")
    lists = [_rows(leaf, column, count) for leaf, column in zip(structure.leaves, columns, strict=True)]
    if len(lists) == 1 and b"\n" not in structure.key:  # the value is a leaf
        return list(lists[0])
    rows = zip(*lists, strict=True) if lists else [()] * count
    return list(rows) if structure.make is tuple else list(map(structure.make, rows))


def _rows(leaf: Leaf, column: Bytes, count: int) -> Sequence[Any]:
    """Return the value of a leaf in each row of its column."""
    kind, text, shape, nbytes, _ = leaf
    if column.shape != (count, nbytes) or column.dtype != U8:
        raise CodecError(f"a column of {column.dtype}{column.shape} was given, uint8{(count, nbytes)} expected")
    if kind in _PLAIN:
        numbers: list[Any] = column.view(_PLAIN[kind].dtype).ravel().tolist()  # type: ignore[arg-type]
        return numbers
    dtype, seen_as = leaf_dtypes(kind, text)
    typed = column.view(dtype).reshape(count, *shape)
    if kind == "tensor":
        stacked = values.aligned_tensor(typed)
        return (stacked.view(seen_as) if seen_as else stacked).unbind(0)
    if kind == "array" and not shape:
        return [typed[row, ...] for row in range(count)]
    return list(typed)
