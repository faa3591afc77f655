"""Copies of samples, which are nested containers of tensors and arrays, and the plain bytes of a tensor."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from stallfree.pipeline.images import is_image

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
        return _cloned(value).requires_grad_(value.requires_grad)
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
