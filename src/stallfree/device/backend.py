"""All calls of CUDA: memory, streams and events of a device."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stallfree.errors import device_unknown
from stallfree.platform import at_fork

Stream = Any
Event = Any
Device: TypeAlias = torch.device | str | int

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class Cuda:
    """A GPU with streams: queues whose work runs in order, beside the other queues. The tests simulate one.

    Args:
        device: "cuda" or "cuda:1"; without an index, the current device.

    Attributes:
        device: the torch device.

    Raises `InputError` if there is no such GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise device_unknown(
                f"device={str(device)!r}: PyTorch sees no GPU here. Give device='cpu', or see torch.cuda"
            )
        number = torch.cuda.current_device() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise device_unknown(
                f"device={str(device)!r}: there are {torch.cuda.device_count()} GPUs here, counted from 0. Give one "
                "of them"
            )
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
        """Create an event: a mark in a stream. An event that was never recorded counts as reached."""
        return torch.cuda.Event(blocking=True)  # waiting threads sleep

    def record(self, event: Event) -> None:
        """Record the event after all work submitted to the current stream so far."""
        event.record(self.current_stream())

    def wait(self, event: Event) -> None:
        """Make all later work of the current stream wait for the event."""
        self.current_stream().wait_event(event)

    def finish(self, event: Event) -> None:
        """Block this thread until the event is reached."""
        event.synchronize()

    def reached(self, event: Event) -> bool:
        """Return whether the event is reached."""
        return bool(event.query())

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

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
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


def parse_device(device: Device) -> torch.device:
    """Return `torch.device(device)`. Raises `InputError` if there is no such device type."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise device_unknown(f"device={device!r} is no device: give one such as 'cuda', 'cuda:1' or 'cpu'") from error


def find_backend(device: torch.device) -> Cuda | None:
    """Return the backend of a device with streams; None for others.

    Raises `InputError` if this machine has no such device.
    """
    if device.type == "cuda":
        return Cuda(device)
    if device.type != "cpu":
        try:
            torch.empty(1, device=device)
        except Exception as error:
            raise device_unknown(
                f"device={str(device)!r}: PyTorch cannot use it here ({str(error).splitlines()[0]:.100}). Give "
                "device='cpu', or install a PyTorch that has it"
            ) from error
    return None
