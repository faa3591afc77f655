"""The slots of a `ProcessPrefetcher`: memory of a device that several processes have.

`Memory` is the device, as each of the processes sees it; `OpenSlots` are the slots, as a consumer sees them.
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
from stallfree.errors import StorageError

_POISON = 0xFF
_LOOK_SECONDS = 0.00005


class Memory(Backend):
    """A device whose memory and events other processes can have, too.

    Attributes:
        ends_with_owner: whether the memory is gone with the process that made it.
    """

    ends_with_owner = False

    @abstractmethod
    def share(self, memory: torch.Tensor) -> Any:
        """What another process needs to have the same memory: picklable, for one process and for one use."""

    @abstractmethod
    def open(self, handle: Any) -> torch.Tensor:
        """The memory that another process shared."""

    def discard(self, memory: torch.Tensor) -> None:
        """What was shared is not opened any more by who has not done so."""

    def share_event(self, event: Event) -> Any:
        """As `share`."""

    def open_event(self, handle: Any) -> Event:
        """As `open`."""

    def follow(self, stream: Stream) -> None:
        """What is given to the current stream from now on begins when all that was given to `stream` is done."""

    def finish_while(self, event: Event, alive: Callable[[], bool]) -> bool:
        """Wait for an event of a process that may be killed, and then may never reach it; whether it is reached."""
        while not (there := self.reached(event)) and alive():
            time.sleep(_LOOK_SECONDS)
        return there


class SharedCuda(Cuda, Memory):
    """A GPU: memory by CUDA IPC. Its events let a thread sleep that waits for them."""

    ends_with_owner = True

    def bind(self) -> None:
        # Memory of expandable segments can be shared with nobody, or not with every process, as versions of torch go.
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        change("expandable_segments:False")
        super().bind()

    def new_event(self) -> Event:
        return torch.cuda.Event(blocking=True, interprocess=True)  # type: ignore[no-untyped-call]

    def follow(self, stream: Stream) -> None:
        self.current_stream().wait_stream(stream)

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
            memory = _mapped(fd)
        except OSError as error:
            (self._folder / name).unlink()
            raise StorageError(
                f"there is no room in {self._folder} for a batch of {size} bytes: {error}. Give smaller batches, or a "
                "larger /dev/shm"
            ) from error
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
            return _mapped(fd)
        finally:
            os.close(fd)

    def discard(self, memory: torch.Tensor) -> None:
        (self._folder / self._names.pop(memory.data_ptr())).unlink()


def _mapped(fd: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)


def memory_of(device: torch.device, folder: Path) -> Memory:
    """Of a CPU or a GPU."""
    return SharedCuda(device) if device.type == "cuda" else SharedHost(folder)


def poison(memory: Memory, tensor: torch.Tensor) -> None:
    """Fill it with what is NaN or -1."""
    memory.fill(tensor, _POISON)


# -- the slots as a consumer has them ---------------------------------------------------------------------------------


@dataclass
class _Slot:
    """A slot, opened.

    Attributes:
        memory: of it.
        copied: reached when the batch in it is there.
        used: to be recorded when the batch is not needed any more.
        layout, tensors: of the last batch in it.
    """

    memory: torch.Tensor
    copied: Event
    used: Event
    layout: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)


class OpenSlots:
    """The slots as a consumer has them.

    Args:
        memory: the device, as its process sees it.
        alive: whether the process that loads lives. When it has ended, its events are not to be used any more.
    """

    def __init__(self, memory: Memory, alive: Callable[[], bool]) -> None:
        self.memory = memory
        self._alive = alive
        self._slots: dict[int, _Slot] = {}

    def learn(self, number: int, handles: bytes | memoryview) -> None:
        """Open the memory in which a slot lies from now on: what is shared and not opened is never free again."""
        handle, events = pickle.loads(handles)
        before = self._slots.get(number)
        try:
            with torch.inference_mode(False):
                memory = self.memory.open(handle)
            copied, used = map(self.memory.open_event, events) if before is None else (before.copied, before.used)
        except FileNotFoundError:
            return  # the slot lies elsewhere by now, and that is told next
        except RuntimeError:
            if self._alive():
                raise
            return  # whoever takes the batch hears of it
        self._slots[number] = _Slot(memory, copied, used)

    def take(self, number: int, layout: bytes) -> list[torch.Tensor]:
        """The tensors in a slot, for the current stream. Raises `EOFError` if they will never be there.

        They are new ones: what is done to one of them, such as `requires_grad_()`, is not done to the next batch.
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
        """What was given to the current stream, and to `stream`, until now is the last that is done with a slot."""
        if number in self._slots and self._alive():
            if stream != self.memory.current_stream():
                self.memory.follow(stream)
            self.memory.record(self._slots[number].used)

    def close(self) -> None:
        """Wait until nothing is done with any slot: nobody waits for a consumer that has left. Then let go of them."""
        if self._alive():
            for slot in self._slots.values():
                self.memory.finish(slot.used)
        self._slots.clear()

    def poison(self) -> None:
        """Have who still uses a batch see that it is not valid any more."""
        for slot in self._slots.values():
            poison(self.memory, slot.memory)
