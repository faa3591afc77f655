"""Copies of samples, which are nested containers of tensors and arrays, their pickles, and a tensor's plain bytes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.pipeline.images import is_image
from stallfree.pipeline.structure import CARRIERS, TORCH_DTYPES, TORCH_NAMES, U8, aligned_tensor

_UNCHANGING = frozenset({bytes, str, int, float, bool, complex, type(None)})

_CLONED_ALONE = 32768
"""Number of elements from which torch copies with several threads."""


def private(value: Any) -> Any:
    """Return a copy of `value` without shared memory; `value` itself if it is immutable or cannot be copied."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is tuple:
        return tuple([private(item) for item in value])
    if kind is list:
        return [private(item) for item in value]
    if kind is dict:
        return {key: private(item) for key, item in value.items()}
    if kind is torch.Tensor:  # deepcopy would copy the whole storage of a view
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
    tensor = tensor.detach()
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    if not plain or tensor.numel() < _CLONED_ALONE or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor.clone()
    copy = torch.empty_like(tensor)
    copy.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    return copy


def as_cached(value: Any) -> Any:
    """Return `value` with the strides that a cache restores: a step's draws for a tensor may depend on its strides."""
    kind = type(value)
    if kind is torch.Tensor:
        plain = value.layout is torch.strided and not value.is_nested
        return value.contiguous() if plain and not value.is_contiguous() else value
    if kind is np.ndarray:
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)
    if kind is tuple or kind is list:
        return kind([as_cached(item) for item in value])
    if kind is dict:
        return {key: as_cached(item) for key, item in value.items()}
    return value


# --- pickles ---------------------------------------------------------------------------------------------------------


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
        return _reduced(value) if isinstance(value, torch.Tensor) else NotImplemented


def _reduced(value: Any) -> Any:
    if value.requires_grad and not value.is_leaf:
        raise TypeError("a tensor has a gradient history, which is lost elsewhere; call .detach() on it")
    if value.layout is torch.jagged and hasattr(value, "_ragged_idx"):  # torch's pickles of equal ones differ
        parts = value.detach().values(), value.offsets(), value.lengths(), value._ragged_idx
        return _unpickled_jagged, (*parts, value.requires_grad)
    plain = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
    if type(value) is not torch.Tensor or not plain or value.dtype not in TORCH_NAMES or vars(value):
        return NotImplemented
    array, order = in_order(array_of(value))
    data = array.reshape(-1).view(U8)
    return _unpickled, (data, TORCH_NAMES[value.dtype], array.shape, order, value.requires_grad)


def _unpickled_jagged(values: Any, offsets: Any, lengths: Any, ragged: int, requires_grad: bool) -> torch.Tensor:
    found = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, ragged)
    return found.requires_grad_(requires_grad)


def _unpickled(
    data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], order: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    wanted = TORCH_DTYPES[dtype]
    carrier = str(CARRIERS.get(wanted, wanted)).removeprefix("torch.")
    tensor = aligned_tensor(data.view(carrier).reshape(shape)).view(wanted)
    return (tensor.permute(order) if order else tensor).requires_grad_(requires_grad)


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a plain tensor as an array, of the dtype that carries it if NumPy lacks its own."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.view(CARRIERS[tensor.dtype]).numpy() if tensor.dtype in CARRIERS else tensor.numpy()


def in_order(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """Return the array with its dimensions in the order of memory, and the permutation that restores them.

    If it is contiguous, and if no order makes it so, that is the array as a contiguous one, and `()`.
    """
    if not array.flags.c_contiguous:
        order = sorted(range(array.ndim), key=lambda dim: (-array.strides[dim], -array.shape[dim]))
        permuted = array.transpose(order)
        if permuted.flags.c_contiguous:
            return permuted, tuple(sorted(range(array.ndim), key=order.__getitem__))
    return np.ascontiguousarray(array).reshape(array.shape), ()


# --- bytes of tensors ------------------------------------------------------------------------------------------------


def plain_bytes(tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """Return the values of `tensor`: a description of its quantizer ("" without one) and its flat bytes on the CPU.

    None for layouts without plain bytes, such as sparse and nested ones. A quantized tensor is never viewed as another
    dtype, which would crash the process.
    """
    quantizer = ""
    try:
        plain = tensor.detach().as_subclass(torch.Tensor).cpu()
        if plain.is_quantized:
            quantizer, plain = _quantizer(plain), plain.int_repr()
        return quantizer, plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None


def _quantizer(tensor: torch.Tensor) -> str:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{scheme} {tensor.q_scale()!r} {tensor.q_zero_point()}"
    scales, points = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"{scheme} {scales} {points} {tensor.q_per_channel_axis()}"


_WITHOUT = frozenset({int, float, str, bool, complex, type(None)})


def payload_bytes(record: Any) -> int:
    """Bytes of the bytes objects, arrays and tensors in `record`, in nested mappings, lists and tuples too."""
    kind = type(record)
    if kind in _WITHOUT:
        return 0
    if kind is tuple or kind is list:
        return sum([payload_bytes(value) for value in record])
    if kind is dict:
        return sum([payload_bytes(value) for value in record.values()])
    if isinstance(record, (bytes, bytearray)):
        return len(record)
    if getattr(record, "ndim", None) is None:  # neither an array nor a tensor
        if isinstance(record, Mapping):
            return sum([payload_bytes(value) for value in record.values()])
        return sum([payload_bytes(value) for value in record]) if isinstance(record, (list, tuple)) else 0
    if record.ndim == 0:
        return 0
    try:
        return int(getattr(record, "nbytes", 0))
    except RuntimeError:  # a tensor of a layout that has no size in bytes, such as a sparse one
        return 0
