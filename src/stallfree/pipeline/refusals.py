"""Why a value cannot be stored in a record: the text of the error."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stallfree.pipeline.structure import DEPTH, TORCH_NAMES

PICKLE = ", or pass allow_pickle=True"


def why_not_tensor(value: torch.Tensor) -> str:
    """Return why a tensor cannot be stored; "" if it can."""
    if value.requires_grad:
        return "requires grad, which is not stored; call .detach() on it"
    if value.device.type != "cpu":
        return f"is on the device {value.device}; call .cpu() on it"
    if value.layout is not torch.strided or value.is_nested:
        return f"has the layout {value.layout}{', nested' * value.is_nested}; make it dense"
    if value.dtype not in TORCH_NAMES:
        return f"has the dtype {value.dtype}, which is not supported; convert it"
    return ""


def advice(kind: type) -> str:
    """Return why values of this type need pickle, and what to use instead."""
    for base, instead in (
        (torch.Tensor, "call .as_subclass(torch.Tensor) on it"),
        (np.ndarray, "call np.asarray on it"),
        (dict, "make it a plain dict"),
        (list, "make it a plain list"),
        (tuple, "make it a plain tuple"),
    ):
        if issubclass(kind, base):
            return f"a subclass of {base.__name__} is not stored without pickle; {instead}{PICKLE}"
    return (
        "cannot be stored without pickle; make it a tensor, an array, bytes, str, a number, None, or a dict, list or "
        f"tuple of these{PICKLE}"
    )


def position_of(value: Any, wanted: Any, place: str, depth: int) -> str:
    """Return the position of the object `wanted` in `value` as an expression; "" if it is not there."""
    if value is wanted:
        return place if len(place) <= 200 else f"{place[:100]}...{place[-90:]}"
    pairs: Any = ()
    if type(value) is dict:
        pairs = ((f"{place}[{key!r}]", child) for key, child in value.items())
    elif type(value) in (list, tuple):
        pairs = ((f"{place}[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = ((f"{place}.{field}", child) for field, child in zip(value._fields, value, strict=False))
    if depth <= DEPTH:
        for inner, child in pairs:
            found = position_of(child, wanted, inner, depth + 1)
            if found:
                return found
    return ""
