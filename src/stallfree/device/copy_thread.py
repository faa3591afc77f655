"""The threads of a prefetcher: `CopyThread` copies the loader's batches to the device, `HostThread` reads one ahead.

Both fetch the next batches while the model works with the current one. Code that draws random numbers must not run
concurrently with the model, which draws from the same process-wide generators:

- stallfree seeds the generators for a sample, or watches them while a cache is filled, and restores them afterwards.
  Before it does so, the thread waits until the training loop waits for that batch.
- A loader that draws random numbers itself is detected by its first two batches, during which the model waits. The
  first one may draw the seed of a sampler. If both changed a generator, the whole pass runs without overlap.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from stallfree.device.backend import Backend, Stream
from stallfree.device.pytree import Rebuild, prepared_here, take_apart
from stallfree.device.staging import Place, Stager, memory_of
from stallfree.pipeline.global_draws import GlobalDraws
from stallfree.pipeline.randomness import before_drawing

Transform = Callable[[Any], Any]
Snapshot = Callable[[], Any]
"""Returns the state of a loader at the time of the snapshot."""

_WATCHED = 2
"""Number of batches used to detect a loader that draws random numbers."""

_END_SECONDS = 5.0  # for a thread to end at interpreter exit


@dataclass
class Item:
    """An item from the loader: a batch, an error in its place, or the end.

    Attributes:
        batch: the loader's batch, or None if it is being copied to the device.
        error: raised by the loader, or while the batch was being sent.
        end: whether the loader has ended.
        snapshot: state of the loader after this item; None if it has no state.
        place: the place that holds a batch in flight.
        leaves, rebuild: the parts of the batch, see `take_apart`.
        memory: device memory that must stay alive while the batch is used.
        late: positions of leaves that are still to be sent.
    """

    batch: Any = None
    error: BaseException | None = None
    end: bool = False
    snapshot: Snapshot | None = None
    place: Place | None = None
    leaves: list[Any] = field(default_factory=list)
    rebuild: Rebuild | None = None
    memory: list[Any] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


class _Stopped(BaseException):
    """Ends the thread. Raised inside the loader if the thread is running it."""


class Mailbox:
    """Items from a thread for the training loop, in order. An item stays until it is removed."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrived: SimpleQueue[None] = SimpleQueue()

    def put(self, item: Item) -> None:
        """Append an item."""
        self._items.append(item)
        if self._arrived.empty():
            self._arrived.put(None)

    def first(self) -> Item:
        """Return the first item; blocks until there is one."""
        while not self._items:
            self._arrived.get()
        return self._items[0]

    def remove_first(self) -> None:
        """Remove the first item."""
        self._items.popleft()

    @property
    def empty(self) -> bool:
        """Whether there is no item."""
        return not self._items


class LoaderThread(ABC):
    """Takes batches from `source` until it ends or `stop` is called.

    It holds no reference to the consumer of the items, so that the thread ends once the consumer is freed.

    Args:
        source: iterator of batches.
        snapshot: called after each batch, takes the state of the loader; None if it has no state.

    Attributes:
        lock: held while the loader runs; required for any other use of the loader.
    """

    def __init__(self, source: Iterator[Any], snapshot: Callable[[], Snapshot] | None) -> None:
        self.lock = threading.Lock()
        self._ready = Mailbox()
        self._waiting = False  # whether the training loop waits for an item; False before an item is removed
        self._stopped = False
        self._wakes: SimpleQueue[None] = SimpleQueue()  # wakes the thread; finalisers may put
        self._draws, self._overlaps, self._batches = GlobalDraws(), False, 0
        self._snapshot = snapshot
        self._thread = threading.Thread(target=self._run, args=(source,), name="stallfree-prefetch", daemon=True)
        _alive.add(self)
        self._thread.start()

    def take(self) -> Item:
        """Return the next item; blocks until the loader delivers it. Can be called again after Ctrl-C."""
        self._waiting = True
        self._wake()
        try:
            item = self._ready.first()
        finally:
            self._waiting = False  # before the thread continues
        if not item.end:
            self._ready.remove_first()
            self._wake()
        return item

    def stop(self) -> None:
        """End after the current batch. Idempotent, callable in any thread."""
        self._stopped = True
        self._wake()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, at most `seconds`."""
        self._thread.join(seconds)

    @abstractmethod
    def _run(self, source: Iterator[Any]) -> None:
        """The body of the thread. Drops `source` before it delivers the end, so that the loader can be reused."""

    def _next(self, source: Iterator[Any], make: Callable[[Any], Item]) -> Item:
        """Return the next item, made by `make` from the loader's batch.

        Waits until the training loop waits for it, unless the loader was seen to draw no random numbers.
        """
        if not self._overlaps:
            self._let_loop_wait()
        watched = not self._overlaps and self._batches < _WATCHED
        if watched:
            self._draws.mark()
        item = self._take_from(source, make)
        try:
            if not item.end:
                self._overlaps = self._overlaps or (watched and not self._draws.moved())
                self._batches += 1
            return item
        finally:
            del item  # see `_take_from`

    def _take_from(self, source: Iterator[Any], make: Callable[[Any], Item]) -> Item:
        item = batch = None
        try:
            try:
                with self.lock:
                    batch = next(source)
            except StopIteration:
                return Item(end=True)
            except _Stopped:
                raise
            except BaseException as error:
                item = Item(error=error)
            else:
                try:
                    item = make(batch)
                except BaseException as error:
                    item = Item(error=error)
            try:
                if self._snapshot is not None:
                    with self.lock:
                        item.snapshot = self._snapshot()
            except BaseException as error:
                item = Item(error=error)
            return item
        finally:
            del item, batch  # breaks the reference cycle of an error's traceback with this frame

    def _let_draw(self) -> None:
        """Return once the training loop waits for the batch being prepared."""
        self.lock.release()  # the training loop may read the loader's state meanwhile
        try:
            self._let_loop_wait()
        finally:
            self.lock.acquire()

    def _let_loop_wait(self) -> None:
        # Evaluated in this order: only this thread puts items, and the loop stops waiting before it removes one.
        self._wait_until(lambda: self._ready.empty and self._waiting)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not (self._stopped or ready()):
            self._wakes.get()
        if self._stopped:
            raise _Stopped

    def _wake(self) -> None:
        """Make the thread evaluate again what it waits for."""
        if self._wakes.empty():  # or it will be evaluated after the one that is there
            self._wakes.put(None)


class CopyThread(LoaderThread):
    """Copies batches to a device, one per free place.

    Args:
        source, snapshot: see `LoaderThread`.
        backend: the device.
        stream: stream of the copies.
        stager: copies the leaves of a batch.
        places: the free places.
        transform: called with each batch on the device, or None.
    """

    def __init__(
        self,
        source: Iterator[Any],
        snapshot: Callable[[], Snapshot] | None,
        backend: Backend,
        stream: Stream,
        stager: Stager,
        places: list[Place],
        transform: Transform | None,
    ) -> None:
        self._free: SimpleQueue[Place | None] = SimpleQueue()
        for place in places:
            self._free.put(place)
        self._places, self._transform = places, transform
        self._backend, self._stream, self._stager = backend, stream, stager
        super().__init__(source, snapshot)

    def give_back(self, place: Place) -> None:
        """Mark the place as free."""
        self._free.put(place)

    def stop(self) -> None:
        """See `LoaderThread`."""
        super().stop()
        self._free.put(None)

    def _run(self, source: Iterator[Any]) -> None:
        try:
            self._backend.bind()
            with self._backend.using(self._stream), before_drawing(self._let_draw), contextlib.suppress(_Stopped):
                while (place := self._free.get()) is not None and not self._stopped:
                    for other in self._places:
                        if other.held is not None and self._backend.reached(other.copied):
                            other.held = None
                    item = self._next(source, partial(self._send, place))
                    if item.end:
                        break
                    item.place = place
                    self._ready.put(item)
                    del item
            for place in self._places:  # sources must stay alive until the copies are done
                self._backend.finish(place.copied)
                place.held = None
        except BaseException as error:
            self._ready.put(Item(error=error))
        del source
        self._ready.put(Item(end=True))

    def _send(self, place: Place, batch: Any) -> Item:
        leaves, rebuild = take_apart(batch)
        try:
            sent = self._stager.send(place, leaves)
            item = Item(leaves=sent.leaves, rebuild=rebuild, memory=sent.memory, late=sent.late)
            if self._transform is not None and not sent.late:
                item.leaves, item.rebuild = take_apart(self._transform(rebuild(sent.leaves)))
                for leaf in item.leaves:
                    item.memory += memory_of(leaf)
        finally:
            self._backend.record(place.copied)
        return item


class HostThread(LoaderThread):
    """Takes batches unchanged, one ahead of the last one consumed."""

    def _run(self, source: Iterator[Any]) -> None:
        try:
            with before_drawing(self._let_draw):
                while True:
                    self._wait_until(lambda: self._ready.empty)
                    item = self._next(source, lambda batch: Item(prepared_here(batch)))
                    if item.end:
                        break
                    self._ready.put(item)
                    del item  # or the thread keeps the batch alive while it waits
        except _Stopped:
            pass
        except BaseException as error:
            self._ready.put(Item(error=error))
        del source
        self._ready.put(Item(end=True))


_alive: weakref.WeakSet[LoaderThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Stop the threads: one that uses a device during interpreter shutdown could crash the process."""
    threads = list(_alive)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(_END_SECONDS)
