"""Batches as NumPy arrays, for JAX and whatever else takes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from stallfree.errors import InputError


def check_output(output: Any, pin_memory: bool, device: Any) -> bool:
    """Whether batches are to be NumPy arrays. Raises `InputError` for what cannot be, or contradicts that."""
    if output not in ("torch", "numpy"):
        raise InputError(f"output={output!r}: use 'torch' or 'numpy'")
    if output == "numpy" and (device is not None or pin_memory):
        raise InputError(
            "output='numpy' gives arrays of the host: leave out device and pin_memory, and let your framework copy them"
        )
    return bool(output == "numpy")


def as_arrays(batch: Any) -> Any:
    """`batch` with an array in the place of each tensor in it, in nested lists, tuples and mappings too.

    An array is a view on the tensor's memory and keeps it alive: the slot of the batch is on lease to the arrays as it
    was to the tensors. What is no tensor stays what it is.

    Raises `InputError` for a tensor that NumPy has no form for, such as one of bfloat16.
    """
    if isinstance(batch, torch.Tensor):
        try:
            return batch.numpy(force=True)
        except (TypeError, RuntimeError) as error:
            raise InputError(
                f"output='numpy': NumPy has no form for a tensor of {batch.dtype} and {batch.layout} ({error}). "
                "Convert it in the data set or in collate_fn, or leave out output"
            ) from error
    if isinstance(batch, Mapping):
        changed = {key: as_arrays(value) for key, value in batch.items()}
        if type(batch) is dict:
            return changed
        same = copy.copy(batch)  # a mapping of another type keeps that
        same.update(changed)  # type: ignore[attr-defined]
        return same
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(map(as_arrays, batch))
    return type(batch)(map(as_arrays, batch)) if type(batch) in (list, tuple) else batch
