"""The thread of a prefetcher: takes batches from the loader and sends them to the device."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from stallfree.device.backend import Backend, Stream
from stallfree.device.leaves import Rebuild, take_apart
from stallfree.device.staging import Place, Stager, memory_of

Transform = Callable[[Any], Any]
Snapshot = Callable[[], Any]
"""Gives the state of a loader as it was when the snapshot was taken."""

_END_SECONDS = 5.0  # for a thread to end with the program


@dataclass
class Item:
    """What comes out of the thread: a batch on its way, or an error; with neither, the end.

    Attributes:
        place: that the batch takes up.
        leaves, rebuild: what the batch is made of.
        memory: of the device, to be kept by whoever uses the batch.
        late: positions of leaves that are still to be sent.
        error: of the loader, in the place of a batch.
        snapshot: the state of the loader after this batch; None if it has none.
    """

    place: Place | None = None
    leaves: list[Any] = field(default_factory=list)
    rebuild: Rebuild | None = None
    memory: list[Any] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    error: BaseException | None = None
    snapshot: Snapshot | None = None


class Feeder:
    """Sends what `source` gives, a batch per free place, until that ends or `stop` is called.

    Nothing of it refers to whoever takes the items, so that the thread ends when nobody does.

    Args:
        source: of batches.
        snapshot: takes the state of the loader, called after each batch; None if it has none.
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
        self.ready: SimpleQueue[Item] = SimpleQueue()
        self.lock = threading.Lock()
        """Held while the loader works, and to be held by whoever else asks something of it."""
        self._free: SimpleQueue[Place | None] = SimpleQueue()
        for place in places:
            self._free.put(place)
        self._places = places
        self._snapshot, self._backend, self._stream, self._stager = snapshot, backend, stream, stager
        self._transform = transform
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(source,), name="stallfree-prefetch", daemon=True)
        end_at_exit(self)
        self._thread.start()

    def give_back(self, place: Place) -> None:
        """The place is free again."""
        self._free.put(place)

    def stop(self) -> None:
        """End after the batch that is under way. May be called twice, in any thread."""
        self._stopped = True
        self._free.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    def _run(self, source: Iterator[Any]) -> None:
        try:
            self._backend.bind()
            with self._backend.using(self._stream):
                while (place := self._free.get()) is not None and not self._stopped:
                    item = self._next(source, place)
                    self.ready.put(item)
                    if item.place is None:
                        break
                    del item
            for place in self._places:  # what copies read has to stay until they are done
                self._backend.finish(place.copied)
                place.held = None
        except BaseException as error:
            self.ready.put(Item(error=error))
        del source  # ends its workers, before whoever waits for this thread iterates the loader again
        self.ready.put(Item())

    def _next(self, source: Iterator[Any], place: Place) -> Item:
        for other in self._places:
            if other.held is not None and self._backend.reached(other.copied):
                other.held = None
        item = batch = None
        try:
            try:
                with self.lock:
                    batch = next(source)
            except StopIteration:
                return Item()
            except BaseException as error:
                item = Item(place, error=error)
            else:
                try:
                    item = self._send(batch, place)
                except BaseException as error:
                    item = Item(place, error=error)
            try:
                if self._snapshot is not None:
                    with self.lock:
                        item.snapshot = self._snapshot()
            except BaseException as error:
                item = Item(place, error=error)
            return item
        finally:
            del item, batch

    def _send(self, batch: Any, place: Place) -> Item:
        leaves, rebuild = take_apart(batch)
        try:
            sent = self._stager.send(place, leaves)
            item = Item(place, sent.leaves, rebuild, sent.memory, sent.late)
            if self._transform is not None and not sent.late:
                item.leaves, item.rebuild = take_apart(self._transform(rebuild(sent.leaves)))
                for leaf in item.leaves:
                    item.memory += memory_of(leaf)
        finally:
            self._backend.record(place.copied)
        return item


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def end_at_exit(feeder: Any) -> None:
    """`stop` and `join` it when the program ends."""
    _alive.add(feeder)


@atexit.register
def _end_all() -> None:
    """A thread that works with a device while the interpreter ends could crash it."""
    feeders = list(_alive)
    for feeder in feeders:
        feeder.stop()
    for feeder in feeders:
        feeder.join(_END_SECONDS)
