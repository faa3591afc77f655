"""The batch codec: splits a batch into tensors and the rest, and joins them in the consumer.

The tensors are stored in a slot; their layout is sent as bytes, which are equal for equal layouts. The rest is pickled.
"""

from __future__ import annotations

import pickle
import warnings
from functools import lru_cache
from typing import Any

import torch

from stallfree.device.pytree import take_apart
from stallfree.device.staging import is_plain, send_itself

_LAYOUTS = 512
"""Number of layouts whose bytes are cached."""

_warned: set[str] = set()


class _Mark:
    """Placeholder for a tensor in a pickled batch."""

    to = record_stream = None  # the attributes by which `take_apart` finds it

    def __reduce__(self) -> str:
        return "MARK"


MARK = _Mark()


def split(batch: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the plain tensors of a batch, and the batch with marks in their places."""
    leaves, rebuild = take_apart(batch)
    plain = [is_plain(leaf) for leaf in leaves]
    rest = rebuild([MARK if at_once else leaf for leaf, at_once in zip(leaves, plain, strict=True)])
    return [leaf for leaf, at_once in zip(leaves, plain, strict=True) if at_once], rest


def join(tensors: list[torch.Tensor], rest: Any, device: torch.device) -> Any:
    """Return the batch with `tensors` in the places of the marks. Other leaves are sent to `device` with a warning."""
    leaves, rebuild = take_apart(rest)
    ready = iter(tensors)
    for at, leaf in enumerate(leaves):
        if leaf is MARK:
            leaves[at] = next(ready)
        else:
            _warn_pickled(leaf, device)
            leaves[at] = send_itself(leaf, device)
    return rebuild(leaves)


def _warn_pickled(leaf: Any, device: torch.device) -> None:
    name = type(leaf).__name__
    if type(leaf) is torch.Tensor:
        name += f" of {leaf.layout}" if leaf.is_cpu else f" on {leaf.device}"
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"a {name} in a batch is pickled each time it is sent to {device}; plain strided host tensors are not "
            "pickled",
            RuntimeWarning,
            stacklevel=5,
        )


def pack_layout(tensors: list[torch.Tensor]) -> bytes:
    """Return the layout of tensors in the memory that they share, as bytes."""
    return _packed(tuple([(each.dtype, each.shape, each.stride(), each.storage_offset()) for each in tensors]))


@lru_cache(_LAYOUTS)
def _packed(layout: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]) -> bytes:
    return pickle.dumps(layout, pickle.HIGHEST_PROTOCOL)


def lay_out(memory: torch.Tensor, layout: bytes) -> list[torch.Tensor]:
    """Return tensors over `memory` with the packed layout."""
    made = []
    with torch.inference_mode(False):
        for dtype, shape, stride, start in pickle.loads(layout):
            empty: Any = torch.empty(0, dtype=dtype, device=memory.device)
            made.append(empty.set_(memory.untyped_storage(), start, shape, stride))
    return made
