"""The thread of a prefetcher: takes batches from the loader, and sends them to the device.

On a CPU it takes the next batch while the model works with this one. What draws random numbers must not run beside the
model, which draws from the same generators of the process:

- Where stallfree seeds them for a sample, or watches them while a cache is filled, and restores them after it, the
  thread waits until the next batch is asked for.
- A loader that draws by itself is found by its first two batches, during which the model waits. The first one may draw
  the seed of a sampler. If both moved a generator, the whole pass goes without overlap.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from stallfree.device.backend import Backend, Stream
from stallfree.device.pytree import Rebuild, take_apart
from stallfree.device.staging import Place, Stager, memory_of
from stallfree.pipeline.generators import global_generators
from stallfree.pipeline.randomness import before_drawing

Transform = Callable[[Any], Any]
Snapshot = Callable[[], Any]
"""Gives the state of a loader as it was when the snapshot was taken."""

_WATCHED = 2
"""Batches by which a loader that draws random numbers is found."""

_END_SECONDS = 5.0  # for a thread to end with the program


@dataclass
class Item:
    """What the thread took from the loader: a batch, an error in its place, or the end.

    Attributes:
        batch: as the loader gave it, or None if it is on its way to the device.
        error: that the loader raised, or that came up when the batch was sent.
        end: whether the loader has ended.
        snapshot: the state of the loader after this item; None if it has none.
        place: that a batch on its way takes up.
        leaves, rebuild: what it consists of.
        memory: of the device, to be kept by what uses the batch.
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
    """Ends the thread. Raised out of the loader if it is in there."""


class LoaderThread(ABC):
    """Takes batches from `source` until that ends or `stop` is called.

    It does not refer to what takes the items, so that the thread ends when that is gone.

    Args:
        source: of batches.
        snapshot: takes the state of the loader, called after each batch; None if it has none.

    Attributes:
        lock: held while the loader works, and to be held for whatever else is asked of it.
    """

    def __init__(self, source: Iterator[Any], snapshot: Callable[[], Snapshot] | None) -> None:
        self.lock = threading.Lock()
        self._stopped = False
        self._snapshot = snapshot
        self._thread = threading.Thread(target=self._run, args=(source,), name="stallfree-prefetch", daemon=True)
        _alive.add(self)
        self._thread.start()

    @abstractmethod
    def take(self) -> Item:
        """The next item. Waits as long as the loader takes."""

    @abstractmethod
    def stop(self) -> None:
        """End after the batch that is under way. May be called twice, in any thread."""

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    @abstractmethod
    def _run(self, source: Iterator[Any]) -> None:
        """The life of the thread. Lets go of `source` before it gives the end, which may let it be iterated again."""

    def _next(self, source: Iterator[Any], make: Callable[[Any], Item]) -> Item:
        """The next item; a batch is what `make` returns for it."""
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
            del item, batch  # or an error's traceback, which refers to this frame, would refer to itself


class CopyThread(LoaderThread):
    """Copies batches to a device, one per free place.

    Args:
        source, snapshot: see `LoaderThread`.
        backend: of the device.
        stream: for the copies.
        stager: sends.
        places: that are free.
        transform: is called with each batch on the device, or None.
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
        self._ready: SimpleQueue[Item] = SimpleQueue()
        self._free: SimpleQueue[Place | None] = SimpleQueue()
        for place in places:
            self._free.put(place)
        self._places, self._transform = places, transform
        self._backend, self._stream, self._stager = backend, stream, stager
        super().__init__(source, snapshot)

    def take(self) -> Item:
        """See `LoaderThread`."""
        return self._ready.get()

    def give_back(self, place: Place) -> None:
        """The place is free again."""
        self._free.put(place)

    def stop(self) -> None:
        """See `LoaderThread`."""
        self._stopped = True
        self._free.put(None)

    def _run(self, source: Iterator[Any]) -> None:
        try:
            self._backend.bind()
            with self._backend.using(self._stream):
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
            for place in self._places:  # what copies read has to stay until they are done
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
    """Takes batches as they are, one ahead of the last that was taken here."""

    def __init__(self, source: Iterator[Any], snapshot: Callable[[], Snapshot] | None) -> None:
        self._item: Item | None = None  # what comes next; the thread goes on when it is None again
        self._there = threading.Event()  # set when there is an item
        self._waiting = False  # whether the training loop waits for an item
        self._wake: SimpleQueue[None] = SimpleQueue()  # for the thread to look again; may be put in a finaliser
        super().__init__(source, snapshot)

    def take(self) -> Item:
        """See `LoaderThread`. May be called again after Ctrl-C at any point of it."""
        self._waiting = True
        self._wake.put(None)
        try:
            while (item := self._item) is None:
                self._there.wait()
                self._there.clear()
        finally:
            self._waiting = False  # before the thread goes on
        if not item.end:
            self._item = None
            self._wake.put(None)
        return item

    def stop(self) -> None:
        """See `LoaderThread`."""
        self._stopped = True
        self._wake.put(None)

    def _run(self, source: Iterator[Any]) -> None:
        overlaps, batches = False, 0
        try:
            with before_drawing(self._let_draw):
                while True:
                    self._wait_until(lambda: self._item is None and (overlaps or self._waiting))  # noqa: B023
                    watched = not overlaps and batches < _WATCHED
                    before = _generators() if watched else None
                    item = self._next(source, Item)
                    if item.end:
                        break
                    overlaps = overlaps or (watched and _generators() == before)
                    batches += 1
                    self._give(item)
                    del item  # or the thread keeps the batch as long as it waits
        except _Stopped:
            pass
        except BaseException as error:
            self._give(Item(error=error))
        del source
        with contextlib.suppress(_Stopped):
            self._wait_until(lambda: self._item is None)
        self._give(Item(end=True))

    def _give(self, item: Item) -> None:
        self._item = item
        self._there.set()

    def _let_draw(self) -> None:
        """Return when the model waits for the batch that is being made."""
        self.lock.release()  # the training loop may ask for the state of the loader meanwhile
        try:
            self._wait_until(lambda: self._waiting)
        finally:
            self.lock.acquire()

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not (self._stopped or ready()):
            self._wake.get()
        if self._stopped:
            raise _Stopped


def _generators() -> list[Any]:
    """The states of the generators that are global to the process, as what can be compared."""
    return [_comparable(handle.get()) for handle in global_generators()]


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, torch.Tensor)) else state


_alive: weakref.WeakSet[LoaderThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that works with a device while the interpreter ends could crash it."""
    threads = list(_alive)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(_END_SECONDS)
