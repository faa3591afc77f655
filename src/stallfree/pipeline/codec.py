"""Converts values to flat bytes and back, without pickle.

A *value* is a tree of dict, list, tuple and named tuple. Its leaves are tensors, arrays, NumPy scalars, numbers,
strings, bytes; None belongs to the tree. An image of Pillow is a node of its pixels and its `info`. `encode` splits a
value into a `Structure`, which describes everything but the data, and one flat array of bytes per leaf, which shares
memory with the value where possible:

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
structure.py describes structures and their keys.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.errors import CodecError, value_unstorable
from stallfree.pipeline.images import is_image, pixels_of
from stallfree.pipeline.refusals import PICKLE, advice, position_of, why_not_tensor
from stallfree.pipeline.structure import (
    CARRIERS,
    COMPLEX,
    DEPTH,
    FIXED_KINDS,
    FLOAT,
    HEAD,
    INT,
    KEY_TYPES,
    MAGIC,
    TORCH_NAMES,
    U8,
    Bytes,
    Leaf,
    MissingClassError,
    Structure,
    aligned_tensor,
    decode_leaf,
    dtype_of,
    dtype_text,
    lay_out,
    leaf_dtypes,
    read_bytes,
    structure_of,
    structure_of_signature,
    why_not_named_tuple,
)
from stallfree.pipeline.values import in_order, pickled

__all__ = [
    "Leaf",
    "MissingClassError",
    "Structure",
    "decode_leaf",
    "encode",
    "encode_own",
    "open_record",
    "read_leaves",
    "read_own_record",
    "read_record",
    "record_size",
    "split_record",
    "stack_build",
    "structure_of",
    "write_record",
]

# --- encoding a value -----------------------------------------------------------------------------------------------
#
# The walk appends to `signature` a flat list of hashable tokens that is equivalent to the key but cheaper to make, and
# the key is looked up by it: a leaf is (kind, shape, dtype as text) or its kind only, a container its type, then its
# length or its keys.


class _Unstorable(Exception):
    """Raised if `value`, somewhere in the tree, cannot be stored; never leaves this module."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value
        self.reason = reason


_Other = Callable[[Any, str, list[Any], list[Bytes]], None]  # handles an unsupported value; receives the reason


def encode(value: Any, *, allow_pickle: bool = False) -> tuple[Structure, list[Bytes]]:
    """Split `value` into its structure and the bytes of each leaf, as 1-D uint8 arrays.

    The arrays share memory with the value where it is contiguous, so write them before the value changes. Values of
    other types are pickled if `allow_pickle` is true; otherwise CodecError names their type and position.
    """
    return _encode(value, _pickled if allow_pickle else _refused)


def encode_own(value: Any) -> tuple[Structure, list[Bytes]]:
    """Like `encode` with `allow_pickle`, for values read only by processes of this job.

    Lists, tuples and dicts of many strings and numbers become one pickle, since a batch may hold thousands of them.
    """
    return _encode(value, _pickled_whole)


def _encode(value: Any, other: _Other) -> tuple[Structure, list[Bytes]]:
    signature: list[Any] = []
    arrays: list[Bytes] = []
    try:
        _walk(value, signature, arrays, 0, other)
    except _Unstorable as problem:
        place = position_of(value, problem.value, "sample", 0) or "sample"
        kind = type(problem.value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        message = f"{place}: {name}: {problem.reason}"
        raise value_unstorable(message) from problem.__cause__
    return structure_of_signature(tuple(signature)), arrays


def _walk(value: Any, signature: list[Any], arrays: list[Bytes], depth: int, other: _Other) -> None:
    kind = type(value)
    take = _TAKE.get(kind)
    if take is not None:
        take(value, signature, arrays, other)
        return
    if depth >= DEPTH:
        raise _Unstorable(value, f"is nested more than {DEPTH} levels deep, or contains itself")
    if other is _pickled_whole and kind in _CONTAINERS and len(value) > _MANY and _is_plain(value):
        signature.append("pickle")
        return arrays.append(_flat(pickle.dumps(value, 5)))
    if kind is tuple or kind is list:
        signature.append(kind)
        signature.append(len(value))
        children = value
    elif kind is dict:
        if not KEY_TYPES.issuperset(map(type, value)):
            bad = next(type(key) for key in value if type(key) not in KEY_TYPES)
            reason = f"has a key of type {bad.__qualname__}; use str, int, bool, float, bytes or None"
            return other(value, reason, signature, arrays)
        keys = tuple(value)
        signature += (dict, keys, tuple(map(type, keys)))
        if float in signature[-1]:  # 0.0 and -0.0 are equal
            signature[-1] += tuple(FLOAT.pack(key) for key in keys if type(key) is float)
        children = value.values()
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        reason = why_not_named_tuple(kind)
        if not reason and getattr(value, "__dict__", None):
            reason = "has attributes beside its fields"
        if reason:
            return other(value, reason, signature, arrays)
        signature += ("namedtuple", kind)
        children = value
    elif is_image(value):
        signature += ("image", value.mode)
        children = (pixels_of(value), value.info)
    elif issubclass(kind, np.generic):
        return _take_scalar(value, signature, arrays, other)
    else:
        return other(value, advice(kind), signature, arrays)
    depth += 1
    for child in children:
        _walk(child, signature, arrays, depth, other)


def _take_tensor(value: torch.Tensor, signature: list[Any], arrays: list[Bytes], other: _Other) -> None:
    dtype = value.dtype
    try:
        name = TORCH_NAMES[dtype]
        array = value.numpy() if dtype not in CARRIERS else _carried(value).numpy()
    except (KeyError, TypeError, RuntimeError) as error:
        reason = why_not_tensor(value)
        if not reason and not (value.is_conj() or value.is_neg()):
            reason = f"cannot be read as an array: {error}"
        if reason:
            return other(value, reason, signature, arrays)
        return _take_tensor(value.resolve_conj().resolve_neg(), signature, arrays, other)
    _add_array("tensor", array, name, signature, arrays, other)


def _add_array(
    kind: str, array: npt.NDArray[Any], dtype: str, signature: list[Any], arrays: list[Bytes], other: _Other
) -> None:
    """Add a leaf. For processes of this job, an array whose dimensions are permuted keeps its strides."""
    if other is _pickled_whole and not array.flags.c_contiguous:
        array, order = in_order(array)
        if order:
            signature += ("permuted", order)
    signature += (kind, array.shape, dtype)
    arrays.append(array.ravel().view(U8))


def _carried(value: torch.Tensor) -> torch.Tensor:
    if value.requires_grad:  # the view would hide it
        raise TypeError
    return value.resolve_conj().resolve_neg().view(CARRIERS[value.dtype])


def _take_array(value: npt.NDArray[Any], signature: list[Any], arrays: list[Bytes], other: _Other) -> None:
    text, reason = dtype_text(value.dtype)
    if reason:
        return other(value, reason, signature, arrays)
    _add_array("array", value, text, signature, arrays, other)


def _take_scalar(value: np.generic, signature: list[Any], arrays: list[Bytes], other: _Other) -> None:
    if type(value) is np.str_:
        signature.append("npstr")
        arrays.append(_flat(str.encode(value, "utf-8", "surrogatepass")))
        return
    if type(value) is np.bytes_:
        signature.append("npbytes")
        arrays.append(_flat(bytes(value)))
        return
    text, reason = dtype_text(value.dtype)
    if not reason and type(value) is not dtype_of(text).type:  # a subclass, or one of two types of the same width
        reason = advice(type(value))
    if reason:
        return other(value, reason, signature, arrays)
    signature += ("scalar", (), text)
    arrays.append(np.array(value).reshape(1).view(U8))


def _take_int(value: int, signature: list[Any], arrays: list[Bytes], other: _Other) -> None:
    try:
        data = INT.pack(value)
    except struct.error:
        signature.append("bigint")
        arrays.append(_flat(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)))
        return
    signature.append("int")
    arrays.append(np.frombuffer(data, U8))


def _simple(kind: str, to_bytes: Callable[[Any], bytes]) -> Callable[[Any, list[Any], list[Bytes], _Other], None]:
    def take(value: Any, signature: list[Any], arrays: list[Bytes], other: _Other) -> None:
        signature.append(kind)
        arrays.append(_flat(to_bytes(value)))

    return take


def _take_none(value: None, signature: list[Any], arrays: list[Bytes], other: _Other) -> None:
    signature.append(None)


_TAKE: dict[type, Callable[[Any, list[Any], list[Bytes], _Other], None]] = {
    torch.Tensor: _take_tensor,
    np.ndarray: _take_array,
    int: _take_int,
    float: _simple("float", FLOAT.pack),
    bool: _simple("bool", lambda value: b"\1" if value else b"\0"),
    complex: _simple("complex", lambda value: COMPLEX.pack(value.real, value.imag)),
    bytes: _simple("bytes", lambda value: value),
    bytearray: _simple("bytearray", bytes),
    str: _simple("str", lambda value: value.encode("utf-8", "surrogatepass")),
    type(None): _take_none,
}


def _flat(data: bytes) -> Bytes:
    return np.frombuffer(data, U8) if data else np.empty(0, U8)


def _refused(value: Any, reason: str, signature: list[Any], arrays: list[Bytes]) -> None:
    raise _Unstorable(value, reason)


def _pickled(value: Any, reason: str, signature: list[Any], arrays: list[Bytes]) -> None:
    try:
        data = pickled(value)
    except Exception as error:
        reason = reason.removesuffix(PICKLE)
        raise _Unstorable(value, f"{reason}. It cannot be pickled either: {error}") from error
    signature.append("pickle")
    arrays.append(_flat(data))


def _pickled_whole(value: Any, reason: str, signature: list[Any], arrays: list[Bytes]) -> None:
    """Like `_pickled`; containers of plain values are pickled whole."""
    _pickled(value, reason, signature, arrays)


_CONTAINERS = frozenset({list, tuple, dict})
_PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None)})
_MANY = 8


def _is_plain(value: Any) -> bool:
    """Return whether a container holds only strings, numbers and None."""
    return _PLAIN.issuperset(map(type, value.values() if type(value) is dict else value))


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
    """Write the record of these leaves at the start of `out` (1-D uint8, writable); returns the bytes used.

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

    Returns the part of `out` for each leaf's data, so that the record is composed in place. Bytes between leaves keep
    the contents of `out`. Raises CodecError if the structure is not fixed or `out` is too small.
    """
    if not structure.fixed:
        raise CodecError("open_record needs a structure whose leaves do not vary in size")
    head = structure.head
    if head.size + structure.size > out.size:
        raise CodecError(f"a record of {head.size + structure.size} bytes: {out.size} bytes to write it to")
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
    except (ValueError, TypeError, IndexError, OverflowError, BufferError, RuntimeError, struct.error) as error:
        raise CodecError(f"malformed record: {error}") from error


def _read_record(buffer: Bytes, copy: bool, allow_pickle: bool) -> Any:
    structure, starts, nbytes, end = _described(buffer)
    if structure.pickled and not allow_pickle:
        raise CodecError("the record holds a pickled leaf, which is loaded only with allow_pickle=True")
    base = structure.head.size
    if structure.has_views and (copy or not buffer.flags.writeable):
        buffer = buffer[base & ~63 : end].copy()
        starts = structure.offsets if structure.fixed else [start - (base & ~63) for start in starts]
    readers = structure.readers
    return structure.make([read(buffer, at, n) for read, at, n in zip(readers, starts, nbytes, strict=True)])


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


def split_record(buffer: Bytes) -> tuple[Structure, list[Bytes]]:
    """Return the structure of the record at the start of `buffer`, and views of each leaf's bytes, as `encode` does.

    Nothing is unpickled. Raises CodecError for a malformed or truncated record.
    """
    try:
        structure, starts, nbytes, _ = _described(buffer)
    except (ValueError, TypeError, IndexError, OverflowError, struct.error) as error:
        raise CodecError(f"malformed record: {error}") from error
    return structure, [buffer[start : start + size] for start, size in zip(starts, nbytes, strict=True)]


def _described(buffer: Bytes) -> tuple[Structure, Sequence[int], Sequence[int], int]:
    """Return a record's structure, the start and size of each leaf, and the end of the record."""
    available = buffer.size
    if available < HEAD.size or buffer.dtype != U8 or buffer.ndim != 1:
        raise CodecError(f"malformed record: {available} elements of {buffer.dtype}, expected uint8 and a header")
    magic, key_size, variable, _ = HEAD.unpack(read_bytes(buffer, 0, HEAD.size))
    if magic != MAGIC or HEAD.size + key_size > available:
        raise CodecError("malformed record: wrong magic number or truncated")
    structure = structure_of(buffer[HEAD.size : HEAD.size + key_size].tobytes())
    if variable != structure.nbytes.count(-1):
        raise CodecError("malformed record: wrong number of variable leaves")
    base = structure.head.size
    nbytes: Sequence[int] = structure.nbytes
    starts: Sequence[int] = structure.starts
    end = base + structure.size
    if not structure.fixed:
        lengths = iter(np.frombuffer(buffer, np.uint64, variable, base).tolist())
        nbytes = [next(lengths) if size < 0 else size for size in nbytes]
        starts, end = _variable_layout(structure, nbytes)
    if end > available:
        raise CodecError(f"malformed record: {available} bytes of {end}")
    return structure, starts, nbytes, end


# --- many values of one structure -----------------------------------------------------------------------------------


def stack_build(structure: Structure, columns: Sequence[Bytes], count: int) -> list[Any]:
    """Return `count` values of a fixed structure, from one uint8 column per leaf, shape (count, leaf.nbytes),
    C-contiguous.

    Tensors and arrays are views of the columns, which should belong to the caller only. The tensors of one column are
    views
    of one tensor: to keep a few of many, clone them.
    """
    if not structure.fixed or len(columns) != len(structure.leaves):
        raise CodecError("stack_build needs a fixed structure and one column per leaf")
    lists = [_split(leaf, column, count) for leaf, column in zip(structure.leaves, columns, strict=True)]
    make = structure.make
    if not lists:
        return [make(()) for _ in range(count)]
    if structure.tree == 0:
        return list(lists[0])
    if make is tuple:
        return list(zip(*lists, strict=True))
    return [make(parts) for parts in zip(*lists, strict=True)]


def _split(leaf: Leaf, column: Bytes, count: int) -> Sequence[Any]:
    kind, dtype, shape, nbytes = leaf
    if column.shape != (count, nbytes) or column.dtype != U8:
        raise CodecError(f"a column of {column.dtype}{column.shape} was given, uint8{(count, nbytes)} expected")
    if kind in FIXED_KINDS:
        numbers: list[Any] = column.view(FIXED_KINDS[kind]).ravel().tolist()
        return numbers
    numpy_dtype, seen_as = leaf_dtypes(kind, dtype)
    typed = column.view(numpy_dtype).reshape(count, *shape)
    if kind == "tensor":
        stacked = aligned_tensor(typed)
        return (stacked.view(seen_as) if seen_as else stacked).unbind(0)
    if kind == "array" and not shape:
        return [typed[row, ...] for row in range(count)]
    return list(typed)
