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
import io
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
from stallfree.pipeline.values import BANDS, CARRIERS, TORCH_DTYPES, TORCH_NAMES, U8, aligned_tensor, in_order, is_image

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
MAGIC = 0x5AFE0D01
_HEAD = struct.Struct("=IIII")
_DEPTH = 100  # deeper nesting is treated as a value that contains itself
_LONGEST = 1000  # characters of a dtype
_SHORT, _FEW = 8192, 64
"""Bytes of a key, and its lines, up to which the structure is remembered while no value has it."""
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
    name: str  # of a torch dtype, or a NumPy dtype as text; "" for other kinds
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of the data, as NumPy sees it
    nbytes: int  # bytes of the data; -1 if variable
    read: _Reader


_Plain = tuple[Callable[[Any], bytes], Leaf]
"""A kind of leaves without a dtype: what makes the bytes of a value, and the leaf."""


def _number(kind: str, code: str) -> _Plain:
    form = struct.Struct(f"={code}")
    dtype = np.dtype(code)
    return form.pack, Leaf(kind, "", (), dtype, dtype.itemsize, lambda buffer, at, n: form.unpack_from(buffer, at)[0])


def _text(kind: str, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]) -> _Plain:
    return pack, Leaf(kind, "", (), U8, -1, lambda buffer, at, n: unpack(buffer[at : at + n].tobytes()))


_utf8 = partial(str.encode, encoding="utf-8", errors="surrogatepass")


_PLAIN: dict[type, _Plain] = {
    int: _number("int", "q"),
    float: _number("float", "d"),
    bool: _number("bool", "?"),
    bytes: _text("bytes", bytes, bytes),
    str: _text("str", _utf8, lambda data: data.decode("utf-8", "surrogatepass")),
    np.str_: _text("npstr", _utf8, lambda data: np.str_(data.decode("utf-8", "surrogatepass"))),
    np.bytes_: _text("npbytes", bytes, np.bytes_),
}
_PLAIN_LEAVES = {leaf.kind: leaf for _, leaf in (*_PLAIN.values(), _text("pickle", bytes, pickle.loads))}


def _leaf_line(kind: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{kind} {','.join(map(str, shape))} {dtype}"


@lru_cache(4096)
def _leaf_of(line: str) -> Leaf:
    if line in _PLAIN_LEAVES:
        return _PLAIN_LEAVES[line]
    kind, dims, name = line.split(" ", 2)
    shape = tuple([int(part) for part in dims.split(",")]) if dims else ()
    seen_as = TORCH_DTYPES[name] if kind == "tensor" else None
    dtype = dtype_of(TORCH_NAMES[CARRIERS.get(seen_as, seen_as)] if seen_as else name)
    if not seen_as and dtype_text(dtype) != name:
        raise ValueError(f"{name!r} is no dtype that is stored")
    read = _reader(kind, shape, dtype, seen_as)
    return Leaf(kind, name, shape, dtype, math.prod(shape) * dtype.itemsize, read)


def _reader(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seen_as: torch.dtype | None) -> _Reader:
    ndarray = np.ndarray
    if kind == "array":
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start)
    if kind == "scalar" and not shape:
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start).copy()[()]
    if seen_as is None:
        raise ValueError(f"a leaf of unknown kind {kind!r}")
    from_numpy = torch.from_numpy if dtype != np.complex128 else aligned_tensor
    if seen_as in CARRIERS:
        return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start)).view(seen_as)
    return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start))


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
        except Exception as error:
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
            lines[number] = _leaf_line(leaf.kind, (count, *leaf.shape[1:]), leaf.name).encode()
        return structure_of(b"\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return structure_of, (self.key,)


_alive: weakref.WeakValueDictionary[bytes, Structure] = weakref.WeakValueDictionary()


def structure_of(key: bytes) -> Structure:
    """Return the structure that a key describes. Raises CodecError if the key is malformed."""
    return (_remembered if len(key) <= _SHORT else _intern)(key)


def _intern(key: bytes) -> Structure:
    structure = _alive.get(key)
    return structure if structure is not None else _alive.setdefault(key, Structure(key))


_remembered = lru_cache(1024)(_intern)


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
    return value.permute(*order) if isinstance(value, torch.Tensor) else value.transpose(order)


def _image_of(mode: str, pixels: Any, info: Any) -> Any:
    """Return the image, with memory of its own."""
    from PIL import Image

    height, width = pixels.shape[:2]
    image = Image.frombytes(mode, (width, height), np.ascontiguousarray(pixels).data)
    image.info = dict(info)
    return image


def _named_tuple(module: str, name: str, fields: tuple[str, ...]) -> type:
    """Return the named tuple class of that name at the top level of a module, if it is imported and has these fields.

    The name may come from a forged record. Therefore nothing is imported, and only the dictionary of the module is
    read: no `__getattr__` runs, nor what a lazy module does when it is looked at.
    """
    owner: Any = sys.modules.get(module)
    found: Any = object.__getattribute__(owner, "__dict__").get(name) if issubclass(type(owner), ModuleType) else None
    if issubclass(type(found), type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found  # type: ignore[no-any-return]
    raise MissingClassError(
        f"a record holds a named tuple {module}.{name} with the fields {', '.join(map(str, fields))}, whose class "
        f"is not here: import {module} where the data set is defined, or remove the cache if the class has changed",
        module,
    )


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
    """Raised with a value, somewhere in the tree, that cannot be stored, and the reason; never leaves this module."""


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
        bad, reason = problem.args
        place, kind = "", type(bad)
        with suppress(RecursionError, ValueError):  # it contains itself
            pairs, _ = tree_flatten_with_path(value, is_leaf=lambda part: part is bad)
            place = next((keystr(path) for path, part in pairs if part is bad), "")
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise value_unstorable(f"sample{place}: {name}: {reason}") from problem.__cause__
    return (_structure_of_lines if len(lines) <= _FEW else _parsed)(tuple(lines)), arrays


def _parsed(lines: tuple[_Line, ...]) -> Structure:
    texts = [line if type(line) is str else _leaf_line(*line) for line in lines]
    return structure_of("\n".join(texts).encode("utf-8", "surrogatepass"))


_structure_of_lines = lru_cache(4096)(_parsed)


def _walk(value: Any, lines: list[_Line], arrays: list[Bytes], depth: int, mode: int) -> None:
    """Append the lines of `value` to `lines`, and the bytes of its leaves to `arrays`."""
    kind, children = type(value), value
    plain = _PLAIN.get(kind)
    if plain is not None:
        pack, leaf = plain
        try:
            data = pack(value)
        except struct.error:
            return _add_pickle(value, "is beyond 64 bits; make it a text", lines, arrays, mode)
        lines.append(leaf.kind)
        return arrays.append(np.frombuffer(data, U8) if data else _EMPTY)
    if kind is torch.Tensor:
        array = array_of(value)
        if array is not None:
            return _add_array("tensor", array, TORCH_NAMES[value.dtype], lines, arrays, mode)
        line = f"is {value.layout}{', nested' * value.is_nested}, {value.dtype}, on {value.device}"
        line += f"{', and requires grad' * value.requires_grad}; make it dense, on the CPU and detached"
    elif kind is np.ndarray:
        text = dtype_text(value.dtype)
        if text:
            return _add_array("array", value, text, lines, arrays, mode)
        line = f"has the dtype {value.dtype!r}, which has no portable description; convert it"
    elif value is None:
        return lines.append("-")
    elif depth >= _DEPTH:
        raise _Unstorable(value, f"is nested more than {_DEPTH} levels deep, or contains itself")
    elif kind is tuple:
        line = f"t {len(value)}"
    elif kind is list:
        line = f"l {len(value)}"
    elif kind is dict or kind is OrderedDict:
        line, children = _dict_line(kind, tuple(value), tuple(map(type, value))), value.values()
    elif issubclass(kind, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None):
        line = _named_tuple_line(kind)
    elif is_image(value):
        line, children = f"p {value.mode}", (np.asarray(value), value.info)
    elif issubclass(kind, np.generic) and (text := dtype_text(value.dtype)) and kind is dtype_of(text).type:
        return _add_array("scalar", np.array(value), text, lines, arrays, mode)
    else:  # also a subclass of a scalar, and one of two types of the same width
        line = _OTHER
    if line[1] != " ":  # it is a reason
        return _add_pickle(value, line, lines, arrays, mode)
    if mode == _OWN and kind in (tuple, list, dict) and len(value) > _MANY and _SIMPLE.issuperset(map(type, children)):
        lines.append("pickle")
        return arrays.append(np.frombuffer(pickle.dumps(value, 5), U8))
    lines.append(line)
    for child in children:
        _walk(child, lines, arrays, depth + 1, mode)


def array_of(tensor: torch.Tensor) -> Any:
    """Return the elements of a tensor as an array; None if it is not dense, on the CPU and detached."""
    if tensor.requires_grad or tensor.dtype not in TORCH_NAMES:
        return None
    carrier = CARRIERS.get(tensor.dtype)
    try:
        return tensor.numpy() if carrier is None else tensor.resolve_conj().view(carrier).numpy()
    except (TypeError, RuntimeError):
        lazy = tensor.is_conj() or tensor.is_neg()
        return array_of(tensor.resolve_conj().resolve_neg()) if lazy else None


def _add_array(kind: str, array: Any, dtype: str, lines: list[_Line], arrays: list[Bytes], mode: int) -> None:
    if mode == _OWN and not array.flags.c_contiguous:
        array, order = in_order(array)
        if order:
            lines.append(f"s {json.dumps(order)}")
    lines.append((kind, array.shape, dtype))
    arrays.append(array.ravel().view(U8))


def _add_pickle(value: Any, reason: str, lines: list[_Line], arrays: list[Bytes], mode: int) -> None:
    """Append a pickle of a value that cannot be stored otherwise for a `reason`."""
    if mode == _REFUSE:
        raise _Unstorable(value, f"{reason}, or pass allow_pickle=True")
    try:
        data = pickled(value)
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
    with suppress(CodecError):
        if _named_tuple(*described) is kind:
            return f"n {json.dumps(described)}"
    return "is not found under its name; define the named tuple at the top level of a module"


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


def record_of(structure: Structure, arrays: Sequence[Bytes]) -> Bytes:
    """Return the record of these leaves in memory of its own. Bytes between leaves are zero."""
    record = np.zeros(record_size(structure, arrays), U8)
    write_record(structure, arrays, record)
    return record


def open_record(structure: Structure, out: Bytes, nbytes: Sequence[int] | None = None) -> list[Bytes]:
    """Write the head of a record of leaves of these sizes, of a fixed structure by default, at the start of `out`.

    Return the part of `out` (1-D uint8, writable) for each leaf's data, so that the record is composed in place. Bytes
    between leaves keep the contents of `out`.
    """
    sizes = structure.nbytes if nbytes is None else nbytes
    starts, _ = _layout(structure, sizes)
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
    except Exception as error:  # of parsing and reading what is damaged or forged
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
    lists = [_rows(leaf, column, count) for leaf, column in zip(structure.leaves, columns, strict=True)]
    if len(lists) == 1 and b"\n" not in structure.key:  # the value is a leaf
        return list(lists[0])
    rows = zip(*lists, strict=True) if lists else [()] * count
    return list(rows) if structure.make is tuple else list(map(structure.make, rows))


def _rows(leaf: Leaf, column: Bytes, count: int) -> Sequence[Any]:
    """Return the value of a leaf in each row of its column."""
    typed: Any = column.view(leaf.dtype).reshape(count, *leaf.shape)
    if leaf.kind == "tensor":
        stacked = aligned_tensor(typed)
        dtype = TORCH_DTYPES[leaf.name]
        return (stacked if stacked.dtype == dtype else stacked.view(dtype)).unbind(0)
    if leaf.kind == "array" and not leaf.shape:
        return [typed[row, ...] for row in range(count)]
    return list(typed) if leaf.name else typed.tolist()


# --- pickles --------------------------------------------------------------------------------------------------------


def pickled(value: Any) -> bytes:
    """Return `value` as a pickle, for `pickle.loads`. Equal values of this process have equal pickles.

    Torch's own pickles of tensors hold their whole storage, cannot be loaded for some dtypes, and cut gradients.
    Raises `TypeError` for a tensor with a gradient history.
    """
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise TypeError("a tensor has a gradient history, which is lost elsewhere; call .detach() on it")
        if type(value) is not torch.Tensor or vars(value) or array_of(value.detach()) is None:
            return NotImplemented
        return _unpickled_tensor, (record_of(*encode_own(value.detach())), value.requires_grad)


def _unpickled_tensor(record: Bytes, requires_grad: bool) -> torch.Tensor:
    tensor: torch.Tensor = read_own_record(record, copy=False)
    return tensor.requires_grad_(requires_grad)
