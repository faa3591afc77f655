"""The thread of an iteration: takes batches from the loader, ahead of the training loop, and sends them to the device.

The items are in one list. The thread appends them; the loop takes the first that was not taken, and removes it with its
next request. So an item that was not removed is not lost when Ctrl-C ends a wait.

Code that draws random numbers must not run concurrently with the model, which draws from the same process-wide
generators:

- stallfree seeds the generators for a sample, or watches them while a cache is filled, and restores them afterwards.
  Before it does so, the thread waits until the training loop waits for that batch.
- A loader that draws random numbers itself is detected by its first two batches, during which the model waits. The
  first one may draw the seed of a sampler. If both changed a generator, the whole pass runs without overlap.
"""

import atexit
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from stallfree.device.copies import Copier
from stallfree.pipeline.randomness import States, before_drawing
from stallfree.pytree import prepared_here

Snapshot = Callable[[], Any]
"""Returns the state of a loader at the time of the snapshot."""

TakeSnapshot = Callable[[], Snapshot]

_WATCHED = 2
"""Number of batches used to detect a loader that draws random numbers."""

_END_SECONDS = 5.0  # for a thread to end


@dataclass(eq=False)
class Item:
    """An item from the loader: a batch, an error in its place, or the end.

    Attributes:
        batch: the batch; on a device with streams, what `Copier.send` returned for it.
        error: raised by the loader, or while the batch was being sent.
        end: whether the loader has ended.
        snapshot: state of the loader after this item; None if it has no state.
        taken: whether the training loop has taken it.
    """

    batch: Any = None
    error: BaseException | None = None
    end: bool = False
    snapshot: Snapshot | None = None
    taken: bool = False


class Items:
    """The items of an iteration, from its thread to the training loop, in order."""

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

    def remove(self, item: Item) -> None:
        """Remove an item that was taken, if it is still there."""
        if self._items and self._items[0] is item:
            self._items.popleft()

    def has_capacity(self, limit: int) -> bool:
        """Whether there are less than `limit` items, with one that was taken and not removed."""
        return len(self._items) < limit

    @property
    def all_taken(self) -> bool:
        """Whether the training loop has taken all items."""
        return all(item.taken for item in list(self._items))


class _Stopped(BaseException):
    """Ends the thread. Raised inside the loader if the thread is running it."""


class LoaderThread:
    """Takes batches from `source` until it ends or `stop` is called.

    It holds no reference to the consumer of the items, so that the thread ends once the consumer is freed. Without a
    `copier`, it is one batch ahead.

    Args:
        source: iterator of batches.
        snapshot: called after each batch, takes the state of the loader; None if it has no state.
        lock: held while the loader runs; required for any other use of the loader.
        copier: sends the batches to the device; None to pass them on.

    Attributes:
        copier: as given.
        stopped: whether the thread ends, or has ended.
    """

    def __init__(
        self, source: Iterator[Any], snapshot: TakeSnapshot | None, lock: threading.Lock, copier: Copier | None
    ) -> None:
        self._source, self._snapshot, self._lock, self.copier = source, snapshot, lock, copier
        self._items = Items()
        self._waiting = False  # whether the training loop waits for an item; False before it marks one as taken
        self.stopped = False
        self._wakes: SimpleQueue[None] = SimpleQueue()  # wakes the thread; finalisers may put
        self._draws, self._overlaps = States(), False  # whether the loader was seen to draw nothing
        self._thread = threading.Thread(target=self._run, name="stallfree-prefetch", daemon=True)
        _alive.add(self)
        self._thread.start()

    # -- for the training loop ----------------------------------------------------------------------------------------

    def take(self) -> Item:
        """Return the next item; blocks until the loader delivers it. Can be called again after Ctrl-C."""
        self._waiting = True
        self._wake()
        try:
            item = self._items.first()
        finally:
            self._waiting = False  # before the thread continues
        item.taken = not item.end
        self._wake()
        return item

    def remove(self, item: Item) -> None:
        """Remove the item that was taken last: work submitted from now on does not use it. Idempotent."""
        if self.copier is not None:
            self.copier.release()
        self._items.remove(item)
        self._wake()

    def stop(self) -> None:
        """End after the current batch. Idempotent, callable in any thread."""
        self.stopped = True
        self._wake()

    def join(self) -> bool:
        """Wait until the thread has ended, for 5 s at most; return whether it has."""
        self._thread.join(_END_SECONDS)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        """Make the thread evaluate again what it waits for."""
        if self._wakes.empty():  # or it will be evaluated after the one that is there
            self._wakes.put(None)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Drops the source before it delivers the end, so that the loader can be reused, and is waited for at exit."""
        copier = self.copier
        try:
            if copier is None:
                self._take_all()
            else:
                copier.backend.bind()
                with copier.backend.using(copier.stream):
                    self._take_all()
                copier.drop_copied(wait=True)
        except BaseException as error:
            self._items.put(Item(error=error))
        del self._source
        self._items.put(Item(end=True))

    def _take_all(self) -> None:
        with before_drawing(self._let_draw), contextlib.suppress(_Stopped):
            for number in itertools.count():
                self._wait_until(self._has_capacity)
                if self.copier is not None:
                    self.copier.drop_copied()
                watched = not self._overlaps and number < _WATCHED
                if not self._overlaps:
                    self._let_loop_wait()
                if watched:
                    self._draws.moved()
                item = self._next()
                if item.end:
                    break
                self._overlaps = self._overlaps or (watched and not self._draws.moved())
                self._items.put(item)
                del item  # or the thread keeps the batch alive while it waits

    def _has_capacity(self) -> bool:
        return self._items.all_taken if self.copier is None else self._items.has_capacity(len(self.copier.buffers))

    def _next(self) -> Item:
        """Return the next item of the loader, whose batch is sent to the device."""
        item = batch = None
        try:
            try:
                with self._lock:
                    batch = next(self._source)
            except StopIteration:
                return Item(end=True)
            except _Stopped:
                raise
            except BaseException as error:
                item = Item(error=error)
            try:
                if item is None:
                    item = Item(prepared_here(batch) if self.copier is None else self.copier.send(batch))
                if self._snapshot is not None:
                    with self._lock:
                        item.snapshot = self._snapshot()
            except BaseException as error:
                item = Item(error=error)
            return item
        finally:
            del item, batch  # breaks the reference cycle of an error's traceback with this frame

    def _let_draw(self) -> None:
        """Return once the training loop waits for the batch being prepared."""
        self._lock.release()  # the training loop may read the loader's state meanwhile
        try:
            self._let_loop_wait()
        finally:
            self._lock.acquire()

    def _let_loop_wait(self) -> None:
        # Evaluated in this order: only this thread puts items, and the loop stops waiting before it takes one.
        self._wait_until(lambda: self._items.all_taken and self._waiting)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not (self.stopped or ready()):
            self._wakes.get()
        if self.stopped:
            raise _Stopped


_alive: weakref.WeakSet[LoaderThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Stop the threads: one that uses a device during interpreter shutdown could crash the process."""
    threads = list(_alive)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()
