"""Copies of samples: nested lists, tuples and dicts with tensors and arrays in them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from stallfree.pipeline.images import is_image

_UNCHANGING = frozenset({bytes, str, int, float, bool, complex, type(None)})

_CLONED_ALONE = 32768
"""Elements from which on torch's threads share a copy."""


def private(value: Any) -> Any:
    """A copy of `value` that shares no memory with it; `value` itself where it cannot change or cannot be copied."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is tuple:
        return tuple([private(item) for item in value])
    if kind is list:
        return [private(item) for item in value]
    if kind is dict:
        return {key: private(item) for key, item in value.items()}
    if kind is torch.Tensor:  # deepcopy would copy all that a view is a part of
        return _cloned(value).requires_grad_(value.requires_grad)
    if is_image(value):
        return value.copy()
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, an open file, a handle of a C library
        return value


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own.

    For large tensors, `Tensor.clone` starts torch's threads, which then spin for milliseconds beside everything else.
    """
    tensor = tensor.detach()
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    if not plain or tensor.numel() < _CLONED_ALONE or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor.clone()
    copy = torch.empty_like(tensor)
    copy.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    return copy


def as_cached(value: Any) -> Any:
    """`value` with the strides that a cache gives it: what a step draws for a tensor may follow its strides."""
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
