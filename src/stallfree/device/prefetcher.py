"""`DevicePrefetcher`: copies the next batches to the device while the model works with the current one."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, overload

import numpy as np

from stallfree.device.ahead import Item, LoaderThread, Snapshot
from stallfree.device.copies import BatchBuffer, Copier, Cuda, Device, Stream, Transform, find_device
from stallfree.errors import InputError, iteration_over, stop_iteration
from stallfree.ipc.process import Owner
from stallfree.pytree import take_apart
from stallfree.raising import short_traceback
from stallfree.typevars import BatchT_co, T
from stallfree.units import parse_whole


class DevicePrefetcher(Generic[BatchT_co]):
    """Copies the batches of a loader to the device ahead of their use.

        for images, labels in sf.DevicePrefetcher(loader, "cuda"):
            ...

    A thread takes batches from the loader and copies them in a separate stream, from persistent pinned memory. The
    stream that is current when a batch is requested waits for its copies; the host does not. A batch may consist of
    dicts and other mappings, lists, tuples, named tuples, dataclasses, attrs classes, packed sequences, and objects
    with a `.to()`; everything else in it is left unchanged. Host tensors below 256 KiB are copied together and share
    memory on the device; strides without gaps are kept. Tensors that cannot be pinned, such as sparse ones, are sent by
    their own `.to()`, with one warning per type.

    On a CPU, the thread takes one batch ahead, and batches are passed on unchanged. On devices without streams ("mps"
    and others) it does the same, and batches are sent when they are requested. Random draws are the same as without the
    prefetcher (of stallfree's loader with 0 workers and no cache: as with workers). Code that draws in this process
    runs when the next batch is requested.

    Args:
        loader: any iterable. Each iteration begins one over it; several may go on at the same time, as over the loader.
        device: device such as "cuda", "cuda:1" or "cpu".
        depth: batches that are ready or in flight, besides the one in use. The host is never further ahead of the
            device. On a CPU it is always one.
        transform_on_device: called with each batch, on the device and in the copy stream; its result is yielded.
            Convert to float and normalise here, so that bytes are transferred instead of floats.

    An exception of the loader is raised at its position in the order; `next` then continues if the loader does. Raises
    `InputError` for invalid arguments and for a missing device. A copy, also in another process, is a new prefetcher
    with the same arguments.

    Example:
        ```python
        loader = torch.utils.data.DataLoader(dataset, batch_size=4)
        for images, labels in sf.DevicePrefetcher(loader, device):
            train(images, labels)  # on the device
        ```
    """

    @overload
    def __init__(
        self, loader: Iterable[BatchT_co], device: Device, depth: int = 2, *, transform_on_device: None = None
    ) -> None: ...

    @overload
    def __init__(
        self, loader: Iterable[T], device: Device, depth: int = 2, *, transform_on_device: Callable[[T], BatchT_co]
    ) -> None: ...

    def __init__(
        self, loader: Iterable[Any], device: Device, depth: int = 2, *, transform_on_device: Transform | None = None
    ) -> None:
        parse_whole(depth, "depth", 1)
        if transform_on_device is not None and not callable(transform_on_device):
            raise InputError(f"transform_on_device={transform_on_device!r:.80}: give a function of a batch, or None")
        if not hasattr(loader, "__iter__"):
            raise InputError(f"the loader is a {type(loader).__name__}, which cannot be iterated: give a data loader")
        self.loader, self.depth, self.transform_on_device = loader, depth, transform_on_device
        self.device, self._backend = find_device(device)
        self._stream: Stream | None = None
        self._begin_here()

    def _begin_here(self) -> None:
        """Set what belongs to this process: a forked child inherits no threads."""
        self._owner = Owner()
        self._buffers: list[BatchBuffer] = []  # of all iterations
        self.pin = partial(_pin, self._backend, self._owner, self._buffers)  # a loader may keep it
        self._lock = threading.Lock()  # held while the loader runs, in whichever iteration
        self._latest: Callable[[], _Iteration | None] = lambda: None
        self._threads: list[LoaderThread] = []
        self._unused: list[list[BatchBuffer]] = []
        # After the last batch of the latest iteration; None if it has ended or the loader has no state.
        self.position: Snapshot | None = None

    def __reduce__(self) -> Any:
        return partial(type(self), transform_on_device=self.transform_on_device), (self.loader, self.device, self.depth)

    def __repr__(self) -> str:
        return f"DevicePrefetcher({self.loader!r:.200}, {str(self.device)!r}, depth={self.depth})"

    def __len__(self) -> int:
        """Number of batches per epoch, as reported by the loader."""
        return len(self.loader)  # type: ignore[arg-type]

    @short_traceback
    def __iter__(self) -> Iterator[BatchT_co]:
        if not self._owner.is_here:
            self._begin_here()
        self._join_stopped()
        loader: Any = self.loader
        with self._lock:
            source = loader.prefetched_by(self) if hasattr(loader, "prefetched_by") else iter(loader)
            snapshot = partial(_snapshot, loader) if hasattr(loader, "state_dict") else None
            self.position = None if snapshot is None else snapshot()
        thread = LoaderThread(source, snapshot, self._lock, self._copier())
        self._threads.append(thread)
        iteration = _Iteration(self, thread)
        self._latest = weakref.ref(iteration)
        return iteration

    def _copier(self) -> Copier | None:
        """Return what copies the batches of an iteration; None for a device without streams."""
        if (backend := self._backend) is None:
            return None
        if self._stream is None:
            self._stream = backend.new_stream()
        if not self._unused:
            self._unused.append([BatchBuffer(backend.new_event(), backend.new_event()) for _ in range(self.depth + 1)])
            self._buffers += self._unused[-1]
        return Copier(backend, self._stream, self._unused.pop(), self.transform_on_device)

    def _join_stopped(self) -> None:
        """Wait for the threads of ended iterations, whose buffers serve the next one. One that hangs is left behind."""
        for thread in [thread for thread in self._threads if thread.stopped and thread.join()]:
            self._threads.remove(thread)
            if thread.copier is not None:
                self._unused.append(thread.copier.buffers)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """Return the loader's state as of the last batch yielded here.

        Raises `InputError` if the loader has no state.
        """
        return self._state_at(self.position)

    def state_snapshot(self) -> Snapshot:
        """Return a function that returns the present state later."""
        return partial(self._state_at, self.position)

    def _state_at(self, position: Snapshot | None) -> Any:
        if position is None:
            self._need("state_dict")
            return self.loader.state_dict()  # type: ignore[attr-defined]
        with self._lock:
            return position()

    def load_state_dict(self, state: Any) -> None:
        """Make the next iteration resume from `state`.

        Raises `InputError` if the loader does not support it.
        """
        self._need("load_state_dict")
        self.close()
        self.position = None
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _need(self, name: str) -> None:
        if not hasattr(self.loader, name):
            raise InputError(
                f"the loader, a {type(self.loader).__name__}, has no {name}(): give one that has, such as DataLoader"
            )

    def close(self) -> None:
        """End all iterations and wait for their threads.

        The prefetcher can be iterated again.
        """
        if self._owner.is_here:
            for thread in self._threads:
                thread.stop()
            self._join_stopped()


def _pin(
    backend: Cuda | None, owner: Owner, buffers: list[BatchBuffer], memory: np.ndarray[Any, np.dtype[np.uint8]]
) -> Callable[[], object]:
    """Pin host memory, so that the device copies from it directly.

    Returns the function that unpins it once the copies of all `buffers` are done. In a forked child, which has no
    device, both do nothing.
    """
    if backend is None or not owner.is_here:
        return lambda: None
    undo = backend.pin(memory)

    def finish_and_undo() -> None:
        if owner.is_here:
            for buffer in buffers:
                buffer.copied.synchronize()
            undo()

    return finish_and_undo


class _Iteration(Iterator[Any]):
    """One pass. Ends its thread when it is exhausted, closed or no longer referenced."""

    def __init__(self, prefetcher: DevicePrefetcher[Any], thread: LoaderThread) -> None:
        self._prefetcher, self.thread = prefetcher, thread
        self._owner = Owner()
        self._taken: Item | None = None  # the last item
        self._count_wait: Callable[[float], object] = getattr(prefetcher.loader, "count_wait", lambda _: None)

    @short_traceback
    def __next__(self) -> Any:
        if self.thread.stopped:
            raise StopIteration
        if not self._owner.is_here:
            raise iteration_over(
                "this iteration over a DevicePrefetcher was begun in the parent process, whose thread does not exist "
                "in this one: begin a new iteration here"
            )
        self._release_batch()
        begun = time.monotonic()
        item = self.thread.take()
        self._taken = item
        self._count_wait(time.monotonic() - begun)
        prefetcher = self._prefetcher
        if prefetcher._latest() is self and (item.snapshot is not None or item.end):
            prefetcher.position = item.snapshot
        if item.end:
            self.close()
            raise StopIteration
        error, item.error = item.error, None
        try:
            if error is not None:
                raise error
            return self._deliver(item)
        except StopIteration as stop:  # would end the loop silently
            raise stop_iteration(
                "a batch could not be delivered: transform_on_device or .to() raised StopIteration. Let it raise "
                "another error"
            ) from stop
        finally:
            del error  # breaks the reference cycle of its traceback with this frame

    def _deliver(self, item: Item) -> Any:
        """Return the batch of an item, which keeps no reference to it."""
        batch, item.batch = item.batch, None
        if self.thread.copier is not None:
            return self.thread.copier.deliver(batch)
        device, transform = self._prefetcher.device, self._prefetcher.transform_on_device
        if device.type != "cpu":
            leaves, rebuild = take_apart(batch)
            batch = rebuild([leaf.to(device) for leaf in leaves])
        return batch if transform is None else transform(batch)

    def _release_batch(self) -> None:
        """Release the batch yielded last: work submitted to the device from now on does not use it."""
        if self._taken is not None:
            self.thread.remove(self._taken)
            self._taken = None

    def close(self) -> None:
        """End this pass. Idempotent."""
        if self._owner.is_here:
            self._release_batch()
        self.thread.stop()

    def __del__(self) -> None:
        self.close()


def _snapshot(loader: Any) -> Snapshot:
    """Return a function that returns the present state of `loader` later.

    A loader with `state_snapshot` need not build a state per batch.
    """
    if hasattr(loader, "state_snapshot"):
        return loader.state_snapshot()  # type: ignore[no-any-return]
    state = loader.state_dict()
    return lambda: state
