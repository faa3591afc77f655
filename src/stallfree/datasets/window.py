"""The window of a Smart Cache: the samples of each epoch, and the processes that prepare those which join it.

The passes over the samples form one infinite sequence. A window is N consecutive places of it; when it moves by n
places, the first n samples leave and n new ones join. This is the Smart Cache of NVIDIA's Clara Train SDK, which
MONAI's `SmartCacheDataset` continues.
"""

import enum
import math
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch

from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.epoch_source import Ids, check_state
from stallfree.datasets.reader import Reader
from stallfree.errors import StallfreeError, WaitError, state_mismatch, window_late
from stallfree.ipc.locks import FileLock
from stallfree.ipc.process import Child, Owner, Parent, context_of, end_all
from stallfree.ipc.shared_array import SharedCounts, shared_array
from stallfree.platform import how_it_ended
from stallfree.raising import log

_WAIT_SECONDS, _CHECK_SECONDS = 300.0, 0.005
_LOCK_SECONDS = 10.0
_LOOK_SECONDS, _STOP_SECONDS = 0.01, 5.0
_LIVES = 3
_CHUNK = 8
"""Samples that a fill process fetches concurrently."""

_VERSION = 1
_HEADER = 24
_MASK = 2**64 - 1


@dataclass(frozen=True)
class WindowPlan:
    """All windows that a Smart Cache may have: the same in every process.

    Attributes:
        samples: number of samples of the data set.
        size: samples in the window.
        replace: samples that leave and join when the window moves by one epoch, if all are ready.
        seed: of the order.
        shuffle: the order is random; otherwise it is that of the ids.
        part: `(k, n)`: the k-th of n parts of the samples, for host k of n. Parts do not depend on the seed, so that
            hosts with different seeds lose no sample.
    """

    samples: int
    size: int
    replace: int
    seed: int = 0
    shuffle: bool = True
    part: tuple[int, int] = (0, 1)

    @property
    def total(self) -> int:
        """Number of samples of this part."""
        return len(range(self.part[0], self.samples, self.part[1]))

    @cached_property
    def order(self) -> Ids:
        """The ids of one pass."""
        ids = np.arange(self.samples)
        if self.shuffle and self.part[1] > 1:
            ids = _permuted(ids, 0)
        ids = ids[self.part[0] :: self.part[1]]
        return _permuted(ids, self.seed) if self.shuffle else ids

    def sequence(self, start: int, end: int) -> Ids:
        """Return the ids at the places `start` to `end` - 1 of the infinite sequence."""
        return self.order[np.arange(start, end) % self.total]

    def ids(self, start: int, positions: Any) -> Ids:
        """Return the ids at `positions` of the window that begins at place `start`.

        A sample keeps its position while it is in the window; a new one takes the position of one that left.
        """
        ids: Ids = self.order[(start + (positions - start) % self.size) % self.total]
        return ids

    def window(self, start: int) -> Ids:
        """Return the ids of the window that begins at place `start`, by position."""
        return self.ids(start, np.arange(self.size))


def replace_count(size: int, rate: float, total: int) -> int:
    """Return the samples replaced per epoch: ceil(size * rate), but at most the number outside the window."""
    return min(math.ceil(round(size * rate, 9)), total - size)


def _permuted(ids: Ids, seed: int) -> Ids:
    sequence = np.random.SeedSequence([seed & _MASK, 0x57494E44, 0])
    return np.random.Generator(np.random.PCG64(sequence)).permutation(ids)


class Field(enum.IntEnum):
    """Places of the numbers that the processes of a host share."""

    EPOCHS = 0  # 1 + the newest epoch
    LATE = 1  # epochs that began with fewer new samples than planned, or waited for them
    WAITED = 2  # nanoseconds that epochs waited for new samples
    SKIPPED = 3  # samples left out because of an error
    SEED = 4  # of the order, modulo 2**64
    SEEDED = 5  # whether it is set
    STARTS = 8  # (1 + epoch, start) of the newest windows


class Window:
    """The window of one Smart Cache, shared by all processes of a host through an array in the folder of the cache.

    The array changes under the lock of a file there, except for single stores: the positions asked for, and failures.

    Args:
        cache: of the samples; its fingerprint contains the plan.
        plan: the plan. The first process decides its seed for all.
        on_late: "wait": an epoch waits for samples that are not ready; "partial": it begins without them.

    Attributes:
        header: the numbers by `Field`.
        failed: per id, 1 + the place at which it could not be prepared or stored, so that no process waits for it.
    """

    def __init__(self, cache: SampleCache, plan: WindowPlan, on_late: str) -> None:
        self.cache, self.on_late, self._plan = cache, on_late, plan
        self._begun = SharedCounts(1)
        self._attach()
        with self._hold():
            if not self.header[Field.SEEDED]:
                self._set_seed(plan.seed)

    def _attach(self) -> None:
        plan, folder = self._plan, self.cache.path
        shared = shared_array(folder / "window", np.int64, _HEADER + plan.size + plan.samples, required=True)
        self.header, self._asked, self.failed = np.split(shared, [_HEADER, _HEADER + plan.size])
        self._starts = self.header[Field.STARTS :].reshape(-1, 2)
        self._lock = FileLock(folder / "window-lock")
        weakref.finalize(self, self._lock.close)

    def _hold(self) -> Any:
        return self._lock.hold(_LOCK_SECONDS, "moving the window of a Smart Cache")

    def _set_seed(self, seed: int) -> None:
        self.header[Field.SEED] = np.uint64(seed & _MASK).astype(np.int64)
        self.header[Field.SEEDED] = 1

    @property
    def plan(self) -> WindowPlan:
        """The plan, with the seed that all processes use."""
        seed = int(self.header[Field.SEED])
        if seed != self._plan.seed:
            self._plan = replace(self._plan, seed=seed)
        return self._plan

    @property
    def epoch(self) -> int:
        """The newest epoch; -1 before the first."""
        return int(self.header[Field.EPOCHS]) - 1

    def start(self, epoch: int) -> int:
        """Return the place at which the window of `epoch` begins.

        Of an epoch that is not one of the newest, it is where it would be if no sample was ever late.
        """
        known = self._known_start(epoch)
        return epoch * self._plan.replace if known is None else known

    def _known_start(self, epoch: int) -> int | None:
        row = self._starts[epoch % len(self._starts)]
        number, start = row.tolist()
        return start if number == epoch + 1 == row[0] else None

    def _put(self, epoch: int, start: int) -> None:
        """Make `epoch` the newest. Called under the lock."""
        self._starts[self._starts[:, 0] > epoch] = 0
        row = self._starts[epoch % len(self._starts)]
        row[0] = 0
        row[1] = start
        row[0] = self.header[Field.EPOCHS] = epoch + 1

    def count_skipped(self, number: int) -> None:
        """Count samples left out because of an error."""
        with self._hold():
            self.header[Field.SKIPPED] += number

    # -- epochs -------------------------------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The epoch after the newest that any loader of this object, or its workers, began or asked for."""
        return int(self._begun.array[0])

    def begin(self, epoch: int) -> Ids:
        """Return the ids of an epoch by position. The first call moves the window."""
        if self._known_start(epoch) is None:
            self._move(epoch)
        self._begun.array[0] = epoch + 1
        if self.epoch == epoch:
            self.end_epoch()  # another loader continues with the next
        return self.plan.window(self.start(epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, already begun, of the positions asked for from now on."""
        if self.epoch != epoch:
            with self._hold():
                self._put(epoch, self.start(epoch))
        self._asked[:] = epoch
        self._begun.array[0] = epoch

    def end_epoch(self) -> None:
        """End the newest epoch: positions asked for from now on belong to the next one."""
        self._asked[:] = self.epoch + 1

    def look_up(self, positions: Ids) -> tuple[int, Ids]:
        """Return the epoch in which a loader without epochs asks for these positions, and their ids.

        A new epoch begins when a position is asked for again after at least half of all have been.
        """
        half = self._plan.size / 2
        while True:
            epoch, last = self.epoch, self._asked[positions]
            asked = int((self._asked == epoch + 1).sum())
            if self.epoch == epoch:  # otherwise other processes asked for positions of a later epoch meanwhile
                break
        if (last == epoch + 1).any() and asked >= half:
            epoch += 1
            self._move(epoch)
        elif (last == epoch - 1).all() and asked < half:
            epoch -= 1  # another rank is ahead
        self._asked[positions] = np.maximum(self._asked[positions], epoch + 1)
        self._begun.array[0] = max(self.next_epoch, epoch + 1)
        return epoch, self.plan.ids(self.start(epoch), positions)

    # -- moving -------------------------------------------------------------------------------------------------------

    def coming(self) -> tuple[Ids, Ids, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return the ids that join after the newest epoch, their places, and which are neither prepared nor failed."""
        plan, count = self.plan, self.plan.replace if self.epoch >= 0 else 0
        first = self.start(self.epoch) + plan.size
        ids, places = plan.sequence(first, first + count), np.arange(first, first + count)
        return ids, places, ~self.cache.resident(ids) & (self.failed[ids] != places + 1)

    def _move(self, epoch: int) -> None:
        """Move the window to `epoch`, unless another process has.

        It moves up to the first sample that is not ready, so that no sample is left out. Without a fill process it
        moves by all that are due, which are then prepared when they are asked for.
        """
        while True:
            newest, began = self.epoch, time.perf_counter()
            start, late = self.start(epoch), False
            if newest == epoch - 1 >= 0:
                moved, late = self._wait_for_samples(epoch)
                start = self.start(newest) + moved
            with self._hold():
                if self._known_start(epoch) is not None:
                    return
                if self.epoch == newest:
                    self.header[Field.LATE] += late
                    self.header[Field.WAITED] += late * int(1e9 * (time.perf_counter() - began))
                    self._put(epoch, start)
                    break
        gone = self.cache.resident(np.arange(self.cache.num_ids))
        gone[self.plan.sequence(start, start + self._plan.size + self._plan.replace)] = False
        with suppress(WaitError):  # dropped at the next move
            self.cache.drop(np.flatnonzero(gone))

    def _wait_for_samples(self, epoch: int) -> tuple[int, bool]:
        """Return by how many samples the window may move, and whether that is late."""
        due, late, deadline = self._plan.replace, False, time.monotonic() + _WAIT_SECONDS
        while True:
            lacking = self.coming()[2]
            ready = int(lacking.argmax()) if lacking.any() else due
            if ready == due or not self.is_filled():
                return due, late
            late = True
            if self.on_late == "partial" or self._known_start(epoch) is not None:
                return ready, late
            if time.monotonic() > deadline:
                raise window_late(
                    f"replacements for epoch {epoch} were not ready within {_WAIT_SECONDS:.0f} s (on_late='wait'): "
                    f"{ready} of {due} are. Give a lower replace_rate, more fill workers, or on_late='partial'"
                )
            time.sleep(_CHECK_SECONDS)

    # -- fill processes -----------------------------------------------------------------------------------------------

    def claim_filler(self, number: int) -> bool:
        """Become fill process `number` until this process ends; return False if another process is."""
        return self._lock.claim(1 + 2 * number)

    def is_filled(self) -> bool:
        """Return whether another process is a fill process."""
        return self._lock.claimed_elsewhere()

    @contextmanager
    def claimed(self, fillers: int) -> Iterator[tuple[Ids, Ids]]:
        """Claim some of the samples that join next for this process, one of `fillers`: ids, and places."""
        ids, places, missing = self.coming()
        lacking = np.flatnonzero(missing).tolist()
        free = (at for at in lacking if self._lock.claim(2 + 2 * int(places[at])))
        chosen = list(islice(free, min(_CHUNK, -(-len(lacking) // fillers))))
        try:
            yield ids[chosen], places[chosen]
        finally:
            for place in places[chosen].tolist():
                self._lock.release(2 + 2 * place)

    # -- state --------------------------------------------------------------------------------------------------------

    def _identity(self, seed: int) -> list[int]:
        return [self._plan.total, self._plan.size, self._plan.replace, seed]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the window, serializable as JSON."""
        asked = self._asked == self.epoch + 1
        return {
            "version": _VERSION,
            "window": self._identity(self.plan.seed),
            "epoch": self.epoch,
            "starts": sorted([number - 1, start] for number, start in self._starts.tolist() if number),
            "over": bool(asked.any()),
            "rest": np.flatnonzero(~asked).tolist() if asked.any() else [],
        }

    def load_state_dict(self, state: dict[str, Any], *, any_seed: bool) -> None:
        """Restore a state; with `any_seed` also its seed. Raises `InputError` for the state of another window."""
        check_state(state, _VERSION, "window", "epoch", "starts", "over", "rest")
        seed = int(state["window"][3]) if any_seed else self.plan.seed
        if state["window"] != self._identity(seed):
            raise state_mismatch(
                f"the state is of another window: {state['window']} (samples, cache_num, replaced, seed), this is "
                f"{self._identity(seed)}: give the same arguments"
            )
        epoch, over, rest = state["epoch"], state["over"], state["rest"]
        with self._hold():
            self._set_seed(seed)
            self.header[Field.EPOCHS] = self._starts[:] = self.failed[:] = 0
            for number, start in state["starts"]:
                self._put(number, start)
            self._asked[:] = epoch + bool(over)
            self._asked[rest] = epoch
        self._begun.array[0] = max(0, epoch + (over and not rest))

    def close(self) -> None:
        """Close the lock and the counter."""
        self._begun.close()
        self._lock.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("cache", "on_late", "_plan", "_begun")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()


# -- the processes that prepare the samples which join ----------------------------------------------------------------


class FillProcesses:
    """The fill processes of one data set object. Those of other ranks are standbys that take over if these die.

    Args:
        window, reader: of the data set.
        count: number of processes.
        context: starts them.
    """

    def __init__(self, window: Window, reader: Reader, count: int, context: BaseContext) -> None:
        self._window, self._reader, self._count, self._context = window, reader, count, context
        self._processes: list[Child] = []
        self._deaths, self._owner = 0, Owner()
        weakref.finalize(self, end_all, self._processes, _STOP_SECONDS)

    @property
    def running(self) -> bool:
        """Whether any process is running."""
        return any(process.alive for process in self._processes)

    def start(self) -> None:
        """Start the processes that are not running."""
        self._remove_dead()
        while len(self._processes) < self._count:
            arguments = self._window, self._reader, self._count
            self._processes.append(Child(fill_main, *arguments, context=self._context, name="stallfree-fill"))

    def look_after(self) -> None:
        """Replace processes that died, up to a limit."""
        dead = self._remove_dead() if self._owner.is_here else []
        if dead:
            self._deaths += len(dead)
            more = self._deaths < _LIVES * self._count
            log.warning(
                "a fill process died: %s; %s",
                how_it_ended(dead[0]),
                "it is replaced" if more else "it is not replaced any more: samples are prepared as they are asked for",
            )
            if more:
                self.start()

    def _remove_dead(self) -> list[int | None]:
        """Remove processes that died or hang at their start; return their exit codes."""
        for process in self._processes:
            with suppress(EOFError):
                process.receive()  # its error report
        dead = [process for process in self._processes if process.overdue or not process.alive]
        for process in dead:
            process.end(0.0)
            self._processes.remove(process)
        return [process.exit_code for process in dead]

    def stop(self) -> None:
        """Stop the processes; kill those that do not exit in 5 s."""
        end_all(self._processes, _STOP_SECONDS)
        self._processes.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return FillProcesses, (self._window, self._reader, 0, context_of(None))  # a copy has no processes


def fill_main(parent: Parent, window: Window, reader: Reader, fillers: int) -> None:
    """Prepare samples until this process is to stop."""
    parent.report()
    torch.set_num_threads(1)
    reader.split.quiet = True
    working = busy = False
    while not parent.wait(0.0 if busy else _LOOK_SECONDS):
        working = working or any(map(window.claim_filler, range(fillers)))
        with suppress(WaitError):  # the writer lock timed out
            busy = working and _fill(window, reader, fillers)
    reader.close()


def _fill(window: Window, reader: Reader, fillers: int) -> bool:
    """Prepare some of the samples that join next; return whether there were any.

    Samples that fail or do not fit are marked, so that no process waits for them. They are made when they are asked
    for, which raises their error.
    """
    with window.claimed(fillers) as (ids, places):
        if len(ids):
            with suppress(StallfreeError):
                reader.fill(ids)
            missing = ~window.cache.resident(ids)
            window.failed[ids[missing]] = places[missing] + 1
    return len(ids) > 0
