"""Staging: sends the tensors of a batch to the device in few copies, through pinned memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from stallfree.device.backend import Cuda, Event

SMALL = 256 << 10
"""Bytes below which tensors share one allocation and one copy. Larger tensors have separate allocations, so that a
reference to the labels of a batch does not keep its images alive."""

_ALIGN = 256
_PACKED = (torch.channels_last, torch.channels_last_3d)

Group = list[tuple[int, torch.Tensor]]
"""Tensors that share one allocation and one copy, each with its position among the leaves of the batch."""


@dataclass
class Place:
    """Persistent buffers for one batch in flight.

    Attributes:
        copied: event reached when the copies from `pinned` and from the tensors in `held` are done.
        used: event reached when the previous batch in this place is not needed any more.
        pinned: pinned host memory, for tensors that are not pinned themselves.
        views, layout: tensors over `pinned` for the last batch, and the layout that they were made for.
        held: objects that copies may still read.
    """

    copied: Event
    used: Event
    pinned: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    layout: list[Any] | None = None
    held: Any = None


@dataclass
class Sent:
    """The leaves of a batch after `Stager.send`.

    Attributes:
        leaves: the leaves in order. Those in `late` have not been sent.
        memory: device memory that must stay alive while the leaves are used: tensors or tensor-like objects.
        late: positions of leaves that the consumer has to send by their own `.to()`.
    """

    leaves: list[Any]
    memory: list[Any] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


class Stager:
    """Sends the leaves of batches to a device. For threads whose current stream is the copy stream."""

    def __init__(self, backend: Cuda) -> None:
        self._backend = backend
        self._warned: set[type] = set()

    def send(self, place: Place, leaves: Sequence[Any]) -> Sent:
        """Submit the copies of `leaves` to the current stream, with all other work needed before their use.

        Waits until the pinned memory of `place` can be reused, and until the previous batch in this place is not needed
        any more: otherwise a training loop ahead of the device would use ever more memory. A host tensor is copied
        through the pinned memory of the place, unless it is pinned itself; it must then not change until `place.copied`
        is reached.
        """
        backend = self._backend
        backend.finish(place.copied)
        backend.finish(place.used)
        place.held = leaves
        sent = Sent(list(leaves))
        small: Group = []
        large: Group = []
        for at, leaf in enumerate(leaves):
            if is_plain(leaf):
                if leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
                    leaf = leaf.detach().resolve_conj().resolve_neg()
                (small if leaf.nbytes < SMALL else large).append((at, leaf))
            else:
                self._send_itself(at, leaf, sent)
        direct: list[Group] = []
        staged = [small] if small else []
        for at, leaf in large:
            pinned = backend.is_pinned(leaf) and _stride(leaf) == leaf.stride()
            (direct if pinned else staged).append([(at, leaf)])
        for group in direct:
            self._allocate(group, sent)
            at, leaf = group[0]
            backend.copy(sent.leaves[at], leaf)
        if staged:
            self._send_staged(place, staged, sent)
        return sent

    def _send_staged(self, place: Place, groups: list[Group], sent: Sent) -> None:
        """Copy the groups through the pinned memory of the place."""
        backend, leaves = self._backend, [leaf for group in groups for _, leaf in group]
        layout = [(leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves]
        if place.pinned is None or place.layout != layout:
            sizes = list(map(_padded_bytes, leaves))
            if place.pinned is None or place.pinned.numel() < sum(sizes):
                place.pinned = backend.empty_pinned(sum(sizes) + sum(sizes) // 8)
            starts = [sum(sizes[:number]) for number in range(len(sizes))]
            place.views = [_view(place.pinned, *each) for each in zip(starts, leaves, strict=True)]
            place.layout = layout
        backend.stage(place.views, leaves)
        start = 0
        for group in groups:
            target = self._allocate(group, sent)
            backend.copy(target, place.pinned[start : start + len(target)])
            start += len(target)

    def _allocate(self, group: Group, sent: Sent) -> torch.Tensor:
        """Allocate device memory for a group and make its leaves over it; returns the memory."""
        memory = self._backend.empty(sum(_padded_bytes(leaf) for _, leaf in group))
        sent.memory.append(memory)
        start = 0
        for at, leaf in group:
            sent.leaves[at] = _view(memory, start, leaf)
            start += _padded_bytes(leaf)
        return memory

    def _send_itself(self, at: int, leaf: Any, sent: Sent) -> None:
        """Send a leaf that is not a plain host tensor."""
        device = self._backend.device
        if isinstance(leaf, torch.Tensor) and leaf.device == device:
            sent.memory.append(leaf)
            return
        sends_itself = hasattr(leaf, "record_stream")
        if (isinstance(leaf, torch.Tensor) or not sends_itself) and type(leaf) not in self._warned:
            self._warned.add(type(leaf))
            warnings.warn(
                f"a {type(leaf).__name__} is sent to {device} by its own .to(), without pinned memory: this is slower, "
                "and may wait for the device. Plain host tensors in the batch are not affected",
                RuntimeWarning,
                stacklevel=2,
            )
        if sends_itself:
            sent.leaves[at] = send_itself(leaf, device)
            sent.memory.extend(memory_of(sent.leaves[at]))
        else:
            sent.late.append(at)


def send_itself(leaf: Any, device: torch.device) -> Any:
    """Return `leaf.to(device)`, without blocking if `leaf` supports it."""
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)


def memory_of(leaf: Any) -> list[Any]:
    """Return the memory of a leaf on the device that must stay alive while the leaf is used."""
    layout = getattr(leaf, "layout", torch.strided)
    if layout is torch.sparse_coo:
        return [leaf._indices(), leaf._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [leaf.crow_indices(), leaf.col_indices(), leaf.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [leaf.ccol_indices(), leaf.row_indices(), leaf.values()]
    return [leaf] if hasattr(leaf, "record_stream") else []


def is_plain(leaf: Any) -> bool:
    """Return whether a leaf is a host tensor that can be copied as bytes."""
    return (
        type(leaf) is torch.Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
    )


def _padded_bytes(leaf: torch.Tensor) -> int:
    return max(1, -(-leaf.nbytes // _ALIGN)) * _ALIGN


def _stride(leaf: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps: those of `leaf` if it has no gaps, else those of its memory format."""
    if leaf.is_contiguous():
        return leaf.stride()
    for form in _PACKED:
        if leaf.dim() == (4 if form is torch.channels_last else 5) and leaf.is_contiguous(memory_format=form):
            return leaf.stride()
    return torch.empty(leaf.shape, device="meta").stride()


@lru_cache
def _empty(dtype: torch.dtype, device: torch.device) -> Any:
    return torch.empty(0, dtype=dtype, device=device)


def _view(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `like` over `memory` from byte `start` on, a multiple of 256; `memory` begins its storage.

    It is not a view for autograd: changes of another tensor over the same memory do not raise its version counter.
    """
    # `.data` is a new tensor with its own version counter, and cheaper than `torch.empty`
    empty = _empty(like.dtype, memory.device).data
    view: torch.Tensor = empty.set_(memory.untyped_storage(), start // like.dtype.itemsize, like.shape, _stride(like))
    return view
