"""Values of every kind that the codec stores, and helpers for its tests."""

import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stallfree.pipeline.codec import encode, record_size, write_record
from stallfree.pipeline.values import TORCH_DTYPES


class Sample(NamedTuple):
    image: Any
    label: Any


class Loose(namedtuple("Loose", "a b")):
    """Its instances have a `__dict__`."""


class NotStored:
    pass


def record(value: Any, *, allow_pickle: bool = False, spare: int = 0) -> np.ndarray:
    structure, arrays = encode(value, allow_pickle=allow_pickle)
    size = record_size(structure, arrays)
    out = np.full(size + spare, 0xAB, np.uint8)
    assert write_record(structure, arrays, out) == size
    return out


def same(a: Any, b: Any) -> bool:
    """Same types, same structure, same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not a.numel():
            return a.dtype == b.dtype and a.shape == b.shape
        plain = [t.new_empty(t.shape).copy_(t).reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*plain)
    if isinstance(a, np.longdouble):  # 6 of its 16 bytes are nothing
        return bool(a == b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


# --- values ---------------------------------------------------------------------------------------------------------

torch_dtypes = st.sampled_from(sorted(TORCH_DTYPES.values(), key=str))
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
structured = st.sampled_from(
    [
        np.dtype([("a", "<i4"), ("b", ">f8", (2, 3)), ("c", [("d", "S3"), ("e", "?")])]),
        np.dtype({"names": ["x", "y"], "formats": ["u1", "f4"], "offsets": [0, 8], "itemsize": 16}),
        np.dtype([(("the title", "t"), "<i2")]),
    ]
)
array_dtypes = hnp.scalar_dtypes() | hnp.datetime64_dtypes() | hnp.timedelta64_dtypes() | structured
array_dtypes = array_dtypes | hnp.byte_string_dtypes(min_len=1) | hnp.unicode_string_dtypes(min_len=1)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(torch_dtypes), draw(shapes)
    count = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8).copy()
    if dtype == torch.bool:
        data &= 1
    tensor = torch.from_numpy(data).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "conj"]))
    if layout == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if layout == "strided" and tensor.dim():
        return tensor[..., ::2]
    if layout == "expanded":
        return tensor.unsqueeze(-1).expand(*shape, 3)
    if layout == "conj" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = draw(array_dtypes), draw(shapes)
    array = draw(hnp.arrays(dtype, shape)) if dtype.names is None else np.zeros(shape, dtype)
    layout = draw(st.sampled_from(["plain", "fortran", "strided", "backward", "read-only"]))
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided" and array.ndim:
        return array[..., ::2]
    if layout == "backward" and array.ndim:
        return array[::-1]
    if layout == "read-only":
        array.flags.writeable = False
    return array


texts = st.text(st.characters(codec=None, exclude_categories=()))
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans()
np_scalars = hnp.scalar_dtypes().flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()])
fixed_leaves = st.none() | numbers | tensors() | arrays() | np_scalars
leaves = fixed_leaves | texts | st.binary()
keys = texts | st.integers() | st.booleans() | st.none()


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaf,
        lambda child: (
            st.lists(child, max_size=4)
            | st.lists(child, max_size=4).map(tuple)
            | st.dictionaries(keys, child, max_size=4)
            | st.dictionaries(keys, child, max_size=2).map(OrderedDict)
            | st.builds(Sample, child, child)
            | st.builds(Loose, child, child)
        ),
        max_leaves=8,
    )


everyday = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
