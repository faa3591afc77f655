"""`DevicePrefetcher`: copies the next batches to the device while the model works with the current one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, overload

import numpy as np
import numpy.typing as npt

from stallfree.device.ahead import Copier, Item, LoaderThread, Snapshot, Transform
from stallfree.device.backend import Cuda, Device, Stream, find_backend, parse_device
from stallfree.device.staging import Place, Stager, send_itself
from stallfree.errors import InputError, iteration_over, stop_iteration
from stallfree.ipc.forked import Owner
from stallfree.pytree import take_apart
from stallfree.typevars import BatchT_co, T


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
    prefetcher: code that draws in this process, not in a worker, runs when the next batch is requested.

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
        _check(loader, depth, transform_on_device)
        self.loader, self.depth, self.transform_on_device = loader, depth, transform_on_device
        self.device = parse_device(device)
        self._backend = find_backend(self.device)
        if self._backend is not None:
            self.device = self._backend.device
            self._stager = Stager(self._backend)
        self._stream: Stream | None = None
        self._begin_here()

    def _begin_here(self) -> None:
        """Set what belongs to this process: a forked child inherits no threads."""
        self._owner = Owner()
        self.pin = Pin(self._backend)
        self._lock = threading.Lock()  # held while the loader runs, in whichever iteration
        self._iterations: weakref.WeakSet[_Iteration] = weakref.WeakSet()
        self._latest: weakref.ref[_Iteration] | None = None
        self._threads: list[tuple[LoaderThread, list[Place]]] = []  # with the places that they use
        self._unused: list[list[Place]] = []
        self._consumed: Snapshot | None = None  # the state of the loader after the last batch of the latest iteration

    def __reduce__(self) -> Any:
        make = partial(type(self), transform_on_device=self.transform_on_device)
        return make, (self.loader, self.device, self.depth)

    def __repr__(self) -> str:
        return f"DevicePrefetcher({self.loader!r:.200}, {str(self.device)!r}, depth={self.depth})"

    def __len__(self) -> int:
        """Number of batches per epoch, as reported by the loader."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[BatchT_co]:
        if not self._owner.is_here:
            self._begin_here()
        self._join_stopped()
        loader: Any = self.loader
        with self._lock:
            source = loader.prefetched_by(self) if hasattr(loader, "prefetched_by") else iter(loader)
            snapshot = _snapshots(loader)
            self._consumed = None if snapshot is None else snapshot()
        copier = self._copier()
        thread = LoaderThread(source, snapshot, self._lock, copier)
        self._threads.append((thread, [] if copier is None else copier.places))
        iteration = _Iteration(self, thread)
        self._iterations.add(iteration)
        self._latest = weakref.ref(iteration)
        return iteration

    def _copier(self) -> Copier | None:
        """Return what copies the batches of an iteration; None for a device without streams."""
        backend = self._backend
        if backend is None:
            return None
        if self._stream is None:
            self._stream = backend.new_stream()
        if not self._unused:
            self._unused.append([Place(backend.new_event(), backend.new_event()) for _ in range(self.depth + 1)])
            self.pin.places += self._unused[-1]
        return Copier(backend, self._stream, self._stager, self._unused.pop(), self.transform_on_device)

    def _join_stopped(self) -> None:
        """Wait for the threads of ended iterations, whose places serve the next one."""
        for thread, places in [each for each in self._threads if each[0].stopped]:
            thread.join()
            self._threads.remove((thread, places))
            if places:
                self._unused.append(places)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """Return the loader's state as of the last batch yielded here.

        Raises `InputError` if the loader has no state.
        """
        self._need("state_dict")
        loader: Any = self.loader
        return loader.state_dict() if self._consumed is None else self._state_of(self._consumed)

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
        self._need("load_state_dict")
        self.close()
        self._consumed = None
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _need(self, name: str) -> None:
        if not hasattr(self.loader, name):
            raise InputError(
                f"the loader, a {type(self.loader).__name__}, has no {name}(): give one that has, such as DataLoader"
            )

    def consumed(self, iteration: _Iteration, snapshot: Snapshot | None) -> None:
        """Keep the state after what `iteration` has yielded, if it is the latest one."""
        if self._latest is not None and self._latest() is iteration:
            self._consumed = snapshot

    def close(self) -> None:
        """End all iterations and wait for their threads.

        The prefetcher can be iterated again.
        """
        if self._owner.is_here:
            for iteration in list(self._iterations):
                iteration.close()
            self._join_stopped()


class Pin:
    """Pins host memory, so that the device copies from it directly. A loader may keep it: it does not refer to one.

    Attributes:
        places: whose copies may read that memory.
    """

    def __init__(self, backend: Cuda | None) -> None:
        self._backend, self._owner = backend, Owner()
        self.places: list[Place] = []

    def __call__(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        """Pin memory; returns the function that unpins it, once the copies are done.

        In a forked child, which has no device, both do nothing.
        """
        backend = self._backend
        if backend is None or not self._owner.is_here:
            return _do_nothing
        undo = backend.pin(memory)

        def finish_and_undo() -> None:
            if self._owner.is_here:
                for place in self.places:
                    backend.finish(place.copied)
                undo()

        return finish_and_undo


class _Iteration(Iterator[Any]):
    """One pass. Ends its thread when it is exhausted, closed or no longer referenced."""

    def __init__(self, prefetcher: DevicePrefetcher[Any], thread: LoaderThread) -> None:
        self._prefetcher, self.thread = prefetcher, thread
        self._owner = Owner()
        self._ended = False
        self._taken: Item | None = None  # the last item
        self._count_wait: Callable[[float], object] = getattr(prefetcher.loader, "count_wait", _do_nothing)

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
        self._taken = item
        self._count_wait(time.monotonic() - begun)
        if item.snapshot is not None or item.end:
            self._prefetcher.consumed(self, item.snapshot)
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
        prefetcher, backend = self._prefetcher, self._prefetcher._backend
        transform = prefetcher.transform_on_device
        if backend is None:
            batch, item.batch = item.batch, None
            if prefetcher.device.type != "cpu":
                leaves, rebuild = take_apart(batch)
                batch = rebuild([send_itself(leaf, prefetcher.device) for leaf in leaves])
            return batch if transform is None else transform(batch)
        sent, item.sent = item.sent, None
        assert sent is not None
        assert item.rebuild is not None
        assert item.place is not None
        backend.wait(item.place.copied)
        for memory in sent.memory:
            backend.keep(memory)
        for at in sent.late:
            sent.leaves[at] = send_itself(sent.leaves[at], backend.device)
        batch = item.rebuild(sent.leaves)
        return transform(batch) if sent.late and transform is not None else batch

    def _release_batch(self) -> None:
        """Release the batch yielded last: work submitted to the device from now on does not use it."""
        item, backend = self._taken, self._prefetcher._backend
        if item is None:
            return
        if backend is not None and item.place is not None:
            backend.record(item.place.used)
        self.thread.remove(item)
        self._taken = None

    def close(self) -> None:
        """End this pass. Idempotent."""
        self._ended = True
        if self._owner.is_here:
            self._release_batch()
        self.thread.stop()

    def __del__(self) -> None:
        self.close()


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


def _check(loader: Any, depth: Any, transform: Any) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise InputError(f"depth={depth!r}: give the number of batches to copy ahead, 1 or more")
    if transform is not None and not callable(transform):
        raise InputError(f"transform_on_device={transform!r:.80}: give a function of a batch, or None")
    if not hasattr(loader, "__iter__"):
        raise InputError(f"the loader is a {type(loader).__name__}, which cannot be iterated: give a data loader")
