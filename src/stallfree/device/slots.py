"""The slots of a `ProcessPrefetcher`: device memory that several processes share.

`Memory` is the device as seen by each process; `OpenSlots` are the slots as seen by a consumer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor

from stallfree.device.backend import Backend, Cuda, Event, Stream
from stallfree.device.batch_codec import lay_out
from stallfree.errors import storage_full

_POISON = 0xFF
_CHECK_SECONDS = 0.00005


class Memory(Backend):
    """A device whose memory and events can be shared with other processes.

    Attributes:
        ends_with_owner: whether the memory is freed when the process that allocated it ends.
    """

    ends_with_owner = False

    @abstractmethod
    def share(self, memory: torch.Tensor) -> Any:
        """Return a picklable handle of the memory, for one use by one other process."""

    @abstractmethod
    def open(self, handle: Any) -> torch.Tensor:
        """Open the memory that another process shared."""

    def discard(self, memory: torch.Tensor) -> None:
        """Discard shared memory: processes that have not opened it cannot open it any more."""

    def share_event(self, event: Event) -> Any:
        """Return a handle of an event, see `share`."""

    def open_event(self, handle: Any) -> Event:
        """Open an event that another process shared."""

    def follow(self, stream: Stream) -> None:
        """Make later work of the current stream wait for all work submitted to `stream` so far."""

    def finish_while(self, event: Event, alive: Callable[[], bool]) -> bool:
        """Wait for an event of a process that may be killed before reaching it; returns whether it is reached."""
        while not (there := self.reached(event)) and alive():
            time.sleep(_CHECK_SECONDS)
        return there


class SharedCuda(Cuda, Memory):
    """A GPU whose memory is shared by CUDA IPC. Threads that wait for its events sleep."""

    ends_with_owner = True

    def bind(self) -> None:
        # Depending on the version of torch, expandable segments cannot be shared with all processes, or not at all.
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        change("expandable_segments:False")
        super().bind()

    def new_event(self) -> Event:
        return torch.cuda.Event(blocking=True, interprocess=True)

    def follow(self, stream: Stream) -> None:
        self.current_stream().wait_stream(stream)

    def share(self, memory: torch.Tensor) -> Any:
        return reduce_tensor(memory)

    def open(self, handle: Any) -> torch.Tensor:
        rebuild, arguments = handle
        memory: torch.Tensor = rebuild(*arguments)
        return memory

    def share_event(self, event: Event) -> Any:
        return event.ipc_handle()

    def open_event(self, handle: Any) -> Event:
        return torch.cuda.Event.from_ipc_handle(self.device, handle)


class SharedHost(Memory):
    """Host memory, as mapped files in `folder`. All operations are synchronous: there are no streams."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cpu")
        self._folder = folder
        self._names: dict[int, str] = {}  # by address
        self._made = 0

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    bind = new_stream = current_stream = new_event = record = wait = finish = keep = _nothing

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def reached(self, event: Event) -> bool:
        return True

    def empty(self, size: int) -> torch.Tensor:
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._made += 1
        name = f"slot-{self._made}"
        fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            memory = _mapped(fd)
        except OSError as error:
            (self._folder / name).unlink()
            raise storage_full(
                f"there is no room in {self._folder} for a batch of {size} bytes: {error}. Give smaller batches, or a "
                "larger /dev/shm"
            ) from error
        finally:
            os.close(fd)
        self._names[memory.data_ptr()] = name
        return memory

    def empty_pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        return lambda: None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        np.copyto(target.numpy(), source.numpy())  # in this thread only; torch would use its thread pool

    def fill(self, target: torch.Tensor, byte: int) -> None:
        target.numpy().fill(byte)

    def share(self, memory: torch.Tensor) -> str:
        return self._names[memory.data_ptr()]

    def open(self, handle: str) -> torch.Tensor:
        fd = os.open(self._folder / handle, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _mapped(fd)
        finally:
            os.close(fd)

    def discard(self, memory: torch.Tensor) -> None:
        (self._folder / self._names.pop(memory.data_ptr())).unlink()


def _mapped(fd: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)


def memory_of(device: torch.device, folder: Path) -> Memory:
    """Return the memory of a CPU or a GPU."""
    return SharedCuda(device) if device.type == "cuda" else SharedHost(folder)


def poison(memory: Memory, tensor: torch.Tensor) -> None:
    """Fill a tensor with bytes that read as NaN or -1."""
    memory.fill(tensor, _POISON)


# -- the slots as seen by a consumer ----------------------------------------------------------------------------------


@dataclass
class _Slot:
    """An open slot.

    Attributes:
        memory: the slot's memory.
        copied: event reached when the batch is complete in the slot.
        used: event to record when the batch is not needed any more.
        layout, tensors: layout and tensors of the last batch in the slot.
    """

    memory: torch.Tensor
    copied: Event
    used: Event
    layout: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)


class OpenSlots:
    """The slots as seen by a consumer.

    Args:
        memory: the device as seen by this process.
        alive: returns whether the loading process is running. Its events must not be used after its end.
    """

    def __init__(self, memory: Memory, alive: Callable[[], bool]) -> None:
        self.memory = memory
        self._alive = alive
        self._slots: dict[int, _Slot] = {}

    def open(self, number: int, handles: bytes | memoryview) -> None:
        """Open the new memory of a slot. Shared memory that is never opened would never be freed."""
        handle, events = pickle.loads(handles)
        before = self._slots.get(number)
        try:
            with torch.inference_mode(False):
                memory = self.memory.open(handle)
            copied, used = map(self.memory.open_event, events) if before is None else (before.copied, before.used)
        except FileNotFoundError:
            return  # the slot has moved again; its new handles follow
        except RuntimeError:
            if self._alive():
                raise
            return  # `take` raises for the dead process
        self._slots[number] = _Slot(memory, copied, used)

    def take(self, number: int, layout: bytes) -> list[torch.Tensor]:
        """Return the tensors in a slot, for the current stream. Raises `EOFError` if they will never be complete.

        The tensors are new objects: changes to one of them, such as `requires_grad_()`, do not affect the next batch.
        """
        memory = self.memory
        if memory.ends_with_owner and not self._alive():
            raise EOFError
        slot = self._slots[number]
        if slot.layout != layout:
            slot.layout, slot.tensors = layout, lay_out(slot.memory, layout)
        if not memory.finish_while(slot.copied, self._alive):
            raise EOFError
        memory.wait(slot.copied)
        return [tensor.detach() for tensor in slot.tensors]

    def release(self, number: int, stream: Stream) -> None:
        """Release a slot after the work submitted so far to the current stream and to `stream`."""
        if number in self._slots and self._alive():
            if stream != self.memory.current_stream():
                self.memory.follow(stream)
            self.memory.record(self._slots[number].used)

    def close(self) -> None:
        """Wait for all work on the slots, then unmap them: the loader does not wait for a closed consumer."""
        if self._alive():
            for slot in self._slots.values():
                self.memory.finish(slot.used)
        self._slots.clear()

    def poison(self) -> None:
        """Poison the slots' memory so that stale use of a batch is visible."""
        for slot in self._slots.values():
            poison(self.memory, slot.memory)
