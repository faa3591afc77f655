"""Copies to a device: all calls of CUDA, and the tensors of a batch in few copies, through pinned memory."""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from stallfree.errors import device_unknown
from stallfree.platform import at_fork
from stallfree.pytree import Rebuild, take_apart

Stream = Any
Event = Any
Device: TypeAlias = torch.device | str | int
Transform = Callable[[Any], Any]

SMALL = 256 << 10
"""Bytes below which tensors share one allocation and one copy. Larger tensors have separate allocations, so that a
reference to the labels of a batch does not keep its images alive."""

_ALIGN = 256
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
_PACKED = {4: torch.channels_last, 5: torch.channels_last_3d}  # per number of dimensions
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {torch.sparse_coo: ("_indices", "_values"), torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS}
_PARTS |= {torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS}
"""Methods that return the memory of sparse tensors."""

Group = dict[int, torch.Tensor]
"""Tensors that share one allocation and one copy, by their position among the leaves of the batch."""


class Cuda:
    """A GPU with streams: queues whose work runs in order, beside the other queues. The tests simulate one.

    Args:
        device: "cuda" or "cuda:1"; without an index, the current device.

    Attributes:
        device: the torch device.

    Raises `InputError` if there is no such GPU.
    """

    def __init__(self, device: torch.device) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = torch.cuda.current_device() if device.index is None and count else device.index or 0
        if number >= count:
            none = "PyTorch sees no GPU here. Give device='cpu', or see torch.cuda"
            few = f"there are {count} GPUs here, counted from 0. Give one of them"
            raise device_unknown(f"device={str(device)!r}: {few if count else none}")
        self.device = torch.device("cuda", number)
        _freeze_in_children()

    def bind(self) -> None:
        """Make the device the current one of this thread."""
        torch.cuda.set_device(self.device)

    def new_stream(self) -> Stream:
        """Create a stream."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        """Return the stream that receives this thread's work."""
        return torch.cuda.current_stream(self.device)

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which `stream` is the current stream of this thread."""
        return torch.cuda.stream(stream)

    def new_event(self) -> Event:
        """Create an event: a mark in a stream. One that was never recorded counts as reached."""
        return torch.cuda.Event(blocking=True)  # waiting threads sleep

    def empty(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of device memory for the current stream.

        Once unreferenced, the memory is reused for later work of this stream and of the streams passed to `keep`.
        """
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def keep(self, tensor: Any) -> None:
        """Mark the memory of `tensor` as used by the current stream. Memory of another device is ignored."""
        if not isinstance(tensor, torch.Tensor) or tensor.device == self.device:
            tensor.record_stream(self.current_stream())

    def empty_pinned(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of host memory from which the device copies by DMA."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy `sources` into `targets` within host memory, synchronously; `targets` are pinned."""
        torch._foreach_copy_(targets, sources)  # one call: each call releases and reacquires the GIL

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from pinned memory to the device in the current stream: `source` is read later."""
        target.copy_(source, non_blocking=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the device can copy directly from the memory of a host tensor."""
        return tensor.is_pinned()

    def pin(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> Callable[[], object]:
        """Pin existing memory if possible. Returns the function that unpins it, to be called before it is freed."""
        runtime: Any = torch.cuda.cudart()
        address = memory.ctypes.data
        done = self._succeeds(runtime.cudaHostRegister, address, memory.nbytes, _PORTABLE)
        return lambda: done and self._succeeds(runtime.cudaHostUnregister, address)

    def _succeeds(self, function: Callable[..., Any], *arguments: int) -> bool:
        """Call a function of the CUDA runtime, whose result torch does not check.

        A thread without a current device would initialise the first one. An error stays recorded in the thread until
        the check after the next kernel, which clears it; a kernel is launched here so that no kernel of the user fails
        for it.
        """
        with torch.cuda.device(self.device):
            done = int(function(*arguments)) == 0
            if not done:
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self.device)
        return done


@functools.cache
def _freeze_in_children() -> None:
    """From now on, forked children never collect garbage that they inherit.

    A child has no CUDA: an event or a tensor in pinned memory that is freed there aborts it, such as a worker of torch.
    """
    at_fork(after_in_child=gc.freeze)


def find_device(device: Device) -> tuple[torch.device, Cuda | None]:
    """Return the device, and its backend if it has streams.

    Raises `InputError` if there is no such device, or this machine does not have it.
    """
    try:
        parsed = torch.device(device)
        if parsed.type not in ("cpu", "cuda"):
            torch.empty(1, device=parsed)
    except Exception as error:
        raise device_unknown(
            f"device={device!r} is no device: give one such as 'cuda', 'cuda:1' or 'cpu' that PyTorch has here "
            f"({str(error).splitlines()[0]:.100})"
        ) from error
    backend = Cuda(parsed) if parsed.type == "cuda" else None
    return parsed if backend is None else backend.device, backend


@dataclass
class BatchBuffer:
    """Persistent buffers for one batch in flight.

    Attributes:
        copied: event reached when the copies from `pinned` and from the tensors in `held` are done.
        used: event reached when the previous batch in this buffer is not needed any more.
        pinned: pinned host memory, for tensors that are not pinned themselves.
        views, layout: tensors over `pinned` for the last batch, and the layout that they were made for.
        held: objects that copies may still read.
    """

    copied: Event
    used: Event
    pinned: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    views: list[torch.Tensor] = field(default_factory=list)
    layout: list[Any] = field(default_factory=list)
    held: Any = None


@dataclass
class Sent:
    """A batch whose copies are submitted.

    Attributes:
        buffer: the buffer that it uses.
        rebuild: rebuilds the batch from its leaves.
        leaves: the leaves in order. Those in `late` have not been sent.
        memory: device memory that must stay alive while the leaves are used: tensors or tensor-like objects.
        late: positions of leaves that the consumer has to send by their own `.to()`.
    """

    buffer: BatchBuffer
    rebuild: Rebuild
    leaves: list[Any]
    memory: list[Any] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


class Copier:
    """Sends the batches of an iteration to the device in its copy stream, and delivers them to the training loop.

    Args:
        backend, stream: the device, and the stream of the copies.
        buffers: one for each batch in flight.
        transform: called with each batch on the device, or None.
    """

    def __init__(self, backend: Cuda, stream: Stream, buffers: list[BatchBuffer], transform: Transform | None) -> None:
        self.backend, self.stream, self.buffers, self._transform = backend, stream, buffers, transform
        self._number = 0
        self._in_use: BatchBuffer | None = None  # the buffer of the batch delivered last

    # -- in a thread whose current stream is the copy stream -----------------------------------------------------------

    def send(self, batch: Any) -> Sent:
        """Submit the copies of a batch, and its transform, to the current stream."""
        buffer = self.buffers[self._number % len(self.buffers)]
        try:
            sent = self._send(buffer, *take_apart(batch))
            if self._transform is not None and not sent.late:
                sent.leaves, sent.rebuild = take_apart(self._transform(sent.rebuild(sent.leaves)))
                sent.memory += [part for leaf in sent.leaves for part in memory_of(leaf)]
        finally:
            buffer.copied.record(self.backend.current_stream())
        self._number += 1
        return sent

    def _send(self, buffer: BatchBuffer, leaves: list[Any], rebuild: Rebuild) -> Sent:
        """Submit the copies of `leaves` to the current stream.

        Waits until the pinned memory of `buffer` can be reused, and until its previous batch is not needed any more:
        otherwise a training loop ahead of the device would use ever more memory. A host tensor is copied through the
        pinned memory of the buffer, unless it is pinned itself; it must then not change until `buffer.copied` is
        reached.
        """
        buffer.copied.synchronize()
        buffer.used.synchronize()
        buffer.held = leaves
        sent = Sent(buffer, rebuild, list(leaves))
        small: Group = {}
        large: list[Group] = []
        for at, leaf in enumerate(leaves):
            if not is_plain(leaf):
                self._send_itself(at, leaf, sent)
                continue
            if leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
                leaf = leaf.detach().resolve_conj().resolve_neg()
            if leaf.nbytes < SMALL:
                small[at] = leaf
            elif self.backend.is_pinned(leaf) and _stride(leaf) == leaf.stride():
                self._allocate({at: leaf}, sent)
                self.backend.copy(sent.leaves[at], leaf)
            else:
                large.append({at: leaf})
        if small or large:
            self._send_staged(sent, [small, *large] if small else large)
        return sent

    def _send_staged(self, sent: Sent, groups: list[Group]) -> None:
        """Copy the groups through the pinned memory of the buffer."""
        buffer, leaves = sent.buffer, [leaf for group in groups for leaf in group.values()]
        layout = [(leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves]
        if buffer.layout != layout:
            size = sum(map(_padded_bytes, leaves))
            if buffer.pinned.numel() < size:
                buffer.pinned = self.backend.empty_pinned(size + size // 8)
            buffer.layout, buffer.views = layout, _over(buffer.pinned, leaves)
        self.backend.stage(buffer.views, leaves)
        start = 0
        for group in groups:
            target = self._allocate(group, sent)
            self.backend.copy(target, buffer.pinned[start : start + len(target)])
            start += len(target)

    def _allocate(self, group: Group, sent: Sent) -> torch.Tensor:
        """Allocate device memory for a group and make its leaves over it; returns the memory."""
        memory = self.backend.empty(sum(map(_padded_bytes, group.values())))
        sent.memory.append(memory)
        for at, tensor in zip(group, _over(memory, group.values()), strict=True):
            sent.leaves[at] = tensor
        return memory

    def _send_itself(self, at: int, leaf: Any, sent: Sent) -> None:
        """Send a leaf that is not a plain host tensor."""
        device, is_tensor = self.backend.device, isinstance(leaf, torch.Tensor)
        if is_tensor and leaf.device == device:
            sent.memory.append(leaf)
        elif hasattr(leaf, "record_stream"):
            if is_tensor:
                _warn_of_slow(type(leaf).__name__, device)
            sent.leaves[at] = leaf.to(device)
            sent.memory += memory_of(sent.leaves[at])
        else:
            _warn_of_slow(type(leaf).__name__, device)
            sent.late.append(at)

    def drop_copied(self, *, wait: bool = False) -> None:
        """Drop the loader's batches whose copies are done; with `wait`, all of them, in the end."""
        for buffer in self.buffers:
            if wait:
                buffer.copied.synchronize()
            if buffer.held is not None and buffer.copied.query():
                buffer.held = None

    # -- in the training loop ------------------------------------------------------------------------------------------

    def deliver(self, sent: Sent) -> Any:
        """Return the batch. The current stream waits for its copies, and its memory is kept for that stream."""
        self._in_use = sent.buffer
        self.backend.current_stream().wait_event(sent.buffer.copied)
        for memory in sent.memory:
            self.backend.keep(memory)
        for at in sent.late:
            sent.leaves[at] = sent.leaves[at].to(self.backend.device)
        batch = sent.rebuild(sent.leaves)
        return self._transform(batch) if sent.late and self._transform is not None else batch

    def release(self) -> None:
        """Release the batch delivered last: work submitted to the device from now on does not use it. Idempotent."""
        if self._in_use is not None:
            self._in_use.used.record(self.backend.current_stream())
            self._in_use = None


@functools.cache
def _warn_of_slow(kind: str, device: torch.device) -> None:
    warnings.warn(
        f"a {kind} is sent to {device} by its own .to(), without pinned memory: this is slower, and may wait "
        "for the device. Plain host tensors in the batch are not affected",
        RuntimeWarning,
        stacklevel=2,
    )


def memory_of(leaf: Any) -> list[Any]:
    """Return the memory of a leaf on the device that must stay alive while the leaf is used."""
    if isinstance(leaf, torch.Tensor) and leaf.layout in _PARTS:
        return [getattr(leaf, name)() for name in _PARTS[leaf.layout]]
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
    if leaf.is_contiguous() or leaf.is_contiguous(memory_format=_PACKED.get(leaf.dim(), torch.contiguous_format)):
        return leaf.stride()
    return torch.empty(leaf.shape, device="meta").stride()


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Any:
    return torch.empty(0, dtype=dtype, device=device)


def _over(memory: torch.Tensor, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like `leaves` over `memory`, which begins its storage, one after the other.

    They are not views for autograd: changes of one do not raise the version counters of the others.
    """
    tensors: list[torch.Tensor] = []
    storage, start = memory.untyped_storage(), 0
    for leaf in leaves:
        # `.data` is a new tensor with its own version counter, and cheaper than `torch.empty`
        tensor = _empty(leaf.dtype, memory.device).data
        tensors.append(tensor.set_(storage, start // leaf.dtype.itemsize, leaf.shape, _stride(leaf)))
        start += _padded_bytes(leaf)
    return tensors
