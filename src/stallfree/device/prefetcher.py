"""`DevicePrefetcher`: copies the next batches to the device while the model works with the current one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Generic, overload

import numpy as np
import numpy.typing as npt
import torch

from stallfree.device.backend import Backend, Cuda, Stream, parse_device
from stallfree.device.copy_thread import CopyThread, HostThread, Item, LoaderThread, Snapshot, Transform
from stallfree.device.pytree import take_apart
from stallfree.device.staging import Place, Stager, pin, send_itself
from stallfree.errors import (
    InputError,
    argument_conflict,
    device_unknown,
    iteration_over,
    stop_iteration,
)
from stallfree.frames import ShortTracebacks, short_traceback
from stallfree.ipc.fork_guard import Owner
from stallfree.typevars import BatchT_co, T

_POISON = 0xFF


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
    and others), batches are taken and sent when they are requested. Random draws are the same as without the
    prefetcher: code that draws in this process, not in a worker, runs when the next batch is requested.

    Args:
        loader: any iterable. Each iteration begins one over it; several may go on at the same time, as over the loader.
        device: device such as "cuda", "cuda:1" or "cpu".
        depth: batches that are ready or in flight, besides the one in use. The host is never further ahead of the
            device. On a CPU it is always one.
        keep: "fresh": each batch has its own memory, for as long as it is referenced. "ring": device memory is
            allocated once, for `depth` + 1 batches, and a batch is valid until the next one is requested. Streams other
            than the current one must have finished their work on it by then.
        transform_on_device: called with each batch, on the device and in the copy stream; its result is yielded.
            Convert to float and normalise here, so that bytes are transferred instead of floats.
        debug: with keep="ring", fill the memory of a batch with bytes of 0xFF (NaN, -1) when the next one is requested,
            so that stale use is visible.

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
        self,
        loader: Iterable[BatchT_co],
        device: torch.device | str | int,
        depth: int = 2,
        keep: str = "fresh",
        *,
        transform_on_device: None = None,
        debug: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self,
        loader: Iterable[T],
        device: torch.device | str | int,
        depth: int = 2,
        keep: str = "fresh",
        *,
        transform_on_device: Callable[[T], BatchT_co],
        debug: bool = False,
    ) -> None: ...

    @short_traceback
    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int,
        depth: int = 2,
        keep: str = "fresh",
        *,
        transform_on_device: Transform | None = None,
        debug: bool = False,
    ) -> None:
        _check(loader, depth, keep, transform_on_device, debug)
        self.loader, self.depth, self.keep, self.debug = loader, depth, keep, debug
        self.transform_on_device = transform_on_device
        self.device = _device(device)
        self._backend = find_backend(self.device)
        if self._backend is not None:
            self.device = self._backend.device
        self._stream: Stream | None = None
        self._stager: Stager | None = None
        self._begin_here()

    def _begin_here(self) -> None:
        """Set what belongs to this process: a forked child inherits no threads."""
        self._owner = Owner()
        self._lock = threading.Lock()  # held while the loader runs, for whichever iteration
        self._threads: list[LoaderThread] = []  # of iterations that are active, or have just ended
        self._iterations: weakref.WeakSet[_Iteration] = weakref.WeakSet()
        self._latest: weakref.ref[_Iteration] | None = None
        self._places: list[Place] = []
        self._unused: list[list[Place]] = []  # those that no iteration has
        self._consumed: Snapshot | None = None  # the state of the loader after the last batch of the latest iteration

    def __reduce__(self) -> Any:
        make = partial(type(self), transform_on_device=self.transform_on_device, debug=self.debug)
        return make, (self.loader, self.device, self.depth, self.keep)

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
        backend = self._backend
        if backend is None and self.device.type != "cpu":
            return ShortTracebacks(self._send_each())
        loader: Any = self.loader
        with self._lock:
            source = loader.prefetched_by(self) if hasattr(loader, "prefetched_by") else iter(loader)
            snapshot = _snapshots(loader)
            self._consumed = None if snapshot is None else snapshot()
        iteration: _Iteration
        if backend is None:
            host = HostThread(self._lock, source, snapshot)
            iteration = _Iteration(self, host)
        else:
            iteration = _DeviceIteration(self, self._copy(backend, source, snapshot), backend)
        self._threads.append(iteration.thread)
        self._iterations.add(iteration)
        self._latest = weakref.ref(iteration)
        return iteration

    def _copy(self, backend: Backend, source: Iterator[Any], snapshot: Callable[[], Snapshot] | None) -> CopyThread:
        if self._stager is None:
            self._stream = backend.new_stream()
            self._stager = Stager(backend, standing=self.keep == "ring")
        if not self._unused:
            self._unused.append([Place(backend.new_event(), backend.new_event()) for _ in range(self.depth + 1)])
            self._places += self._unused[-1]
        places, transform = self._unused.pop(), self.transform_on_device
        return CopyThread(self._lock, source, snapshot, backend, self._stream, self._stager, places, transform)

    def _join_stopped(self) -> None:
        """Wait for the threads of ended iterations, whose places serve the next one."""
        for thread in [thread for thread in self._threads if thread.stopped]:
            thread.join()
            self._threads.remove(thread)
            if isinstance(thread, CopyThread):
                self._unused.append(thread.places)

    def _send_each(self) -> Generator[Any, None, None]:
        for batch in self.loader:
            leaves, rebuild = take_apart(batch)
            batch = rebuild([send_itself(leaf, self.device) for leaf in leaves])
            yield batch if self.transform_on_device is None else self.transform_on_device(batch)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """Return the loader's state as of the last batch yielded here.

        Raises `InputError` if the loader has no state.
        """
        if not hasattr(self.loader, "state_dict"):
            raise InputError(
                f"the loader, a {type(self.loader).__name__}, has no state_dict(): give a loader that has, such as "
                "DataLoader"
            )
        return self.loader.state_dict() if self._consumed is None else self._state_of(self._consumed)

    @property
    def ahead(self) -> bool:
        """Whether the loader may have delivered batches that have not been yielded here."""
        return self._consumed is not None

    def _snapshot(self) -> Snapshot:
        """Return a snapshot of the current state, to be evaluated later."""
        consumed = self._consumed
        return _made(self.state_dict()) if consumed is None else partial(self._state_of, consumed)

    def _state_of(self, consumed: Snapshot) -> Any:
        with self._lock:
            return consumed()

    def load_state_dict(self, state: Any) -> None:
        """Make the next iteration resume from `state`.

        Raises `InputError` if the loader does not support it.
        """
        if not hasattr(self.loader, "load_state_dict"):
            raise InputError(
                f"the loader, a {type(self.loader).__name__}, has no load_state_dict(): give a loader that has, such "
                "as DataLoader"
            )
        self.close()
        self._consumed = None
        self.loader.load_state_dict(state)

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        """Pin host memory, so that the device copies from it directly.

        Returns the function that unpins it.

        In a forked child, which has no device, both do nothing.
        """
        return _do_nothing if self._backend is None else pin(self._backend, self._places, self._owner, memory)

    def close(self) -> None:
        """End all iterations and wait for their threads.

        The prefetcher can be iterated again.
        """
        if self._owner.is_here:
            for iteration in list(self._iterations):
                iteration.close()
            self._join_stopped()

    def _keep_state(self, iteration: _Iteration, snapshot: Snapshot | None) -> None:
        """Keep the state of the loader after what `iteration` has yielded, if no later one has begun."""
        if self._latest is not None and self._latest() is iteration:
            self._consumed = snapshot


class _Iteration:
    """One pass; this base class serves a CPU. Ends the thread when exhausted, closed or no longer referenced."""

    def __init__(self, prefetcher: DevicePrefetcher, thread: LoaderThread) -> None:
        self._prefetcher, self.thread = prefetcher, thread
        self._owner = Owner()
        self._ended = False
        self._count_wait: Callable[[float], object] = getattr(prefetcher.loader, "count_wait", _do_nothing)

    def __iter__(self) -> _Iteration:
        return self

    @short_traceback
    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self._owner.is_here:
            raise iteration_over(
                "this iteration over a DevicePrefetcher was begun in the parent process, whose thread does not exist "
                "in this one: begin a new iteration here"
            )
        self._release_batch()
        begun = time.monotonic()
        item = self.thread.take()
        self._count_wait(time.monotonic() - begun)
        if item.snapshot is not None or item.end:
            self._prefetcher._keep_state(self, item.snapshot)
        if item.end:
            self.close()
            raise StopIteration
        try:
            if item.error is not None:
                self._discard(item)
                raise item.error
            return self._deliver(item)
        except StopIteration as error:  # would end the loop silently
            raise stop_iteration(
                "a batch could not be delivered: transform_on_device or .to() raised StopIteration. Let it raise "
                "another error"
            ) from error
        finally:
            del item  # breaks the reference cycle of an error's traceback with this frame

    def _deliver(self, item: Item) -> Any:
        """Return the batch of an item."""
        transform = self._prefetcher.transform_on_device
        return item.batch if transform is None else transform(item.batch)

    def _discard(self, item: Item) -> None:
        """Discard an item."""

    def _release_batch(self) -> None:
        """Release the batch yielded last: work submitted to the device from now on does not use it."""

    def close(self) -> None:
        """End this pass. Idempotent."""
        self._ended = True
        self._release_batch()
        self.thread.stop()

    def __del__(self) -> None:
        self.close()


class _DeviceIteration(_Iteration):
    """One pass on a device with streams."""

    def __init__(self, prefetcher: DevicePrefetcher, thread: CopyThread, backend: Backend) -> None:
        self._backend, self._copies = backend, thread
        self._out: tuple[Place, Stream] | None = None  # the batch yielded last, with the stream that waited for it
        super().__init__(prefetcher, thread)

    def _deliver(self, item: Item) -> Any:
        backend, place = self._backend, item.place
        assert place is not None
        assert item.rebuild is not None
        self._out = place, backend.current_stream()
        backend.wait(place.copied)
        for memory in item.memory:
            backend.keep(memory)
        for at in item.late:
            item.leaves[at] = send_itself(item.leaves[at], backend.device)
        batch = item.rebuild(item.leaves)
        if item.late and self._prefetcher.transform_on_device is not None:
            batch = self._prefetcher.transform_on_device(batch)
        return batch

    def _discard(self, item: Item) -> None:
        if item.place is not None:
            self._copies.give_back(item.place)

    def _release_batch(self) -> None:
        if self._out is None:
            return
        (place, stream), self._out = self._out, None
        backend = self._backend
        if stream != backend.current_stream():  # that stream may still use it
            with backend.using(stream):
                backend.record(place.used)
            backend.wait(place.used)
        if self._prefetcher.debug and place.memory is not None:
            backend.keep(place.memory)
            backend.fill(place.memory, _POISON)
        backend.record(place.used)
        self._copies.give_back(place)


def find_backend(device: torch.device) -> Backend | None:
    """Return the backend of a device with streams; None for others. Raises `InputError` if there is no such device."""
    return Cuda(device) if device.type == "cuda" else None


def _do_nothing(*_: object) -> None:
    pass


def _snapshots(loader: Any) -> Callable[[], Snapshot] | None:
    """Return the function that takes a loader's state after a batch; None if the loader has no state.

    A loader that can return an earlier state (`state_at`, with the `position` of that time) need not build one per
    batch.
    """
    if isinstance(loader, DevicePrefetcher):
        return None if _snapshots(loader.loader) is None else loader._snapshot
    if hasattr(loader, "state_at"):
        return lambda: partial(loader.state_at, loader.position)
    if hasattr(loader, "state_dict"):
        return lambda: _made(loader.state_dict())
    return None


def _made(state: Any) -> Snapshot:
    return lambda: state


def _check(loader: Any, depth: Any, keep: Any, transform: Any, debug: bool) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise InputError(f"depth={depth!r}: give the number of batches to copy ahead, 1 or more")
    if keep not in ("fresh", "ring"):
        raise InputError(f"keep={keep!r}: give 'fresh' for batches that may be kept, or 'ring'")
    if debug and keep != "ring":
        raise argument_conflict(f"debug=True with keep={keep!r}: only batches of keep='ring' become invalid")
    if transform is not None and not callable(transform):
        raise InputError(f"transform_on_device={transform!r:.80}: give a function of a batch, or None")
    if not hasattr(loader, "__iter__"):
        raise InputError(f"the loader is a {type(loader).__name__}, which cannot be iterated: give a data loader")
    if isinstance(loader, DevicePrefetcher) and loader.keep == "ring":
        raise argument_conflict(
            "the loader is a DevicePrefetcher with keep='ring', whose batches are overwritten too soon: give it 'fresh'"
        )


def _device(device: torch.device | str | int) -> torch.device:
    where = parse_device(device)
    if where.type not in ("cpu", "cuda"):  # CUDA devices are checked by the backend
        try:
            torch.empty(1, device=where)
        except Exception as error:
            raise device_unknown(
                f"device={str(device)!r}: PyTorch cannot use it here ({str(error).splitlines()[0]:.100}). Give "
                "device='cpu', or install a PyTorch that has it"
            ) from error
    return where
