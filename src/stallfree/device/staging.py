"""Staging: sends the tensors of a batch to the device in few copies, through pinned memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.device.backend import Backend, Event
from stallfree.ipc.fork_guard import Owner

SMALL = 256 << 10
"""Bytes below which tensors share one allocation and one copy. Larger tensors have separate allocations, so that a
reference to the labels of a batch does not keep its images alive."""

_ALIGN = 256
_PACKED = (torch.channels_last, torch.channels_last_3d)


@dataclass(frozen=True)
class Layout:
    """The layout of small tensors in one allocation.

    Attributes:
        key: dtype, shape and strides of each tensor that it was made for.
        slots: position of each tensor: first byte, bytes per element, shape and strides; and an empty tensor of its
            dtype on the device.
        size: size in bytes, a multiple of 256.
    """

    key: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]
    slots: list[tuple[int, int, torch.Size, tuple[int, ...], Any]]
    size: int


@dataclass
class Place:
    """Persistent buffers for one batch in flight.

    Attributes:
        copied: event reached when the copies from `pinned` and from the tensors in `held` are done.
        used: event reached when the previous batch in this place is not needed any more.
        pinned: pinned host memory, for tensors that are not pinned themselves.
        layout, views: layout of the last batch's small tensors, and their views in `pinned`.
        memory: device memory, if it is persistent too.
        held: objects that copies may still read.
    """

    copied: Event
    used: Event
    pinned: torch.Tensor | None = None
    layout: Layout | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    memory: torch.Tensor | None = None
    held: Any = None


@dataclass(frozen=True)
class Sent:
    """The leaves of a batch after `Stager.send`.

    Attributes:
        leaves: the leaves in order. Those in `late` have not been sent.
        memory: device memory that must stay alive while the leaves are used: tensors or tensor-like objects.
        late: positions of leaves that the consumer has to send by their own `.to()`.
    """

    leaves: list[Any]
    memory: list[Any]
    late: list[int]


class Stager:
    """Sends the leaves of batches to a device. For one thread, whose current stream is the copy stream.

    Args:
        backend: the device.
        standing: reuse device memory in each place; otherwise each batch has fresh memory.
    """

    def __init__(self, backend: Backend, standing: bool) -> None:
        self._backend, self._standing = backend, standing
        self._warned: set[type] = set()

    def send(self, place: Place, leaves: Sequence[Any]) -> Sent:
        """Submit the copies of `leaves` to the current stream, with all other work needed before their use.

        Waits until the memory of `place` can be reused. With fresh memory, waits until the previous batch in this place
        is not needed any more; otherwise a training loop ahead of the device would use ever more memory. A host tensor
        is copied through the pinned memory of the place, unless it is pinned itself; it must then not change until
        `place.copied` is reached.
        """
        backend = self._backend
        backend.finish(place.copied)
        if self._standing:
            backend.wait(place.used)
        else:
            backend.finish(place.used)
        place.held = leaves
        sent = Sent(list(leaves), [], [])
        small: list[tuple[int, torch.Tensor]] = []
        large: list[tuple[int, torch.Tensor]] = []
        for at, leaf in enumerate(leaves):
            if is_plain(leaf):
                if leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
                    leaf = leaf.detach().resolve_conj().resolve_neg()
                (small if leaf.nbytes < SMALL else large).append((at, leaf))
            else:
                self._send_itself(at, leaf, sent)
        self._copy(place, small, large, sent)
        return sent

    def _copy(
        self,
        place: Place,
        small: list[tuple[int, torch.Tensor]],
        large: list[tuple[int, torch.Tensor]],
        sent: Sent,
    ) -> None:
        """Copy host tensors: small ones together, large ones separately."""
        backend = self._backend
        direct = [backend.is_pinned(leaf) and _stride(leaf) == leaf.stride() for _, leaf in large]
        sizes = [_padded_bytes(leaf) for _, leaf in large]
        shared = self._lay_out(place, [leaf for _, leaf in small])
        through = shared + sum(size for size, pinned in zip(sizes, direct, strict=True) if not pinned)
        if place.pinned is None or place.pinned.numel() < through:
            place.pinned, place.views = backend.empty_pinned(through + through // 8), []
        pieces = self._pieces(place, [shared, *sizes], sent)
        if shared:
            self._copy_small(place, small, *pieces[0], sent)
        filled = shared
        for (at, leaf), size, pinned, (memory, start) in zip(large, sizes, direct, pieces[1:], strict=True):
            source, stride = leaf, _stride(leaf)
            if not pinned:
                source = _view(place.pinned, filled, leaf, stride)
                backend.stage([source], [leaf])
                filled += size
            target = sent.leaves[at] = _view(memory, start, leaf, stride)
            backend.copy(_flat(target), _flat(source))

    def _lay_out(self, place: Place, small: list[torch.Tensor]) -> int:
        """Compute the layout of the small tensors unless it is unchanged; returns its size in bytes."""
        key = [(leaf.dtype, leaf.shape, leaf.stride()) for leaf in small]
        if place.layout is None or place.layout.key != key:
            slots, size = [], 0
            for leaf in small:
                dtype = leaf.dtype
                empty = _empty(dtype, self._backend.device)
                slots.append((size, dtype.itemsize, leaf.shape, _stride(leaf), empty))
                size += _padded_bytes(leaf)
            place.layout, place.views = Layout(key, slots, size), []
        return place.layout.size

    def _copy_small(
        self, place: Place, small: list[tuple[int, torch.Tensor]], memory: torch.Tensor, start: int, sent: Sent
    ) -> None:
        layout, pinned = place.layout, place.pinned
        assert layout is not None
        assert pinned is not None
        backend = self._backend
        if not place.views:
            each = zip(small, layout.slots, strict=True)
            place.views = [_view(pinned, begin, leaf, stride) for (_, leaf), (begin, _, _, stride, _) in each]
        backend.stage(place.views, [leaf for _, leaf in small])
        leaves, storage = sent.leaves, memory.untyped_storage()
        for (at, _), (begin, itemsize, shape, stride, empty) in zip(small, layout.slots, strict=True):
            leaves[at] = empty.data.set_(storage, (start + begin) // itemsize, shape, stride)  # see `_view`
        backend.copy(memory[start : start + layout.size], pinned[: layout.size])

    def _pieces(self, place: Place, sizes: list[int], sent: Sent) -> list[tuple[torch.Tensor, int]]:
        """Return device memory and a start offset for each of `sizes` (multiples of 256)."""
        backend = self._backend
        if not self._standing:
            pieces = [(backend.empty(size), 0) for size in sizes]
            sent.memory.extend(piece for (piece, _), size in zip(pieces, sizes, strict=True) if size)
            return pieces
        total = sum(sizes)
        if place.memory is None or place.memory.numel() < total:
            place.memory = backend.empty(total + total // 8)
        # The consumer of the previous batch may still use the memory that is replaced here.
        sent.memory.append(place.memory)
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [(place.memory, start) for start in starts]

    def _send_itself(self, at: int, leaf: Any, sent: Sent) -> None:
        """Send a leaf that is not a plain host tensor."""
        device = self._backend.device
        if isinstance(leaf, torch.Tensor) and leaf.device == device:
            sent.memory.append(leaf)
            return
        if type(leaf) not in self._warned:
            self._warned.add(type(leaf))
            warnings.warn(
                f"a {type(leaf).__name__} is sent to {device} by its own .to(), without pinned memory: this is slower, "
                "and may wait for the device. Plain host tensors in the batch are not affected",
                RuntimeWarning,
                stacklevel=2,
            )
        if hasattr(leaf, "record_stream"):
            sent.leaves[at] = send_itself(leaf, device)
            sent.memory.extend(memory_of(sent.leaves[at]))
        else:
            sent.late.append(at)


def pin(backend: Backend, places: Sequence[Place], owner: Owner, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
    """Pin memory of a loader. Returns the function that unpins it after the copies of `places` are done.

    A loader's forked workers inherit its memory and this function, but have no device: both do nothing in any process
    other than `owner`.
    """
    undo = backend.pin(memory) if owner.is_here else None

    def finish_and_undo() -> None:
        if undo is not None and owner.is_here:
            for place in places:
                backend.finish(place.copied)
            undo()

    return finish_and_undo


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


def _view(memory: torch.Tensor, start: int, like: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor like `like` over `memory` from byte `start` on, a multiple of 256; `memory` begins its storage.

    It is not a view for autograd: changes of another tensor over the same memory do not raise its version counter.
    """
    # `.data` is a new tensor with its own version counter, and cheaper than `torch.empty`
    empty = _empty(like.dtype, memory.device)
    view: torch.Tensor = empty.data.set_(memory.untyped_storage(), start // like.dtype.itemsize, like.shape, stride)
    return view


def _flat(leaf: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device=leaf.device)
    view: torch.Tensor = empty.set_(
        leaf.untyped_storage(), leaf.storage_offset() * leaf.dtype.itemsize, (leaf.nbytes,), (1,)
    )
    return view
