"""The record format of samples: values as flat bytes, without pickle.

A *value* is a tree of dict, OrderedDict, list, tuple and named tuple. Its leaves are of five kinds: tensors, arrays,
numbers (also NumPy's), texts and bytes, and pickles for the rest where these are allowed. None belongs to the tree. An
image of Pillow is a node of its pixels and its `info`. `encode` splits a value into a `Structure`, which describes
everything but the data, and one flat array of bytes per leaf, which shares memory with the value where possible:

    structure, arrays = encode((image, label))
    out = np.empty(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, out)
    image, label = read_record(out, copy=True)

A *record* describes itself. All numbers are in the host's byte order (others fail at the magic number):

    u32 magic, u32 length of the key, u32 number of variable leaves, u32 zero
    the key of the structure
    u64 length of each variable leaf, from the next multiple of 8
    the data, from the next multiple of 64; a leaf of 64 bytes or more begins at a multiple of 64, one of 16 or more
    at a multiple of 16 (torch's complex numbers need it), others at a multiple of 8

Types match exactly: a subclass of a type above is not that type, because a cache hit must return the same as a miss.
structure.py describes keys.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from stallfree.errors import CodecError, value_unstorable
from stallfree.pipeline.structure import (
    DEPTH,
    FLOAT,
    HEAD,
    INT,
    KEY_TYPES,
    MAGIC,
    MALFORMED,
    NUMBERS,
    Bytes,
    Leaf,
    MissingClassError,
    Structure,
    dtype_of,
    dtype_text,
    lay_out,
    leaf_dtypes,
    leaf_line,
    named_tuple,
    only,
    structure_of,
)
from stallfree.pipeline.values import CARRIERS, TORCH_NAMES, U8, aligned_tensor, in_order, is_image, pickled

_PLAIN = frozenset({*KEY_TYPES, float, complex, bytes})
_MANY_LINES = 64
"""Lines of a key from which a structure is not remembered by them."""
_MANY = 8
"""Items from which a container of plain values is one pickle in a record for processes of this job."""


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
    lines: list[str] = []
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
    if len(lines) > _MANY_LINES:
        return structure_of("\n".join(lines).encode("utf-8", "surrogatepass")), arrays
    return _structure_of_lines(tuple(lines)), arrays


def _walk(value: Any, lines: list[str], arrays: list[Bytes], depth: int, mode: int) -> None:
    kind = type(value)
    take = _TAKE.get(kind)
    if take is not None:
        return take(value, lines, arrays, mode)
    if depth >= DEPTH:
        raise _Unstorable(value, f"is nested more than {DEPTH} levels deep, or contains itself")
    children = value
    if kind is tuple:
        line = f"t {len(value)}"
    elif kind is list:
        line = f"l {len(value)}"
    elif kind is dict or kind is OrderedDict:
        line, children = _dict_line(kind, tuple(value), tuple(map(type, value))), value.values()
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        line = _OTHER if getattr(value, "__dict__", None) else _named_tuple_line(kind)
    elif is_image(value):
        line, children = f"p {value.mode}", (np.asarray(value), value.info)
    elif issubclass(kind, np.generic):
        return _take_scalar(value, lines, arrays, mode)
    else:
        line = _OTHER
    if line[1] != " ":
        return _take_other(value, line, lines, arrays, mode)
    if mode == _OWN and kind in (tuple, list, dict) and len(value) > _MANY and _PLAIN.issuperset(map(type, children)):
        return _add(lines, arrays, "pickle", pickle.dumps(value, 5))
    lines.append(line)
    depth += 1
    for child in children:
        _walk(child, lines, arrays, depth, mode)


@lru_cache(4096)
def _dict_line(kind: type, keys: tuple[Any, ...], types: tuple[type, ...]) -> str:
    """Return the line of a dict with these keys, or why it has none."""
    bad = next((each for each in types if each not in KEY_TYPES), None)
    if bad is not None:
        return f"has a key of type {bad.__qualname__}; use str, int, bool or None"
    return f"{'d' if kind is dict else 'o'} {json.dumps(keys, ensure_ascii=False)}"


@lru_cache(4096)
def _named_tuple_line(kind: type) -> str:
    """Return the line of a named tuple, or why it has none."""
    described = kind.__module__, kind.__qualname__, kind._fields  # type: ignore[attr-defined]
    try:
        if named_tuple(*described) is kind:
            return f"n {json.dumps(described)}"
    except CodecError:
        return "is not found under its name; define the named tuple at the top level of a module"
    return "another class has its name in its module"


def _add(lines: list[str], arrays: list[Bytes], kind: str, data: bytes) -> None:
    lines.append(kind)
    arrays.append(np.frombuffer(data, U8) if data else np.empty(0, U8))


def _add_array(kind: str, array: Any, dtype: str, lines: list[str], arrays: list[Bytes], mode: int) -> None:
    if mode == _OWN and not array.flags.c_contiguous:
        array, order = in_order(array)
        if order:
            lines.append(f"s {json.dumps(order)}")
    lines.append(leaf_line(kind, array.shape, dtype))
    arrays.append(array.ravel().view(U8))


def _take_tensor(value: torch.Tensor, lines: list[str], arrays: list[Bytes], mode: int) -> None:
    dtype = value.dtype
    try:
        name = TORCH_NAMES[dtype]
        if dtype not in CARRIERS:
            array = value.numpy()
        elif value.requires_grad:  # the view would hide it
            raise TypeError
        else:
            array = value.resolve_conj().resolve_neg().view(CARRIERS[dtype]).numpy()
    except (KeyError, TypeError, RuntimeError):
        usable = not value.requires_grad and value.device.type == "cpu" and dtype in TORCH_NAMES
        if usable and (value.is_conj() or value.is_neg()):
            return _take_tensor(value.resolve_conj().resolve_neg(), lines, arrays, mode)
        what = f"{value.layout}{', nested' * value.is_nested}, {dtype}, on {value.device}"
        reason = f"is {what}{', and requires grad' * value.requires_grad}; make it dense, on the CPU and detached"
        return _take_other(value, reason, lines, arrays, mode)
    _add_array("tensor", array, name, lines, arrays, mode)


def _take_array(value: npt.NDArray[Any], lines: list[str], arrays: list[Bytes], mode: int) -> None:
    text = dtype_text(value.dtype)
    if not text:
        reason = f"has the dtype {value.dtype!r}, which has no portable description; convert it"
        return _take_other(value, reason, lines, arrays, mode)
    _add_array("array", value, text, lines, arrays, mode)


def _take_scalar(value: np.generic, lines: list[str], arrays: list[Bytes], mode: int) -> None:
    text = dtype_text(value.dtype)
    if not text or type(value) is not dtype_of(text).type:  # a subclass, or one of two types of the same width
        return _take_other(value, _OTHER, lines, arrays, mode)
    _add_array("scalar", np.array(value), text, lines, arrays, _REFUSE)


def _take_int(value: int, lines: list[str], arrays: list[Bytes], mode: int) -> None:
    try:
        data = INT.pack(value)
    except struct.error:
        return _take_other(value, "is beyond 64 bits; make it a text", lines, arrays, mode)
    lines.append("int")
    arrays.append(np.frombuffer(data, U8))


_Take = Callable[[Any, list[str], list[Bytes], int], None]


def _taker(kind: str, to_bytes: Callable[[Any], bytes]) -> _Take:
    return lambda value, lines, arrays, mode: _add(lines, arrays, kind, to_bytes(value))


_TAKE: dict[type, _Take] = {
    torch.Tensor: _take_tensor,
    np.ndarray: _take_array,
    int: _take_int,
    float: _taker("float", FLOAT.pack),
    bool: _taker("bool", lambda value: b"\1" if value else b"\0"),
    complex: _taker("complex", lambda value: FLOAT.pack(value.real) + FLOAT.pack(value.imag)),
    type(None): lambda value, lines, arrays, mode: lines.append("-"),
    bytes: _taker("bytes", bytes),
    str: _taker("str", lambda value: value.encode("utf-8", "surrogatepass")),
    np.str_: _taker("npstr", lambda value: str.encode(value, "utf-8", "surrogatepass")),
    np.bytes_: _taker("npbytes", bytes),
}


def _take_other(value: Any, reason: str, lines: list[str], arrays: list[Bytes], mode: int) -> None:
    if mode == _REFUSE:
        raise _Unstorable(value, f"{reason}, or pass allow_pickle=True")
    try:
        data = pickled(value)
    except Exception as error:
        raise _Unstorable(value, f"{reason}. It cannot be pickled either: {error}") from error
    _add(lines, arrays, "pickle", data)


@lru_cache(4096)
def _structure_of_lines(lines: tuple[str, ...]) -> Structure:
    return structure_of("\n".join(lines).encode("utf-8", "surrogatepass"))


# --- records --------------------------------------------------------------------------------------------------------


def record_size(structure: Structure, arrays: Sequence[Bytes]) -> int:
    """Return the size in bytes of the record of these leaves."""
    if structure.fixed:
        return structure.head.size + structure.size
    return _variable_layout(structure, [array.size for array in arrays])[1]


def _variable_layout(structure: Structure, nbytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    start = structure.head.size + 8 * structure.nbytes.count(-1)
    return lay_out(nbytes, start + 63 & ~63)


def write_record(structure: Structure, arrays: Sequence[Bytes], out: Bytes) -> int:
    """Write the record of these leaves at the start of `out` (1-D uint8, writable); return the bytes used.

    Bytes between leaves keep the contents of `out`.
    """
    head = structure.head
    used = head.size
    if structure.fixed:
        starts, end = structure.starts, used + structure.size
    else:
        nbytes = [array.size for array in arrays]
        starts, end = _variable_layout(structure, nbytes)
    if end > out.size or len(arrays) != len(starts):
        raise CodecError(f"a record of {end} bytes and {len(starts)} leaves: {len(arrays)} leaves for {out.size} bytes")
    out[:used] = head
    if not structure.fixed:
        lengths = [size for size, fixed in zip(nbytes, structure.nbytes, strict=True) if fixed < 0]
        out[used : used + 8 * len(lengths)] = np.array(lengths, np.uint64).view(U8)
    for start, array in zip(starts, arrays, strict=True):
        out[start : start + array.size] = array
    return end


def open_record(structure: Structure, out: Bytes) -> list[Bytes]:
    """Write the head of a record of this fixed structure at the start of `out` (1-D uint8, writable).

    Return the part of `out` for each leaf's data, so that the record is composed in place. Bytes between leaves keep
    the contents of `out`. Raises CodecError if the structure is not fixed or `out` is too small.
    """
    head = structure.head
    if not structure.fixed or head.size + structure.size > out.size:
        raise CodecError(f"open_record needs a fixed structure and {head.size + structure.size} bytes, not {out.size}")
    out[: head.size] = head
    return [out[start : start + size] for start, size in zip(structure.starts, structure.nbytes, strict=True)]


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
        return _read_record(buffer, copy, allow_pickle)
    except CodecError:
        raise
    except MALFORMED as error:
        raise CodecError(f"malformed record: {error}") from error


def _read_record(buffer: Bytes, copy: bool, allow_pickle: bool) -> Any:
    available = buffer.size
    if available < HEAD.size or buffer.dtype != U8 or buffer.ndim != 1:
        raise CodecError(f"malformed record: {available} elements of {buffer.dtype}, expected uint8 and a header")
    magic, key_size, variable, _ = HEAD.unpack(buffer[: HEAD.size].tobytes())
    if magic != MAGIC or HEAD.size + key_size > available:
        raise CodecError("malformed record: wrong magic number or truncated")
    structure = structure_of(buffer[HEAD.size : HEAD.size + key_size].tobytes())
    if variable != structure.nbytes.count(-1):
        raise CodecError("malformed record: wrong number of variable leaves")
    base, nbytes, starts = structure.head.size, structure.nbytes, structure.starts
    end = base + structure.size
    if not structure.fixed:
        lengths = iter(np.frombuffer(buffer, np.uint64, variable, base).tolist())
        nbytes = tuple([next(lengths) if size < 0 else size for size in nbytes])
        starts, end = _variable_layout(structure, nbytes)
    if end > available:
        raise CodecError(f"malformed record: {available} bytes of {end}")
    if structure.pickled and not allow_pickle:
        raise CodecError("the record holds a pickled leaf, which is loaded only with allow_pickle=True")
    if structure.has_views and (copy or not buffer.flags.writeable):
        buffer = buffer[base & ~63 : end].copy()
        starts = structure.offsets if structure.fixed else tuple([start - (base & ~63) for start in starts])
    return structure.make([read(buffer, at, n) for read, at, n in zip(structure.readers, starts, nbytes, strict=True)])


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
    make = structure.make
    if not lists:
        return [make(()) for _ in range(count)]
    if make is only:
        return list(lists[0])
    if make is tuple:
        return list(zip(*lists, strict=True))
    return [make(parts) for parts in zip(*lists, strict=True)]


def _rows(leaf: Leaf, column: Bytes, count: int) -> Sequence[Any]:
    """Return the value of a leaf in each row of its column."""
    kind, dtype, shape, nbytes = leaf
    if column.shape != (count, nbytes) or column.dtype != U8:
        raise CodecError(f"a column of {column.dtype}{column.shape} was given, uint8{(count, nbytes)} expected")
    if kind in NUMBERS:
        numbers: list[Any] = column.view(NUMBERS[kind]).ravel().tolist()
        return numbers
    numpy_dtype, seen_as = leaf_dtypes(kind, dtype)
    typed = column.view(numpy_dtype).reshape(count, *shape)
    if kind == "tensor":
        stacked = aligned_tensor(typed)
        return (stacked.view(seen_as) if seen_as else stacked).unbind(0)
    if kind == "array" and not shape:
        return [typed[row, ...] for row in range(count)]
    return list(typed)
