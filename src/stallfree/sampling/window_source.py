"""The window of a Smart Cache: its position in each epoch, and how it advances.

The processes of a host share its state in files in the folder of the cache. The state changes under the lock of its
lock file, except for the requested positions, which are single stores.
"""

from __future__ import annotations

import copy
import enum
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.batches.reader import Reader
from stallfree.errors import FingerprintError, StallfreeError, WaitError, state_mismatch, window_late
from stallfree.ipc.locks import FileLock
from stallfree.ipc.shared_array import SharedCounts, shared_array
from stallfree.pipeline.randomness import peek_seed
from stallfree.sampling.epoch_source import Ids
from stallfree.sampling.plans.states import check_state
from stallfree.sampling.plans.window import WindowPlan
from stallfree.sources.throttle import payload_bytes

FILLERS = 64
"""Maximum number of fill processes of one cache."""

_LOCK_SECONDS = 10.0
_WAIT_SECONDS = 300.0
_CHECK_SECONDS = 0.005
_VERSION = 1
_UNKNOWN: tuple[int, int, Ids] = (-1, -1, np.empty(0, np.int64))
_HEADER = 64
_KEPT = 8
_NEVER = -1
_MASK = 2**64 - 1


class Field(enum.IntEnum):
    """Indices of the int64 fields in the header."""

    SIZE = 0
    REPLACE = 1
    TOTAL = 2
    POSITIONS = 3
    EPOCH = 4  # of the newest window, -1 before the first
    LATE = 5  # epochs that began with fewer new samples than planned
    WAITED = 6  # nanoseconds that epochs waited for new samples at their start
    SKIPPED = 7  # samples left out because of an error
    SEED = 8  # of the order, modulo 2**64
    STARTS = 16  # (epoch, start) of the newest windows


class WindowState:
    """Attaches to the state in `folder`, and creates it if missing.

    Args:
        folder: of the cache.
        size: of the window.
        replace: samples replaced per epoch.
        total: samples of the data set.
        positions: number of positions that may be requested.
        seed: of the order, for a newly created state.

    Raises `FingerprintError` if the existing state belongs to another window.
    """

    def __init__(self, folder: Path, size: int, replace: int, total: int, positions: int, seed: int) -> None:
        self._arguments = (folder, size, replace, total, positions, seed)
        self.header = shared_array(folder / "window", np.int64, _HEADER, required=True)
        self._lock = FileLock(folder / "window-lock")
        self._starts = self.header[Field.STARTS : Field.STARTS + 2 * _KEPT].reshape(_KEPT, 2)
        with self.hold():
            if not self.header[Field.SIZE]:
                shared_array(folder / "window-asked", np.int32, positions, required=True)[:] = _NEVER
                self.header[Field.EPOCH] = self._starts[:] = -1
                self.header[Field.SEED] = np.uint64(seed & _MASK).astype(np.int64)
                self.header[1:4] = replace, total, positions
                self.header[Field.SIZE] = size  # last, for processes that are killed
        there = self.header[:4].tolist()
        if there != [size, replace, total, positions]:
            raise FingerprintError(
                f"the Smart Cache in {folder} has a window of {there[0]} of {there[2]} samples, {there[1]} replaced "
                f"per epoch; yours is {size} of {total}, {replace} replaced: give the same arguments, or another name"
            )
        self.unkept = shared_array(folder / "window-unkept", np.int64, total, required=True)
        """Per id, 1 + the place at which fetching or storing it failed, so that no process waits for it."""
        self.asked = shared_array(folder / "window-asked", np.int32, positions, required=True)
        """Per position, the last epoch in which it was requested."""

    @property
    def epoch(self) -> int:
        """The epoch of the newest window; -1 before the first."""
        return int(self.header[Field.EPOCH])

    def start(self, epoch: int) -> int | None:
        """The start of the window of `epoch`; None if it is not one of the newest."""
        row = self._starts[epoch % _KEPT]
        known, start = row.tolist()
        return start if known == epoch and row[0] == epoch else None

    def starts(self) -> list[tuple[int, int]]:
        """(epoch, start) of the newest windows, oldest first."""
        return sorted((epoch, start) for epoch, start in self._starts.tolist() if epoch >= 0)

    def put(self, epoch: int, start: int) -> None:
        """Set the newest epoch, whose window begins at `start`. Windows of later epochs are removed."""
        self._starts[self._starts[:, 0] > epoch] = -1
        row = self._starts[epoch % _KEPT]
        row[0] = -1
        row[1] = start
        row[0] = epoch
        self.header[Field.EPOCH] = epoch

    @property
    def seed(self) -> int:
        """The seed of the order: that of the first process that attached."""
        return int(self.header[Field.SEED])

    def reorder(self, seed: int) -> None:
        """Set another seed of the order, before the first window. Call it under the lock."""
        self.header[Field.SEED] = np.uint64(seed & _MASK).astype(np.int64)
        self.unkept[:] = 0
        self.put(-1, 0)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock. Raises `WaitError` if it is not free within 10 s."""
        with self._lock.hold(_LOCK_SECONDS, "moving the window of a Smart Cache"):
            yield

    def count(self, field: Field, number: int) -> None:
        """Add to a count."""
        with self.hold():
            self.header[field] += number

    def claim(self, number: int) -> bool:
        """Become fill process `number` until this process exits; False if another process already is."""
        return self._lock.claim(1 + number)

    def release(self, number: int) -> None:
        """Stop being fill process `number`."""
        self._lock.release(1 + number)

    def filled_by_others(self) -> bool:
        """Whether another process is a fill process."""
        return self._lock.claimed_elsewhere()

    def close(self) -> None:
        """Close the lock."""
        self._lock.close()

    def __reduce__(self) -> tuple[object, ...]:
        return WindowState, self._arguments


class Window:
    """The position of a Smart Cache's window in each epoch: the same in all processes of a host.

    Args:
        reader: prepares the samples, and has the cache.
        size: samples of the window.
        replace: samples replaced per epoch.
        positions: positions of the data set: those of the window, or of all samples.
        whole: whether an epoch has all samples, those of the window first.
        seed: of the order; None: that of the first process, drawn from torch's generator.
        order: the other arguments of `WindowPlan`.
        on_late: "wait": an epoch waits for replacements that are not ready; "partial": it begins without them.

    Attributes:
        reader, positions, on_late: as given.
        plan: the sequence of samples under the window.
        state: shared by the processes of the host.
    """

    def __init__(
        self,
        reader: Reader,
        size: int,
        replace: int,
        positions: int,
        *,
        whole: bool,
        seed: int | None,
        order: dict[str, Any],
        on_late: str,
    ) -> None:
        self.reader = reader
        cache: Any = reader.cache
        self._cache = cache
        self._seed, self._order, self.on_late = seed, order, on_late
        self.positions, self._whole = positions, whole
        drawn = peek_seed() if seed is None else seed
        self.state = WindowState(cache.path, size, replace, len(reader.source), positions, drawn)
        self.plan = self._planned(size, replace, self.state.seed if seed is None else seed)
        self._begun = SharedCounts(1)
        self._known = _UNKNOWN

    def _planned(self, size: int, replace: int, seed: int) -> WindowPlan:
        return WindowPlan(len(self.reader.source), size, replace, seed=seed, **self._order)

    @property
    def next_epoch(self) -> int:
        """The epoch after the newest that any loader of this object, or its workers, began or requested."""
        return int(self._begun.array[0])

    def begin(self, epoch: int) -> Ids:
        """The ids of an epoch, one for each position. The first call advances the window."""
        start = self.state.start(epoch)
        ids = self._ids(epoch, self._advance(epoch) if start is None else start)
        self._begun.array[0] = epoch + 1
        if self.state.epoch == epoch:
            self.state.asked[:] = epoch  # so that another loader continues with the next
        return ids

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, already begun, of positions requested from now on."""
        if self.state.epoch != epoch:
            with self.state.hold():
                self.state.put(epoch, self.state.start(epoch) or 0)
        self.state.asked[:] = epoch - 1
        self._begun.array[0] = epoch

    def end_epoch(self) -> None:
        """End the newest epoch: positions requested from now on belong to the next one."""
        if self.state.epoch >= 0:
            self.state.asked[:] = self.state.epoch

    def look_up(self, positions: Ids) -> tuple[int, Ids]:
        """The epoch in which these positions are requested, and their ids."""
        epoch = self._epoch_of(positions)
        start = self.state.start(epoch)
        return epoch, self._ids(epoch, epoch * self.plan.replace if start is None else start)[positions]

    def _epoch_of(self, positions: Ids) -> int:
        """The epoch of these positions, inferred from earlier requests."""
        state, half = self.state, self.positions / 2
        while True:
            newest = state.epoch
            last = state.asked[positions]
            asked = int((state.asked == newest).sum())
            if state.epoch == newest:  # else other processes requested positions of a later epoch meanwhile
                break
        if newest < 0 or ((last == newest).any() and asked >= half):
            self._advance(newest + 1)
            newest += 1
        elif newest > 0 and (last == newest - 2).all() and asked < half:
            newest -= 1  # another rank is ahead
        state.asked[positions] = np.maximum(state.asked[positions], newest)
        self._begun.array[0] = max(int(self._begun.array[0]), newest + 1)
        return newest

    def _ids(self, epoch: int, start: int) -> Ids:
        known = self._known
        if known[:2] != (epoch, start):
            ids = self.plan.window(start)
            if self._whole:
                others = self.plan.others(start)
                ids = np.concatenate((self.plan.shuffled(ids, epoch), self.plan.shuffled(others, epoch)))
            known = self._known = (epoch, start, ids)
        return known[2]

    # -- moving on ----------------------------------------------------------------------------------------------------

    def _advance(self, epoch: int) -> int:
        """Advance the window to `epoch`, unless another process has; return its start."""
        state, goal = self.state, epoch * self.plan.replace
        while True:
            newest = state.epoch
            before = state.start(newest) if newest == epoch - 1 >= 0 else None
            if before is None:
                begin, waited, late = goal, 0.0, False
            else:
                # No sample is skipped, however late the window is.
                begin, waited, late = self._reach(before, min(goal, before + self.plan.size), epoch)
            with state.hold():
                there = state.start(epoch)
                if there is not None:
                    return there
                if state.epoch != newest:
                    continue
                state.header[Field.LATE] += late
                state.header[Field.WAITED] += int(waited * 1e9)
                state.put(epoch, begin)
                return begin

    def _reach(self, before: int, goal: int, epoch: int) -> tuple[int, float, bool]:
        """The possible start of a window planned for `goal`, the seconds waited, and whether it is late.

        The window advances up to the first sample that is not ready; without fill processes, by all that are due.
        """
        began, late = time.perf_counter(), False
        while True:
            ready = self.ready(before, goal)
            waited = time.perf_counter() - began
            if ready == goal:
                return goal, waited if late else 0.0, late
            if not self.state.filled_by_others():  # the loader prepares them when it asks for them
                coming = self.plan.sequence(before + self.plan.size, goal + self.plan.size)
                self.tidy(np.concatenate((self.plan.window(before), coming)))
                return goal, waited, late
            late = True
            if self.on_late == "partial" or self.state.start(epoch) is not None:
                return ready, waited, late
            if waited > _WAIT_SECONDS:
                raise window_late(
                    f"replacements for epoch {epoch} were not ready within {_WAIT_SECONDS:.0f} s (on_late='wait'): "
                    f"{ready - before} of {goal - before} are. Give a lower replace_rate, more fill workers, or "
                    "on_late='partial'"
                )
            time.sleep(_CHECK_SECONDS)

    def ready(self, before: int, goal: int) -> int:
        """The furthest start, from `before` to `goal`, for which all joining samples are prepared."""
        places = np.arange(before, goal) + self.plan.size
        done = ~self.lacking(self.plan.sequence(before + self.plan.size, goal + self.plan.size), places)
        return goal if done.all() else before + int(done.argmin())

    # -- filling ------------------------------------------------------------------------------------------------------

    def keep(self, samples: Mapping[int, Any]) -> None:
        """Store the `samples`, by id, that are in the first window."""
        coming = set(self.plan.window(0).tolist())
        for id, value in samples.items():
            self._cache.count_fetch(1, payload_bytes(value))
            if id in coming:
                self.reader.store([id], [value])

    def with_own_threads(self) -> Window:
        """This window with a separate reader, whose threads can be closed independently."""
        same = copy.copy(self)
        same.reader = copy.copy(self.reader)
        return same

    def lacking(self, ids: Ids, places: Ids) -> npt.NDArray[np.bool_]:
        """Which of the samples `ids` at `places` of the sequence are not prepared yet."""
        lacking: npt.NDArray[np.bool_] = ~self._cache.resident(ids) & (self.state.unkept[ids] != places + 1)
        return lacking

    def fill(self, ids: Ids, places: Ids) -> bool:
        """Prepare and store `ids`. Marks those that fail, so that no process waits for them.

        Returns whether there was not enough space.
        """
        failed = 0
        try:
            failed = self.reader.fill(ids)
        except StallfreeError:  # raised again when the sample is requested
            failed = len(ids)
        there = self._cache.resident(ids)
        self.state.unkept[ids[~there]] = (places + 1)[~there]
        return int(np.count_nonzero(~there)) > failed

    def tidy(self, keep: Ids) -> bool:
        """Drop all samples but `keep`; False if the writer lock times out."""
        there = self._cache.resident(np.arange(self._cache.num_ids))
        there[keep] = False
        try:
            if there.any():
                self._cache.drop(np.flatnonzero(there))
        except WaitError:
            return False
        return True

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the window, serializable as JSON."""
        state, plan = self.state, self.plan
        asked = state.asked == state.epoch
        rest = [] if asked.all() or not asked.any() else np.flatnonzero(~asked).tolist()
        return {
            "version": _VERSION,
            "window": [plan.total, plan.size, plan.replace, plan.seed],
            "epoch": state.epoch,
            "starts": [list(pair) for pair in state.starts()],
            "over": bool(asked.any()),
            "rest": rest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a state; return whether the order has changed.

        Raises `InputError` for the state of another window.
        """
        check_state(state, _VERSION)
        plan, shared = self.plan, self.state
        seed = int(state["window"][3]) if self._seed is None else self._seed
        mine = [plan.total, plan.size, plan.replace, seed]
        if state["window"] != mine:
            raise state_mismatch(
                f"the state is of another window: {state['window']} (samples, cache_num, replaced, seed), this is "
                f"{mine}: give the same arguments"
            )
        with shared.hold():
            shared.put(-1, 0)
            if seed != plan.seed:
                shared.reorder(seed)
            for epoch, start in state["starts"]:
                shared.put(epoch, start)
            shared.asked[:] = state["epoch"] if state["over"] else state["epoch"] - 1
            shared.asked[np.array(state["rest"], np.int64)] = state["epoch"] - 1
        self._begun.array[0] = max(0, state["epoch"] + (state["over"] and not state["rest"]))
        if seed == plan.seed:
            return False
        self.plan, self._known = self._planned(plan.size, plan.replace, seed), _UNKNOWN
        return True

    def close(self) -> None:
        """Close the shared state."""
        self._begun.close()
        self.state.close()
