"""The structure of a value: everything except its data, described by a text key.

A key is the same in every process. It has one line per node of the tree, each followed by those of its children:

    t COUNT, l COUNT            tuple, list
    d KEYS, o KEYS              dict, OrderedDict; the keys are a list in JSON
    n [MODULE, NAME, FIELDS]    named tuple, in JSON
    p MODE                      image of Pillow: its pixels and its `info`
    s ORDER                     tensor or array whose dimensions are permuted, in JSON
    -                           None
    KIND, or KIND SHAPE DTYPE   a leaf
"""

from __future__ import annotations

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
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stallfree.errors import CodecError
from stallfree.pipeline.values import BANDS, CARRIERS, TORCH_DTYPES, TORCH_NAMES, U8, aligned_tensor

Bytes = npt.NDArray[np.uint8]
MAGIC = 0x5AFE0D01
DEPTH = 100  # deeper nesting is treated as a value that contains itself
HEAD = struct.Struct("=IIII")
INT, FLOAT = struct.Struct("=q"), struct.Struct("=d")
MALFORMED = (
    *(ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError, SyntaxError, RuntimeError),
    *(BufferError, struct.error),
)
"""What parsing and reading raise for a record that is damaged or forged."""
_LARGEST, _LONGEST = 1 << 62, 1000  # bytes of a leaf, and characters of a dtype
_SHORT, _MEDIUM = 1024, 65536  # bytes of keys: 4,096 short ones are remembered, 64 medium ones, and no long ones

NUMBERS = {"int": np.dtype(np.int64), "float": np.dtype(float), "bool": np.dtype(bool), "complex": np.dtype(complex)}
"""The kinds of Python's numbers, with the dtype of their data."""
KEY_TYPES = {str, int, bool, type(None)}


class Leaf(NamedTuple):
    """One leaf of a structure.

    `kind` is "tensor", "array", "scalar" (of NumPy), "int", "float", "bool", "complex", or of variable length: "bytes",
    "str", "npstr", "npbytes" (of NumPy, whose own pickles lose zeros at their end), "pickle".
    """

    kind: str
    dtype: str  # the name of a torch dtype, or a NumPy dtype as text; "" for other kinds
    shape: tuple[int, ...]
    nbytes: int  # bytes of the data; -1 if variable


class MissingClassError(CodecError):
    """Raised if a record contains a named tuple whose class is not imported here.

    Attributes:
        module: the module that defines the class.
    """

    page = "record-class"

    def __init__(self, message: str, module: str = "") -> None:
        super().__init__(message)
        self.module = module


Reader = Callable[[Any, int, int], Any]  # (buffer, start, nbytes) -> the leaf's value, a view of buffer if possible


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
        make: makes the value of the leaves' values.
    """

    def __init__(self, key: bytes) -> None:
        """Parse a key; use `structure_of`, which parses each key once."""
        leaves: list[tuple[Leaf, Reader]] = []
        try:
            lines = key.decode("utf-8", "surrogatepass").split("\n")
            rest = iter(lines)
            node = _node(rest, leaves, 0)
        except CodecError:
            raise
        except (*MALFORMED, StopIteration) as error:
            raise CodecError(f"malformed description of a value: {error}") from error
        if next(rest, None) is not None:
            raise CodecError(f"malformed description of a value: it has more than {len(leaves)} leaves")
        self.key = key
        self.make: Callable[[Sequence[Any]], Any] = lambda parts: node(iter(parts))
        if len(leaves) == len(lines) - 1:  # flat trees, the common case
            self.make = _FLAT[lines[0][0]](lines[0][2:]) if lines[0][0] in _FLAT else self.make
        elif len(leaves) == len(lines):
            self.make = only
        self.leaves: tuple[Leaf, ...] = tuple([leaf for leaf, _ in leaves])
        self.readers: tuple[Reader, ...] = tuple([reader for _, reader in leaves])
        self.nbytes = tuple([leaf.nbytes for leaf in self.leaves])
        self.fixed = -1 not in self.nbytes
        self.pickled = any(leaf.kind == "pickle" for leaf in self.leaves)
        self.has_views = any(leaf.kind in ("tensor", "array") for leaf in self.leaves)
        variable = self.nbytes.count(-1)
        head = HEAD.pack(MAGIC, len(key), variable, 0) + key
        head += bytes(-len(head) % (8 if variable else 64))
        self.head: Bytes = np.frombuffer(head, U8)
        self.offsets, self.size = lay_out(self.nbytes) if self.fixed else ((), -1)
        self.starts = tuple([len(head) + offset for offset in self.offsets])

    def with_rows(self, count: int) -> Structure:
        """Return this structure with `count` rows in each leaf, which has rows."""
        lines = self.key.split(b"\n")
        leaves = (leaf for leaf in self.leaves)
        for at, line in enumerate(lines):
            if line[1:2] not in (b"", b" "):  # a leaf
                kind, dtype, shape, _ = next(leaves)
                lines[at] = leaf_line(kind, (count, *shape[1:]), dtype).encode()
        return structure_of(b"\n".join(lines))

    def __repr__(self) -> str:
        return f"Structure({self.key!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return structure_of, (self.key,)


_alive: weakref.WeakValueDictionary[bytes, Structure] = weakref.WeakValueDictionary()


def structure_of(key: bytes) -> Structure:
    """Return the structure that a key describes. Raises CodecError if the key is malformed."""
    return (_structure_of_short if len(key) <= _SHORT else _structure_of_medium if len(key) <= _MEDIUM else _intern)(
        key
    )


def _intern(key: bytes) -> Structure:
    structure = _alive.get(key)
    return structure if structure is not None else _alive.setdefault(key, Structure(key))


_structure_of_short, _structure_of_medium = lru_cache(4096)(_intern), lru_cache(64)(_intern)


@lru_cache(4096)
def leaf_line(kind: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{kind} {','.join(map(str, shape))} {dtype}"


def lay_out(nbytes: Sequence[int], start: int = 0) -> tuple[tuple[int, ...], int]:
    """Return the start of each leaf of these sizes if the data starts at `start`, and the end of the data."""
    offsets = []
    for size in nbytes:
        start = start + 63 & ~63 if size >= 64 else start + 15 & ~15 if size >= 16 else start + 7 & ~7
        offsets.append(start)
        start += size
    return tuple(offsets), start + 7 & ~7


# --- making a value -------------------------------------------------------------------------------------------------

_FLAT: dict[str, Callable[[str], Callable[[Sequence[Any]], Any]]] = {
    "t": lambda count: tuple,
    "l": lambda count: list,
    "d": lambda keys: _flat_dict(json.loads(keys)),
}


def _flat_dict(keys: list[Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda parts: dict(zip(keys, parts, strict=True))


def only(parts: Sequence[Any]) -> Any:
    return parts[0]


def _node(lines: Iterator[str], leaves: list[tuple[Leaf, Reader]], depth: int) -> Callable[[Iterator[Any]], Any]:
    """Parse a node; return a function that makes its value from an iterator of leaf values. Appends to `leaves`."""
    line = next(lines)
    if line == "-":
        return lambda parts: None
    if line[1:2] != " ":
        leaves.append(_parse_leaf(line))
        return next
    if depth > DEPTH:
        raise ValueError("nested too deeply")
    letter = line[0]
    details: Any = line[2:] if letter == "p" else json.loads(line[2:])

    def children(count: int) -> list[Callable[[Iterator[Any]], Any]]:
        return [_node(lines, leaves, depth + 1) for _ in range(count)]

    if letter == "t" or letter == "l":
        makers = children(details)
        if letter == "l":
            return lambda parts: [make(parts) for make in makers]
        return lambda parts: tuple([make(parts) for make in makers])
    if letter in ("d", "o") and type(details) is list and KEY_TYPES.issuperset(map(type, details)):
        pairs, kind = list(zip(details, children(len(details)), strict=True)), dict if letter == "d" else OrderedDict
        return lambda parts: kind([(key, make(parts)) for key, make in pairs])
    if letter == "p" and details in BANDS:
        pixels, info = children(2)
        return lambda parts: _image_of(details, pixels(parts), info(parts))
    if letter == "s" and sorted(details) == [*range(len(details))]:
        (maker,) = children(1)
        return lambda parts: _permuted(maker(parts), details)
    if letter == "n":
        module, qualname, fields = details
        if all(type(name) is str and name for name in (module, qualname, *fields)):
            makers = children(len(fields))
            # Looked up each time, since a class may be redefined; `tuple.__new__` runs no code of that class.
            return lambda parts: tuple.__new__(
                named_tuple(module, qualname, tuple(fields)), [make(parts) for make in makers]
            )
    raise ValueError(f"a node of unknown kind {letter!r}")


def _permuted(value: Any, order: Sequence[int]) -> Any:
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


def named_tuple(module: str, qualname: str, fields: tuple[str, ...]) -> type:
    """Return the named tuple class of that name, if it is imported and has these fields.

    The name may come from a forged record. Therefore nothing is imported, and names are looked up only in the
    dictionaries of modules and classes: no descriptor and no `__getattr__` runs.
    """
    owner: Any = sys.modules.get(module)
    names = _MODULE_DICT(owner) if issubclass(type(owner), ModuleType) else {}
    for name in qualname.split("."):
        owner = names.get(name)
        if not issubclass(type(owner), type):
            break
        names = _CLASS_DICT(owner)
    else:
        bodies = [_CLASS_DICT(base) for base in _MRO(owner)]
        known = next((body["_fields"] for body in bodies if "_fields" in body), None)
        if tuple in _MRO(owner) and type(known) is tuple and known == fields:
            return owner  # type: ignore[no-any-return]
    raise MissingClassError(
        f"a record holds a named tuple {module}.{qualname} with the fields {', '.join(map(str, fields))}, whose class "
        f"is not here: import {module} where the data set is defined, or remove the cache if the class has changed",
        module,
    )


_MODULE_DICT: Callable[[Any], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__
_CLASS_DICT: Callable[[Any], dict[str, Any]] = vars(type)["__dict__"].__get__
_MRO: Callable[[Any], tuple[type, ...]] = vars(type)["__mro__"].__get__


# --- leaves ---------------------------------------------------------------------------------------------------------


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


@lru_cache(4096)
def _parse_leaf(text: str) -> tuple[Leaf, Reader]:
    kind, *details = text.split(" ", 2)
    if kind in _READERS and not details:
        return Leaf(kind, "", (), NUMBERS[kind].itemsize if kind in NUMBERS else -1), _READERS[kind]
    dims, dtype = details
    shape = tuple([int(part) for part in dims.split(",")]) if dims else ()
    if ",".join(map(str, shape)) != dims or min(shape, default=0) < 0:
        raise ValueError(f"{dims!r} is no shape")
    if kind not in ("tensor", "array", "scalar") or (kind == "scalar" and shape):
        raise ValueError(f"a leaf of unknown kind {kind!r}")
    numpy_dtype, seen_as = leaf_dtypes(kind, dtype)
    if math.prod([dim for dim in shape if dim]) * numpy_dtype.itemsize > _LARGEST:
        raise ValueError(f"a leaf of the shape {shape} is too large")
    leaf = Leaf(kind, dtype, shape, math.prod(shape) * numpy_dtype.itemsize)
    return leaf, _array_reader(kind, shape, numpy_dtype, seen_as)


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


def _array_reader(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seen_as: torch.dtype | None) -> Reader:
    ndarray = np.ndarray
    from_numpy = torch.from_numpy if dtype != np.complex128 else aligned_tensor
    if kind == "array":
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start)
    if kind == "scalar":
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start).copy()[()]
    if seen_as is None:
        return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start))
    return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start)).view(seen_as)


def _text_reader(from_bytes: Callable[[bytes], Any]) -> Reader:
    return lambda buffer, start, nbytes: from_bytes(buffer[start : start + nbytes].tobytes())


def _unpickled(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CodecError(f"a pickled leaf cannot be loaded: {error}") from error


_READERS: dict[str, Reader] = {
    "int": lambda buffer, start, nbytes: INT.unpack_from(buffer, start)[0],
    "float": lambda buffer, start, nbytes: FLOAT.unpack_from(buffer, start)[0],
    "bool": lambda buffer, start, nbytes: bool(buffer[start]),
    "complex": lambda buffer, start, nbytes: complex(*struct.unpack_from("=dd", buffer, start)),
    "pickle": _text_reader(_unpickled),
    "bytes": _text_reader(bytes),
    "str": _text_reader(lambda data: data.decode("utf-8", "surrogatepass")),
    "npstr": _text_reader(lambda data: np.str_(data.decode("utf-8", "surrogatepass"))),
    "npbytes": _text_reader(np.bytes_),
}
