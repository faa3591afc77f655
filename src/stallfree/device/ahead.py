"""The prefetcher on a CPU: a thread takes the next batch from the loader while the model works with this one.

What draws random numbers must not run beside the model, which draws from the same generators of the process:

- Where stallfree seeds them for a sample, or watches them while a cache is filled, and restores them after it, the
  thread waits until the next batch is asked for.
- A loader that draws by itself is found by its first two batches, during which the model waits. The first one may draw
  the seed of a sampler. If both moved a generator, the whole pass goes without overlap.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stallfree.device.feeder import Snapshot, end_at_exit
from stallfree.errors import StallfreeError
from stallfree.frames import short_traceback
from stallfree.pipeline.generators import global_generators
from stallfree.pipeline.randomness import before_drawing

if TYPE_CHECKING:
    from stallfree.device.prefetcher import DevicePrefetcher

_WATCHED = 2
"""Batches by which a loader that draws random numbers is found."""


@dataclass
class Taken:
    """What the thread took from the loader.

    Attributes:
        batch: as the loader gave it.
        error: that the loader raised, in the place of a batch.
        end: whether the loader has ended.
        snapshot: the state of the loader after this batch; None if it has none.
    """

    batch: Any = None
    error: BaseException | None = None
    end: bool = False
    snapshot: Callable[[], Any] | None = None


class _Stopped(BaseException):
    """Ends the thread. Raised out of the loader if it is in there."""


class Ahead:
    """Takes batches from `source`, one ahead of the last that was taken here, until that ends or `stop` is called.

    Nothing of it refers to what calls `take`, so that the thread ends when that is gone.

    Args:
        source: of batches.
        snapshot: takes the state of the loader, called after each batch; None if it has none.
    """

    def __init__(self, source: Iterator[Any], snapshot: Callable[[], Snapshot] | None) -> None:
        self.lock = threading.Lock()
        """Held while the loader works, and to be held for whatever else is asked of it."""
        self._item: Taken | None = None  # what comes next; the thread goes on when it is None again
        self._there = threading.Event()  # set when there is an item
        self._waiting = False  # whether the training loop waits for an item
        self._wake: SimpleQueue[None] = SimpleQueue()  # for the thread to look again; may be put in a finaliser
        self._stopped = False
        self._snapshot = snapshot
        self._thread = threading.Thread(target=self._run, args=(source,), name="stallfree-prefetch", daemon=True)
        end_at_exit(self)
        self._thread.start()

    def take(self) -> Taken:
        """What comes next. Waits as long as the loader takes. May be called again after Ctrl-C at any point of it."""
        self._waiting = True
        self._wake.put(None)
        try:
            while (taken := self._item) is None:
                self._there.wait()
                self._there.clear()
        finally:
            self._waiting = False  # before the thread goes on
        if not taken.end:
            self._item = None
            self._wake.put(None)
        return taken

    def stop(self) -> None:
        """End after the batch that is under way. May be called twice, in any thread."""
        self._stopped = True
        self._wake.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self, source: Iterator[Any]) -> None:
        overlaps, batches = False, 0
        try:
            with before_drawing(self._let_draw):
                while True:
                    self._wait_until(lambda: self._item is None and (overlaps or self._waiting))  # noqa: B023
                    watched = not overlaps and batches < _WATCHED
                    before = _generators() if watched else None
                    taken = self._next(source)
                    if taken.end:
                        break
                    overlaps = overlaps or (watched and _generators() == before)
                    batches += 1
                    self._give(taken)
                    del taken  # or the thread keeps the batch as long as it waits
        except _Stopped:
            pass
        except BaseException as error:
            self._give(Taken(error=error))
        del source  # ends its workers, before whatever waits for this thread iterates the loader again
        with contextlib.suppress(_Stopped):
            self._wait_until(lambda: self._item is None)
        self._give(Taken(end=True))

    def _give(self, taken: Taken) -> None:
        self._item = taken
        self._there.set()

    def _next(self, source: Iterator[Any]) -> Taken:
        with self.lock:
            try:
                taken = Taken(next(source))
            except StopIteration:
                return Taken(end=True)
            except _Stopped:
                raise
            except BaseException as error:
                taken = Taken(error=error)
            try:
                taken.snapshot = None if self._snapshot is None else self._snapshot()
            except BaseException as error:
                taken = Taken(error=error)
        return taken

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


class HostIteration:
    """One pass on a CPU. Ends the thread when it is through, closed, or no longer referred to."""

    def __init__(self, prefetcher: DevicePrefetcher, ahead: Ahead) -> None:
        self._prefetcher, self._ahead = prefetcher, ahead
        self._owner = os.getpid()
        self._through = False
        self._count_wait: Callable[[float], object] = getattr(prefetcher.loader, "count_wait", lambda _: None)

    def __iter__(self) -> HostIteration:
        return self

    @short_traceback
    def __next__(self) -> Any:
        if self._through:
            raise StopIteration
        if os.getpid() != self._owner:
            raise StallfreeError(
                "this iteration over a DevicePrefetcher was begun in the parent process, whose thread is not in this "
                "one: begin a new iteration here"
            )
        begun = time.monotonic()
        taken = self._ahead.take()
        self._count_wait(time.monotonic() - begun)
        if taken.snapshot is not None:
            self._prefetcher._consumed = taken.snapshot
        if taken.end:
            self._prefetcher._consumed = None
            self._through = True
            raise StopIteration
        if taken.error is not None:
            try:
                raise taken.error
            finally:
                del taken  # or the traceback, which refers to this frame, would be referred to by it
        transform = self._prefetcher.transform_on_device
        try:
            return taken.batch if transform is None else transform(taken.batch)
        except StopIteration as error:  # would end the loop as if all were well
            raise StallfreeError(
                "a batch could not be given: transform_on_device raised StopIteration. Let it raise another error"
            ) from error

    def close(self) -> None:
        """End this pass. May be called twice."""
        self._through = True
        self._ahead.stop()

    def __del__(self) -> None:
        self.close()


def _generators() -> list[Any]:
    """The states of the generators that are global to the process, as what can be compared."""
    return [_comparable(handle.get()) for handle in global_generators()]


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, torch.Tensor)) else state
