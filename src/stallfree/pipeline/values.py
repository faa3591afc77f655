"""Copies of samples: nested lists, tuples and dicts that contain tensors and arrays."""

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
