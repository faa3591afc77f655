"""The slots of a `ProcessPrefetcher`: memory of a device that several processes have."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor

from stallfree.device.backend import Backend, Cuda, Event, Stream
from stallfree.errors import StorageError

_POISON = 0xFF


class Memory(Backend):
    """A device whose memory and events other processes can have, too."""

    def share(self, memory: torch.Tensor) -> Any:
        """What another process needs to have the same memory: picklable, for one process and for one use."""
        raise NotImplementedError

    def open(self, handle: Any) -> torch.Tensor:
        """The memory that another process shared."""
        raise NotImplementedError

    def discard(self, memory: torch.Tensor) -> None:
        """What was shared is not opened any more by who has not done so."""

    def share_event(self, event: Event) -> Any:
        """As `share`."""

    def open_event(self, handle: Any) -> Event:
        """As `open`."""


class SharedCuda(Cuda, Memory):
    """A GPU: memory by CUDA IPC. Its events let a thread sleep that waits for them."""

    def new_event(self) -> Event:
        return torch.cuda.Event(blocking=True, interprocess=True)  # type: ignore[no-untyped-call]

    def share(self, memory: torch.Tensor) -> Any:
        return reduce_tensor(memory)  # type: ignore[no-untyped-call]

    def open(self, handle: Any) -> torch.Tensor:
        rebuild, arguments = handle
        memory: torch.Tensor = rebuild(*arguments)
        return memory

    def share_event(self, event: Event) -> Any:
        return event.ipc_handle()

    def open_event(self, handle: Any) -> Event:
        return torch.cuda.Event.from_ipc_handle(self.device, handle)  # type: ignore[no-untyped-call]


class SharedHost(Memory):
    """Memory of the host, as files in `folder` that are mapped. What is asked for is done at once: no streams."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cpu")
        self._folder = folder
        self._names: dict[int, str] = {}  # by address
        self._made = 0

    def bind(self) -> None:
        pass

    def new_stream(self) -> Stream:
        return None

    def current_stream(self) -> Stream:
        return None

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def new_event(self) -> Event:
        return None

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass

    def finish(self, event: Event) -> None:
        pass

    def reached(self, event: Event) -> bool:
        return True

    def empty(self, size: int) -> torch.Tensor:
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._made += 1
        name = f"slot-{self._made}"
        fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        except OSError as error:
            (self._folder / name).unlink()
            raise StorageError(f"there is no room in {self._folder} for a batch of {size} bytes: {error}") from error
        finally:
            os.close(fd)
        self._names[memory.data_ptr()] = name
        return memory

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def empty_pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        return lambda: None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        np.copyto(target.numpy(), source.numpy())  # in this thread alone, where torch would wake others

    def fill(self, target: torch.Tensor, byte: int) -> None:
        target.numpy().fill(byte)

    def share(self, memory: torch.Tensor) -> str:
        return self._names[memory.data_ptr()]

    def open(self, handle: str) -> torch.Tensor:
        fd = os.open(self._folder / handle, os.O_RDWR | os.O_CLOEXEC)
        try:
            return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
        finally:
            os.close(fd)

    def discard(self, memory: torch.Tensor) -> None:
        (self._folder / self._names.pop(memory.data_ptr())).unlink()


def memory_of(device: torch.device, folder: Path) -> Memory:
    """Of a CPU or a GPU."""
    return SharedCuda(device) if device.type == "cuda" else SharedHost(folder)


def poison(memory: Memory, tensor: torch.Tensor) -> None:
    """Fill it with what is NaN or -1."""
    memory.fill(tensor, _POISON)
