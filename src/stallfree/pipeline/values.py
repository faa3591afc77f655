"""Values of samples, which are nested containers of tensors and arrays: copies and sizes."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

U8 = np.dtype(np.uint8)
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_SHARED = (*_INTEGERS, "float16", "float32", "float64", "complex64", "complex128", "bool")
_CARRIED = {"bfloat16": "int16", "complex32": "int32"} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), "uint8"
)
TORCH_DTYPES = {name: getattr(torch, name) for name in (*_SHARED, *_CARRIED) if hasattr(torch, name)}
TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
CARRIERS = {TORCH_DTYPES[name]: TORCH_DTYPES[other] for name, other in _CARRIED.items() if name in TORCH_DTYPES}
"""The torch dtypes that NumPy lacks, each with the dtype of the same width that carries it."""

BANDS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "HSV": 3}
"""The modes of images of Pillow whose pixels are bytes, and how many each pixel has."""

_NUMBERS = frozenset({str, int, float, bool, complex, type(None)})
_PLAIN = _NUMBERS | {bytes}
_DEEPEST = 100


def is_image(value: Any) -> bool:
    """Return whether `value` is an image in memory of one of the `BANDS`; one still to be read from a file is not."""
    kind = type(value)
    return kind.__name__ == "Image" and kind.__module__ == "PIL.Image" and value.mode in BANDS


def _mapped(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return copies of tuples, lists and dicts, with `change` applied to their items; plain values are kept.

    Containers that are nested deeply, such as one that contains itself, count as something else.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth < _DEEPEST:
        if kind is tuple:
            return tuple([_mapped(item, change, depth + 1) for item in value])
        if kind is list:
            return [_mapped(item, change, depth + 1) for item in value]
        if kind is dict:
            return {key: _mapped(item, change, depth + 1) for key, item in value.items()}
    return change(value)


def private(value: Any) -> Any:
    """Return a copy of `value` without shared memory; `value` itself if it is immutable or cannot be copied."""
    return _mapped(value, _copied)


def _copied(value: Any) -> Any:
    if type(value) is torch.Tensor:  # deepcopy would copy the whole storage of a view
        return _cloned(value).requires_grad_(value.requires_grad) if value.is_leaf else value.clone()
    if is_image(value):
        return value.copy()
    try:
        return copy.deepcopy(value)
    except Exception:  # such as a lock, an open file or a handle of a C library
        return value


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with its own memory.

    For large tensors, `Tensor.clone` starts torch's threads, which then spin for milliseconds and slow other work.
    """
    try:
        return torch.from_numpy(tensor.detach().numpy().copy("K"))
    except (TypeError, RuntimeError):  # NumPy does not take it as it is
        return tensor.detach().clone()


def as_cached(value: Any) -> Any:
    """Return `value` with the strides that a cache restores: a step's draws for a tensor may depend on its strides."""
    return _mapped(value, _contiguous)


def _contiguous(value: Any) -> Any:
    if type(value) is torch.Tensor:
        plain = value.layout is torch.strided and not value.is_nested
        return value.contiguous() if plain and not value.is_contiguous() else value
    return value if type(value) is not np.ndarray or value.flags.c_contiguous else np.ascontiguousarray(value)


def payload_bytes(record: Any) -> int:
    """Return the bytes of the bytes objects, arrays and tensors in `record`, in nested mappings, lists and tuples."""
    if type(record) in _NUMBERS:
        return 0
    if isinstance(record, (list, tuple)):
        return sum([payload_bytes(value) for value in record])
    if isinstance(record, Mapping):
        return sum([payload_bytes(value) for value in record.values()])
    if isinstance(record, (bytes, bytearray)):
        return len(record)
    try:
        return int(record.nbytes) if record.ndim else 0
    except (AttributeError, RuntimeError):  # no array; a layout without a size in bytes, such as a sparse one
        return 0


# --- arrays ---------------------------------------------------------------------------------------------------------


def in_order(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Return the array with its dimensions in the order of memory, and the permutation that restores them.

    If it is contiguous, and if no order makes it so, that is the array as a contiguous one, and `()`.
    """
    if not array.flags.c_contiguous:
        order = sorted(range(array.ndim), key=lambda dim: (-array.strides[dim], -array.shape[dim]))
        permuted = array.transpose(order)
        if permuted.flags.c_contiguous:
            return permuted, tuple(sorted(range(array.ndim), key=order.__getitem__))
    return np.ascontiguousarray(array).reshape(array.shape), ()


def aligned_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor of `array`, copied if misaligned: torch faults on complex128 that is not aligned to 16 bytes."""
    return torch.from_numpy(array if array.__array_interface__["data"][0] % 16 == 0 else array.copy())
