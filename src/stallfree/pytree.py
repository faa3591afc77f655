"""Splits a nested batch into its tensors and a function that rebuilds it with other values."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Rebuild = Callable[[list[Any]], Any]
"""Rebuilds the batch with other values for its leaves, in the same order."""


def take_apart(batch: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of `batch` in order, and the function that rebuilds the batch.

    Leaves are tensors and all other objects with a `.to()`. The function looks into dicts and other mappings, lists,
    tuples, named tuples, dataclasses, attrs classes, and packed sequences (whose lengths stay on the host). Everything
    else is passed on to the new batch. `batch` is not changed.
    """
    leaves: list[Any] = []
    build = _walk(batch, leaves)
    return leaves, build


def prepared_here(batch: Any) -> Any:
    """Return `batch` for a CPU: unchanged, unless it has parts that are prepared by their `.to()`."""
    leaves, rebuild = take_apart(batch)
    if all(isinstance(leaf, torch.Tensor) or not hasattr(leaf, "record_stream") for leaf in leaves):
        return batch
    return rebuild([leaf if isinstance(leaf, torch.Tensor) else leaf.to("cpu") for leaf in leaves])


def _walk(value: Any, leaves: list[Any]) -> Rebuild:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, type):
        return lambda _: value
    # Before tuples: one may have a `.to()` of its own.
    if kind is torch.Tensor or (hasattr(value, "to") and hasattr(value, "record_stream")):
        return _leaf(value, leaves)
    if isinstance(value, PackedSequence):
        parts = (value.data, value.sorted_indices, value.unsorted_indices)
        return _group(parts, leaves, lambda new: PackedSequence(new[0], value.batch_sizes, *new[1:]))
    if isinstance(value, tuple):
        return _group(value, leaves, kind._make if hasattr(value, "_fields") else kind)
    if isinstance(value, list):
        return _group(value, leaves, lambda parts: _changed_items(value, range(len(value)), parts))
    if isinstance(value, Mapping):
        return _group(value.values(), leaves, lambda parts: _changed_items(value, list(value), parts))
    names = _fields(value)
    if names:
        return _group([getattr(value, name) for name in names], leaves, lambda parts: _changed(value, names, parts))
    return _leaf(value, leaves) if hasattr(value, "to") else lambda _: value


_PLAIN = {str, bytes, int, float, bool, type(None)}


def _leaf(value: Any, leaves: list[Any]) -> Rebuild:
    leaves.append(value)
    return itemgetter(len(leaves) - 1)


def _group(values: Any, leaves: list[Any], make: Callable[[list[Any]], Any]) -> Rebuild:
    parts = [_walk(value, leaves) for value in values]
    return lambda new: make([part(new) for part in parts])


def _changed_items(value: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
    """Return a copy of a list or a mapping with other items."""
    try:
        made = copy.copy(value)
        for name, inner in getattr(made, "__dict__", {}).items():  # the copy may share its inner container
            if isinstance(inner, dict | list):
                setattr(made, name, copy.copy(inner))
        for key, part in zip(keys, parts, strict=True):
            made[key] = part
    except TypeError:  # it cannot be changed or copied
        return type(value)(dict(zip(keys, parts, strict=True)))
    return made


def _fields(value: Any) -> list[str]:
    """Return the names of the dataclass or attrs fields that are set on an object."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        names = [field.name for field in getattr(type(value), "__attrs_attrs__", ())]
    return [name for name in names if hasattr(value, name)]


def _changed(value: Any, names: list[str], parts: list[Any]) -> Any:
    """Return a copy of `value` with other field values, without calling its class, so that frozen classes work."""
    made = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made
