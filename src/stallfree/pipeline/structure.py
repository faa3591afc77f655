"""The structure of a value: everything except its data, described by a text key.

A key is the same in every process: a line of JSON for the tree, then one line per leaf, `kind shape dtype`.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stallfree.errors import CodecError
from stallfree.pipeline.images import BANDS, image_of

Bytes = npt.NDArray[np.uint8]
Tree = Any  # see Structure.tree
U8 = np.dtype(np.uint8)
MAGIC = 0x5AFE0C01
HEAD = struct.Struct("=IIII")
INT, FLOAT, COMPLEX = struct.Struct("=q"), struct.Struct("=d"), struct.Struct("=dd")
DEPTH = 100  # deeper nesting is treated as a value that contains itself
_REMEMBERED = 4096  # parsed structures, trees and leaves in the cache; only `_FEW` of those with long descriptions
_LONG, _HUGE, _FEW = 1024, 65536, 64  # and none with huge ones, which limits the cache to some megabytes
_LARGEST = 1 << 62

_INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_PLAIN_DTYPES = (*_INTEGERS, "float16", "float32", "float64", "complex64", "complex128", "bool")
_OTHER_DTYPES = {  # torch dtypes that NumPy lacks, and the dtype of the same width that carries them
    "bfloat16": "int16",
    "complex32": "int32",
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), "uint8"),
}
TORCH_DTYPES = {name: getattr(torch, name) for name in (*_PLAIN_DTYPES, *_OTHER_DTYPES) if hasattr(torch, name)}
TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
CARRIERS = {TORCH_DTYPES[name]: TORCH_DTYPES[plain] for name, plain in _OTHER_DTYPES.items() if name in TORCH_DTYPES}
FIXED_KINDS = {
    "int": np.dtype(np.int64),
    "float": np.dtype(float),
    "bool": np.dtype(bool),
    "complex": np.dtype(complex),
}
KEY_TYPES = {str, int, bool, type(None), float, bytes}


class Leaf(NamedTuple):
    """One leaf of a structure.

    `kind` is "tensor", "array", "scalar" (of NumPy), "int", "float", "bool", "complex", or of variable length: "bytes",
    "bytearray", "str", "bigint" (an int beyond 64 bits), "npstr", "npbytes" (`np.str_`, `np.bytes_`), "pickle".
    """

    kind: str
    dtype: str  # the name of a torch dtype, or a NumPy dtype as text (JSON if it has fields); "" for other kinds
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
        offsets: start of each leaf's data in the packed data (multiples of 64 for leaves of 64 bytes or more, of 16 for
            16 or more, else of 8); empty if not fixed.
        size: bytes of the packed data, a multiple of 8; -1 if not fixed.
        pickled: some leaf is a pickle.
        tree: the tree of the leaves. A node is the index of a leaf (an int), `("none",)`, `("list", children)`,
            `("tuple", children)`, `("dict", keys, children)`, `("image", mode, (pixels, info))`,
            `("permuted", order, (leaf,))` for a tensor or array with permuted dimensions, or
            `("namedtuple", module, qualname, fields, children)`, where `keys`, `fields` and `children` are tuples.
            Leaves are numbered from left to right.

    For code that reads and writes records:
        head: the first bytes of each record of this structure.
        nbytes, readers: per leaf, the bytes of its data (-1 if variable) and its reader.
        starts: start of each leaf's data in a record; empty if not fixed.
        has_views: some leaf is a tensor or an array.
        make: `build` without checks.
    """

    def __init__(self, key: bytes) -> None:
        """Parse a key; use `structure_of`, which parses each key once."""
        try:
            tree_text, *leaf_texts = key.decode("ascii").split("\n")
            parse_tree = _known_tree if len(tree_text) <= _LONG else _parse_tree
            self.tree, self.make, count = parse_tree(tree_text)
            parsed = [_parse_leaf(text) for text in leaf_texts]
        except CodecError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, SyntaxError) as error:
            raise CodecError(f"malformed description of a value: {error}") from error
        if len(parsed) != count:
            raise CodecError(f"malformed description of a value: {count} leaves in its tree, {len(parsed)} described")
        self.key = key
        self.leaves: tuple[Leaf, ...] = tuple([leaf for leaf, _ in parsed])
        self.readers: tuple[Reader, ...] = tuple([reader for _, reader in parsed])
        self.nbytes = tuple([leaf.nbytes for leaf in self.leaves])
        self.fixed = -1 not in self.nbytes
        self.pickled = not self.fixed and any(leaf.kind == "pickle" for leaf in self.leaves)
        self.has_views = any(leaf.kind in ("tensor", "array") for leaf in self.leaves)
        variable = self.nbytes.count(-1)
        head = HEAD.pack(MAGIC, len(key), variable, 0) + key
        head += bytes(-len(head) % (8 if variable else 64))
        self.head: Bytes = np.frombuffer(head, U8)
        self.offsets: tuple[int, ...] = ()
        self.size = -1
        if self.fixed:
            self.offsets, self.size = lay_out(self.nbytes)
        self.starts = tuple([len(head) + offset for offset in self.offsets])

    def build(self, parts: Sequence[Any]) -> Any:
        """Return the value made of these leaf values, one per leaf, in order."""
        if len(parts) != len(self.leaves):
            raise CodecError(f"{len(parts)} leaf values were given for a structure of {len(self.leaves)} leaves")
        return self.make(parts)

    def __repr__(self) -> str:
        return f"Structure({self.key.decode('ascii')!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return structure_of, (self.key,)


_alive: weakref.WeakValueDictionary[bytes, Structure] = weakref.WeakValueDictionary()


def structure_of(key: bytes) -> Structure:
    """Return the structure that a key describes. Raises CodecError if the key is malformed."""
    return _structure_of_short(key) if len(key) <= _LONG else _structure_of_long(key)


def _intern(key: bytes) -> Structure:
    found = _alive.get(key)
    return found if found is not None else _alive.setdefault(key, Structure(key))


_structure_of_short = lru_cache(_REMEMBERED)(_intern)
_structure_of_medium = lru_cache(_FEW)(_intern)


def _structure_of_long(key: bytes) -> Structure:
    return _structure_of_medium(key) if len(key) <= _HUGE else _intern(key)


def lay_out(nbytes: Sequence[int], start: int = 0) -> tuple[tuple[int, ...], int]:
    """Return the start of each leaf of these sizes if the data starts at `start`, and the end of the data."""
    offsets = []
    for size in nbytes:
        start = start + 63 & ~63 if size >= 64 else start + 15 & ~15 if size >= 16 else start + 7 & ~7
        offsets.append(start)
        start += size
    return tuple(offsets), start + 7 & ~7


# --- dtypes and named tuples -----------------------------------------------------------------------------------------


@lru_cache(_REMEMBERED)
def dtype_text(dtype: np.dtype[Any]) -> tuple[str, str]:
    """Return a NumPy dtype as text, and the reason why it cannot be stored ("" if it can)."""
    if dtype.hasobject:
        return "", "has the dtype object; give its elements a type, or make it a list"
    text = dtype.str if dtype.names is None else json.dumps(dtype.descr, separators=(",", ":"))
    try:
        same = dtype.itemsize > 0 and dtype_of(text) == dtype
    except (TypeError, ValueError, SyntaxError):
        same = False
    return (text, "") if same else ("", f"has the dtype {dtype!r}, which has no portable description; convert it")


def dtype_of(text: str) -> np.dtype[Any]:
    return np.dtype(text) if text[:1] != "[" else np.lib.format.descr_to_dtype(_as_descr(json.loads(text)))


def _as_descr(node: Any) -> Any:
    """Convert JSON to the form of `np.dtype.descr`: tuples of name or (title, name), type, and an optional shape."""
    if not isinstance(node, list):
        return node
    fields = []
    for name, kind, *shape in node:
        title_and_name = tuple(name) if isinstance(name, list) else name
        fields.append((title_and_name, _as_descr(kind), *(tuple(part) for part in shape)))
    return fields


@lru_cache(_REMEMBERED)
def why_not_named_tuple(kind: type) -> str:
    fields = kind._fields  # type: ignore[attr-defined]
    try:
        found = _named_tuple(kind.__module__, kind.__qualname__, fields)
    except CodecError:
        return "is not found under its name; define the named tuple at the top level of a module"
    return "" if found is kind else "another class has its name in its module"


def _named_tuple(module: str, qualname: str, fields: tuple[str, ...]) -> type:
    """Return the named tuple class of that name, if it is imported and has these fields.

    The name may come from a forged record. Therefore nothing is imported, and names are looked up only in the
    dictionaries of modules and classes: no descriptor and no `__getattr__` runs.
    """
    found: Any = sys.modules.get(module)
    names = _MODULE_DICT(found) if issubclass(type(found), ModuleType) else {}
    for name in qualname.split("."):
        found = names.get(name)
        if not issubclass(type(found), type):
            raise MissingClassError(
                f"a record holds a named tuple {module}.{qualname}, whose class is not here: import {module} where the "
                "data set is defined, or remove the cache if there is no such class any more",
                module,
            )
        names = _CLASS_DICT(found)
    of_class = next((_CLASS_DICT(base)["_fields"] for base in _MRO(found) if "_fields" in _CLASS_DICT(base)), None)
    if tuple not in _MRO(found) or type(of_class) is not tuple or of_class != fields:
        raise MissingClassError(
            f"a record holds a named tuple {module}.{qualname} with the fields {', '.join(map(str, fields))}, and the "
            "class of that name is another one: remove the cache, or restore the class",
            module,
        )
    return found  # type: ignore[no-any-return]


_MODULE_DICT: Callable[[Any], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__
_CLASS_DICT: Callable[[Any], dict[str, Any]] = vars(type)["__dict__"].__get__
_MRO: Callable[[Any], tuple[type, ...]] = vars(type)["__mro__"].__get__


# --- keys -----------------------------------------------------------------------------------------------------------


def structure_of_signature(signature: tuple[Any, ...]) -> Structure:
    """Return the structure of a value from the token sequence `signature` that `encode` has made."""
    return _known_signature(signature) if 4 * len(signature) <= _LONG else _structure_of_signature(signature)


def _structure_of_signature(signature: tuple[Any, ...]) -> Structure:
    leaves: list[str] = []
    tree = _tree_json(iter(signature), leaves)
    text = json.dumps(tree, separators=(",", ":"))
    return structure_of("\n".join([text, *leaves]).encode("ascii"))


_known_signature = lru_cache(_REMEMBERED)(_structure_of_signature)


def _tree_json(tokens: Iterator[Any], leaves: list[str]) -> Any:
    token = next(tokens)
    if token is None:
        return None
    if token is tuple or token is list:
        return ["t" if token is tuple else "l", [_tree_json(tokens, leaves) for _ in range(next(tokens))]]
    if token is dict:
        keys = next(tokens)
        next(tokens)
        return ["d", [_key_json(key) for key in keys], [_tree_json(tokens, leaves) for _ in keys]]
    if token == "image":
        return ["p", next(tokens), [_tree_json(tokens, leaves) for _ in range(2)]]
    if token == "permuted":
        return ["s", next(tokens), [_tree_json(tokens, leaves)]]
    if token == "namedtuple":
        kind = next(tokens)
        children = [_tree_json(tokens, leaves) for _ in kind._fields]
        return ["n", kind.__module__, kind.__qualname__, kind._fields, children]
    if token in ("tensor", "array", "scalar"):
        leaves.append(f"{token} {','.join(map(str, next(tokens)))} {next(tokens)}")
    else:
        leaves.append(token)
    return len(leaves) - 1


def _key_json(key: Any) -> Any:
    """Return a dict key as exact JSON: the key itself, or a pair of a letter and hexadecimal digits."""
    if isinstance(key, float):
        return ["f", FLOAT.pack(key).hex()]
    if isinstance(key, bytes):
        return ["b", key.hex()]
    if isinstance(key, int) and not -(1 << 63) <= key < 1 << 63:
        return ["i", hex(key)]
    if isinstance(key, str) and any("\ud800" <= char <= "\udfff" for char in key):
        return ["s", key.encode("utf-8", "surrogatepass").hex()]
    return key


def _key_of_json(node: Any) -> Any:
    if node is None or type(node) in (str, int, bool):
        return node
    letter, digits = node
    if letter == "i":
        return int(digits, 16)
    data = bytes.fromhex(digits)
    if letter == "f":
        return FLOAT.unpack(data)[0]
    if letter not in ("b", "s"):
        raise ValueError(f"a key of unknown kind {letter!r}")
    return data if letter == "b" else data.decode("utf-8", "surrogatepass")


def _parse_tree(text: str) -> tuple[Tree, Callable[[Sequence[Any]], Any], int]:
    """Parse a key's first line; returns the tree, the function that builds the value, and the number of leaves."""
    counter = [0]
    tree = _tree_of_json(json.loads(text), counter, 0)
    return tree, _maker(tree), counter[0]


_known_tree = lru_cache(_REMEMBERED)(_parse_tree)


def _tree_of_json(node: Any, counter: list[int], depth: int) -> Tree:
    if node is None:
        return ("none",)
    if type(node) is int:
        if node != counter[0]:
            raise ValueError("leaves out of order")
        counter[0] += 1
        return node
    if depth > DEPTH or type(node) is not list or type(node[-1]) is not list:
        raise ValueError("not a tree")
    letter, *details = node[:-1]
    children = tuple([_tree_of_json(child, counter, depth + 1) for child in node[-1]])
    if letter in ("l", "t") and not details:
        return ("list" if letter == "l" else "tuple", children)
    if letter == "d":
        keys = tuple([_key_of_json(key) for key in details.pop()])
        if not details and len(keys) == len(children):
            return ("dict", keys, children)
    if letter == "p" and len(details) == 1 and details[0] in BANDS and len(children) == 2:
        return ("image", details[0], children)
    if letter == "s" and sorted(details[0]) == [*range(len(details[0]))] and len(children) == len(details) == 1:
        return ("permuted", tuple(details[0]), children)
    if letter == "n":
        module, qualname, fields = details
        names = [module, qualname, *fields]
        if len(fields) == len(children) and all(type(name) is str and name for name in names):
            return ("namedtuple", module, qualname, tuple(fields), children)
    raise ValueError(f"a node of unknown kind {letter!r}")


def _maker(tree: Tree) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds the value from its leaf values, with shortcuts for flat trees, the common case."""
    if tree == 0:
        return lambda parts: parts[0]
    children = tree[-1]
    if len(tree) > 1 and children == tuple(range(len(children))):
        if tree[0] == "tuple":
            return tuple
        if tree[0] == "list":
            return list
        if tree[0] == "dict":
            keys = tree[1]
            return lambda parts: dict(zip(keys, parts, strict=True))
    node = _node_maker(tree)
    return lambda parts: node(iter(parts))


def _node_maker(tree: Tree) -> Callable[[Iterator[Any]], Any]:
    if isinstance(tree, int):
        return next
    if tree[0] == "none":
        return lambda parts: None
    makers = [_node_maker(child) for child in tree[-1]]
    if tree[0] == "list":
        return lambda parts: [make(parts) for make in makers]
    if tree[0] == "tuple":
        return lambda parts: tuple([make(parts) for make in makers])
    if tree[0] == "dict":
        pairs = list(zip(tree[1], makers, strict=True))
        return lambda parts: {key: make(parts) for key, make in pairs}
    if tree[0] == "permuted":
        return lambda parts: _permuted(makers[0](parts), tree[1])
    if tree[0] == "image":
        pixels, info = makers
        return lambda parts: image_of(tree[1], pixels(parts), info(parts))
    _, module, qualname, fields, _ = tree
    # Looked up each time, since a class may be redefined; `tuple.__new__` runs no code of that class.
    return lambda parts: tuple.__new__(_named_tuple(module, qualname, fields), [make(parts) for make in makers])


def _permuted(value: Any, order: tuple[int, ...]) -> Any:
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        raise CodecError("a record holds permuted dimensions of what has none")
    return value.permute(order) if isinstance(value, torch.Tensor) else value.transpose(order)


@lru_cache(_REMEMBERED)
def _parse_leaf(text: str) -> tuple[Leaf, Reader]:
    kind, *rest = text.split(" ", 2)
    if kind in _SIMPLE_READERS and not rest:
        return Leaf(kind, "", (), FIXED_KINDS[kind].itemsize if kind in FIXED_KINDS else -1), _SIMPLE_READERS[kind]
    dims, dtype = rest
    shape = tuple([int(part) for part in dims.split(",")]) if dims else ()
    if ",".join(map(str, shape)) != dims or min(shape, default=0) < 0:
        raise ValueError(f"{dims!r} is no shape")
    if kind not in ("tensor", "array", "scalar") or (kind == "scalar" and shape):
        raise ValueError(f"a leaf of unknown kind {kind!r}")
    numpy_dtype, seen_as = leaf_dtypes(kind, dtype)
    if math.prod([dim for dim in shape if dim]) * numpy_dtype.itemsize > _LARGEST:
        raise ValueError(f"a leaf of the shape {shape} is too large")
    leaf = Leaf(kind, dtype, shape, math.prod(shape) * numpy_dtype.itemsize)
    return leaf, _reader(kind, shape, numpy_dtype, seen_as)


def leaf_dtypes(kind: str, text: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """Return the NumPy dtype of a leaf's data, and the torch dtype to view it as if NumPy lacks that dtype."""
    if kind == "tensor":
        torch_dtype = TORCH_DTYPES[text]
        return np.dtype(_OTHER_DTYPES.get(text, text)), torch_dtype if torch_dtype in CARRIERS else None
    dtype = dtype_of(text)
    if dtype_text(dtype) != (text, ""):
        raise ValueError(f"{text!r} is no dtype that is stored")
    return dtype, None


# --- reading leaves -------------------------------------------------------------------------------------------------


def _reader(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seen_as: torch.dtype | None) -> Reader:
    ndarray = np.ndarray
    from_numpy = torch.from_numpy if dtype != np.complex128 else aligned_tensor
    if kind == "array":
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start)
    if kind == "scalar":
        return lambda buffer, start, nbytes: ndarray(shape, dtype, buffer, start).copy()[()]
    if seen_as is None:
        return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start))
    return lambda buffer, start, nbytes: from_numpy(ndarray(shape, dtype, buffer, start)).view(seen_as)


def aligned_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor of `array`, copied if misaligned: torch faults on complex128 that is not aligned to 16 bytes."""
    return torch.from_numpy(array if array.__array_interface__["data"][0] % 16 == 0 else array.copy())


def read_bytes(buffer: Bytes, start: int, nbytes: int) -> bytes:
    return buffer[start : start + nbytes].tobytes()


def _read_text(buffer: Bytes, start: int, nbytes: int) -> str:
    return read_bytes(buffer, start, nbytes).decode("utf-8", "surrogatepass")


def _read_pickle(buffer: Bytes, start: int, nbytes: int) -> Any:
    try:
        return pickle.loads(read_bytes(buffer, start, nbytes))
    except Exception as error:
        raise CodecError(f"a pickled leaf cannot be loaded: {error}") from error


_SIMPLE_READERS: dict[str, Reader] = {
    "int": lambda buffer, start, nbytes: INT.unpack_from(buffer, start)[0],
    "float": lambda buffer, start, nbytes: FLOAT.unpack_from(buffer, start)[0],
    "bool": lambda buffer, start, nbytes: bool(buffer[start]),
    "complex": lambda buffer, start, nbytes: complex(*COMPLEX.unpack_from(buffer, start)),
    "bytes": read_bytes,
    "bytearray": lambda buffer, start, nbytes: bytearray(read_bytes(buffer, start, nbytes)),
    "str": _read_text,
    "bigint": lambda buffer, start, nbytes: int.from_bytes(read_bytes(buffer, start, nbytes), "little", signed=True),
    "npstr": lambda buffer, start, nbytes: np.str_(_read_text(buffer, start, nbytes)),
    "npbytes": lambda buffer, start, nbytes: np.bytes_(read_bytes(buffer, start, nbytes)),
    "pickle": _read_pickle,
}


def decode_leaf(leaf: Leaf, data: Bytes, *, allow_pickle: bool = False) -> Any:
    """Return the value of one leaf; `data` is exactly its bytes. Tensors and arrays are views of `data`."""
    if leaf.kind == "pickle" and not allow_pickle:
        raise CodecError("a pickled leaf is loaded only with allow_pickle=True")
    if leaf.nbytes not in (-1, data.size):
        raise CodecError(f"a leaf of {leaf.nbytes} bytes was given {data.size} bytes")
    text = f"{leaf.kind} {','.join(map(str, leaf.shape))} {leaf.dtype}" if leaf.dtype else leaf.kind
    return _parse_leaf(text)[1](data, 0, data.size)
