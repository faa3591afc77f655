"""What a prefetcher needs of a device: memory, streams, events. Everything that is device-specific is here."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.errors import InputError

Stream = Any
Event = Any

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class Backend(ABC):
    """A device with streams: queues of work that it does in order, each beside the others.

    Attributes:
        device: which one.
    """

    device: torch.device

    @abstractmethod
    def bind(self) -> None:
        """This thread works with the device from now on."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream of its own."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream to which this thread gives its work."""

    @abstractmethod
    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Within it, `stream` is the current one of this thread."""

    @abstractmethod
    def new_event(self) -> Event:
        """An event: a mark in a stream. One that was never recorded counts as reached."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Put the mark behind all that was given to the current stream until now."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is given to the current stream from now on begins when the mark is reached."""

    @abstractmethod
    def finish(self, event: Event) -> None:
        """This thread goes on when the mark is reached."""

    @abstractmethod
    def reached(self, event: Event) -> bool:
        """Whether it is."""

    @abstractmethod
    def empty(self, size: int) -> torch.Tensor:
        """`size` bytes of device memory, for the current stream: free again for its later work when nobody refers to
        them, and for that of a stream named to `keep` meanwhile."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> None:
        """The current stream uses the memory of `tensor`, too: it is not given away before that work is done. Memory
        that is not of this device is left alone."""

    @abstractmethod
    def empty_pinned(self, size: int) -> torch.Tensor:
        """`size` bytes of the host's memory, out of which the device copies by itself."""

    def stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy within the host's memory, now: into `targets`, which are pinned."""
        torch._foreach_copy_(targets, sources)  # one call: each gives the interpreter's lock away and takes it back

    @abstractmethod
    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        """Pin memory that is there already, if that can be done; what undoes it, before the memory is let go of."""

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the device copies by itself out of the memory of a tensor of the host."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from pinned memory to the device, in the current stream: `source` is read later."""

    @abstractmethod
    def fill(self, target: torch.Tensor, byte: int) -> None:
        """Set all bytes of `target`, in the current stream."""


class Cuda(Backend):
    """A GPU, by CUDA or ROCm.

    Args:
        device: "cuda" or "cuda:1"; without a number the one that is current now.

    Raises `InputError` if there is no such GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise InputError(f"device={str(device)!r}: PyTorch sees no GPU here. Give device='cpu', or see torch.cuda")
        number = torch.cuda.current_device() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise InputError(
                f"device={str(device)!r}: there are {torch.cuda.device_count()} GPUs here, counted from 0. Give one "
                "of them"
            )
        self.device = torch.device("cuda", number)

    def bind(self) -> None:
        torch.cuda.set_device(self.device)

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def new_event(self) -> Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits for it sleeps

    def record(self, event: Event) -> None:
        event.record(self.current_stream())

    def wait(self, event: Event) -> None:
        self.current_stream().wait_event(event)

    def finish(self, event: Event) -> None:
        event.synchronize()

    def reached(self, event: Event) -> bool:
        return bool(event.query())

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def keep(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device == self.device:
            tensor.record_stream(self.current_stream())

    def empty_pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.ctypes.data
        done = self._succeeds(runtime.cudaHostRegister, address, memory.nbytes, _PORTABLE)
        return lambda: done and self._succeeds(runtime.cudaHostUnregister, address)

    def _succeeds(self, function: Callable[..., Any], *arguments: int) -> bool:
        """Call a function of CUDA, whose result torch does not look at.

        In a thread that has chosen no device it would begin to use the first one. And an error stays with the thread,
        where the check of the next kernel finds it, and forgets it: that is a kernel here, and none of the user's.
        """
        with torch.cuda.device(self.device):
            done = int(function(*arguments)) == 0
            if not done:
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self.device)
        return done

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        target.fill_(byte)
