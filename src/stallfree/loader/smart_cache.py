"""`SmartCacheDataset`: train on a window of the data set that moves while you train."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import current_process
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from stallfree.cache import SampleCache
from stallfree.errors import InputError, WaitError
from stallfree.folders import check_name
from stallfree.frames import short_traceback
from stallfree.loader.arguments import context_of
from stallfree.loader.cached_dataset import checked_ids
from stallfree.loader.first_look import look
from stallfree.loader.private import window_name
from stallfree.loader.ranks import job_name
from stallfree.loader.reader import Reader
from stallfree.loader.shared_counts import SharedCounts
from stallfree.loader.window_fill import FillCrew, FillSetup
from stallfree.loader.window_ranks import RankSampler, checked_hosts, hosts_of_job
from stallfree.loader.window_size import FirstSamples, Fit, fit_budget, fit_count
from stallfree.loader.window_state import FILLERS, Field, WindowState
from stallfree.pipeline.compose import Compose, Transform
from stallfree.pipeline.fingerprint import fingerprint, key_of, tolerant
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import peek_seed
from stallfree.plans.window import WindowPlan, replace_count
from stallfree.platform import need_linux
from stallfree.sources import as_source
from stallfree.sources.throttle import payload_bytes
from stallfree.stats import SmartCacheStats
from stallfree.units import parse_size, parse_whole

Ids = npt.NDArray[np.int64]

_FORMAT = "smart-1"
_WAIT_SECONDS = 300.0
_CHECK_SECONDS = 0.005

log = logging.getLogger("stallfree")
_made = itertools.count()
_UNKNOWN: tuple[int, int, Ids] = (-1, -1, np.empty(0, np.int64))


class SmartCacheDataset:
    """A data set of `cache_num` samples: a window over `data`, of which a share is replaced after each epoch.

    The samples of the window are kept in memory that all processes of the host share, after the longest deterministic
    run of their transforms; the random rest runs each time anew, as a function of (seed, epoch, id). While an epoch
    trains on the N samples of the window, processes in the background prepare the ceil(N * replace_rate) that join at
    its end, when as many leave. The window runs in circles over a random order of all samples. After NVIDIA's Clara
    Train SDK ("Smart Cache").

    Any loader can be used; nothing is started or stopped by hand. Each iteration of a `stallfree.DataLoader` is an
    epoch: the data set counts them, whichever loader it is. Of two loaders at the same time each has epochs of its own,
    and the window moves on with every one. With another loader an epoch ends when a position is asked for a second time
    (and at least half of all positions have been); with a sampler that repeats positions, call `set_epoch` before each
    epoch. Samples of the first window are fetched as they are asked for; whatever is not in the cache for any reason
    comes from the source.

    All ranks of a job on one host share one window: let `rank_sampler()` split it among them. They find one another by
    the variables that torchrun, SLURM and the like set; otherwise give them one `name`.

    Args:
        data: a source such as `ImageFolder`, or any map-style data set or list.
        transform: applied to the samples of `data`, split into its deterministic and its random part.
        cache_num: N, the samples of the window; all of them if there are fewer. This or `capacity`.
        replace_rate: share of the window that is replaced after each epoch, 0 to 1. With 0, for
            validation, nothing is replaced.
        seed: of the order and of the randomness. If None, it follows from the state of torch's generator, which is not
            moved; all ranks on a host have that of the first.
        capacity: bytes in place of a number of samples, as an int or such as "8GiB". N is then what fits, by the
            size of the first samples.
        num_fill_workers: processes that prepare replacements.
        on_late: what happens when not all replacements are ready at the end of an epoch: "partial" replaces those that
            are, and the rest in later epochs; "wait" waits for them.
        on_error: "raise" a `SampleError` for a sample that cannot be had, or "skip" it: it is left out of its batch and
            counted. `stallfree.DataLoader` has an argument of its own for that.
        shuffle: run over the samples in a random order, else in their own.
        reshuffle: take another random order for each pass over the data.
        full_epoch: an epoch is all samples: those of the window first, the others after them, both in an order of their
            own for each epoch. Use a loader that does not shuffle.
        hosts: (number of this host, number of hosts): each has its part of the data. By default what torchrun says.
        name: of the cache.
        multiprocessing_context: how the fill processes start; Python's default if None.

    Attributes:
        cache: the `SampleCache`.
        cache_num: N.
        replace_num: samples replaced per epoch, if they are ready: ceil(N * replace_rate), or as many as are outside of
            the window.

    Raises `InputError` for arguments that cannot be used, `CapacityError` (one of them) for a window that the machine's
    free memory does not hold, `SampleError` when none of the first samples can be had.
    """

    @short_traceback
    def __init__(
        self,
        data: Any,
        transform: Transform | None = None,
        *,
        cache_num: int | None = None,
        replace_rate: float = 0.1,
        seed: int | None = None,
        capacity: int | str | None = None,
        num_fill_workers: int = 1,
        on_late: str = "partial",
        on_error: str = "raise",
        shuffle: bool = True,
        reshuffle: bool = False,
        full_epoch: bool = False,
        hosts: tuple[int, int] | None = None,
        name: str | None = None,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> None:
        need_linux("SmartCacheDataset", "use CachedDataset")
        _check(cache_num, capacity, replace_rate, num_fill_workers, on_late, on_error)
        context = context_of(multiprocessing_context)
        self.source: Source = as_source(data)
        self.seed = None if seed is None else parse_whole(seed, "seed")
        self.on_late, self.on_error, self.full_epoch = on_late, on_error, full_epoch
        hosts = hosts_of_job() if hosts is None else checked_hosts(hosts)
        steps = Compose([self.source.pipeline, *([] if transform is None else [transform])])
        first = look(self.source, steps)
        before, rest = first.parts.deterministic, first.parts.random
        # Ranks that draw a seed, and jobs that resume, have one size of window: another seed does not change it.
        order = {"seed": self.seed or 0, "shuffle": shuffle, "reshuffle": reshuffle, "part": hosts}
        reach = WindowPlan(len(self.source), 1, 0, **order)  # type: ignore[arg-type]
        sizes = FirstSamples(self.source, before, first.id, first.prepared, reach)
        fit = self._fit(cache_num, capacity, replace_rate, sizes)
        self.cache_num = fit.size
        self.replace_num = replace_count(fit.size, replace_rate, reach.total)
        with tolerant() as unknown:
            key = key_of(
                **{"data set": fingerprint(self.source.fingerprint()), "transforms": before},
                window=f"{fit.size}, {self.replace_num} replaced, {sorted({**order, 'seed': self.seed}.items())}",
                format=_FORMAT,
            )
        self.cache = SampleCache(
            len(self.source),
            capacity=fit.capacity,
            fingerprint=key,
            name=window_name(unknown, f"{key[:20]}-smart-{_job()}") if name is None else check_name(name),
            example=fit.example,
        )
        self._positions = reach.total if full_epoch else fit.size
        seed = peek_seed() if self.seed is None else self.seed
        sizes_of = (fit.size, self.replace_num, len(self.source), self._positions)
        self._state = WindowState(self.cache.path, *sizes_of, seed)
        self._order: dict[str, Any] = order
        self.plan = self._planned(self._state.seed if self.seed is None else self.seed)
        self.reader = Reader(self.source, self.cache, before, rest, steps=steps)
        if self._state.epoch < 0:
            coming = set(self.plan.window(0).tolist())
            for id, value in sizes.read:
                self.cache.count_fetch(1, payload_bytes(value))
                if id in coming - sizes.drew:
                    self.reader.store([id], [value])
        self._begun = SharedCounts(1)
        self._known = _UNKNOWN
        self._owner = os.getpid()
        self._crew: FillCrew | None = None
        if self.replace_num and not current_process().daemon:
            self._crew = FillCrew(self._filling(num_fill_workers), context)
        self._end = weakref.finalize(self, _close, os.getpid(), self._crew, self._state)
        self.start()

    def _planned(self, seed: int) -> WindowPlan:
        return WindowPlan(len(self.source), self.cache_num, self.replace_num, **{**self._order, "seed": seed})

    def _fit(self, count: int | None, capacity: int | str | None, rate: float, sizes: FirstSamples) -> Fit:
        total = sizes.reach.total
        if capacity is None:
            assert count is not None
            count = min(count, total)
            return fit_count(sizes, len(self.source), count, replace_count(count, rate, total))
        return fit_budget(sizes, len(self.source), parse_size(capacity, "capacity"), rate, total)

    # -- epochs -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """`cache_num`; with `full_epoch` the number of all samples (of this host)."""
        self._look_after()  # samplers ask for the length once per epoch
        return self._positions

    def _look_after(self) -> None:
        if self._crew is not None and self._owner == os.getpid():
            self._crew.look_after()

    @property
    def next_epoch(self) -> int:
        """The epoch after the newest that this object was asked for, by any loader and in its workers."""
        return int(self._begun.array[0])

    def begin_epoch(self, epoch: int) -> Ids:
        """The ids of epoch `epoch`, one for each position. Loaders call this; the first call moves the window.

        An epoch that is neither one of the newest nor the next begins where it would if no replacement was ever late.
        Raises `WaitError` if, with `on_late="wait"`, replacements are not ready within 300 s.
        """
        self.reader.check()
        self.reader.follow()
        epoch = parse_whole(epoch, "epoch", 0)
        self._look_after()
        start = self._state.start(epoch)
        ids = self._ids(epoch, self._advance(epoch) if start is None else start)
        self._begun.array[0] = epoch + 1
        if self._state.epoch == epoch:
            self._state.asked[:] = epoch  # so that another loader goes on with the next
        return ids

    def _ids(self, epoch: int, start: int) -> Ids:
        known = self._known
        if known[:2] != (epoch, start):
            ids = self.plan.window(start)
            if self.full_epoch:
                others = self.plan.others(start)
                ids = np.concatenate((self.plan.shuffled(ids, epoch), self.plan.shuffled(others, epoch)))
            known = self._known = (epoch, start, ids)
        return known[2]

    def _advance(self, epoch: int) -> int:
        """Move the window on to `epoch`, unless another process has; where it begins."""
        state, goal = self._state, epoch * self.replace_num
        while True:
            newest = state.epoch
            before = state.start(newest) if newest == epoch - 1 >= 0 else None
            if before is None:
                begin, waited, late = goal, 0.0, False
            else:
                # However late it is, nobody is passed over.
                begin, waited, late = self._reach(before, min(goal, before + self.cache_num), epoch)
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
        """Where a window may begin that should begin at `goal`, the seconds that were waited, and whether that is late.

        The window goes on to the first sample that is not ready.
        """
        began, late = time.perf_counter(), False
        while True:
            ready = self._ready(before, goal)
            waited = time.perf_counter() - began
            if ready == goal:
                return goal, waited if late else 0.0, late
            late = True
            if self.on_late == "partial" or self._state.start(epoch) is not None:
                return ready, waited, late
            if not self._state.filled_by_others():  # nobody is at work: whoever waits does it
                missing = self.plan.sequence(ready + self.cache_num, goal + self.cache_num)
                setup = self._filling(1)
                setup.tidy(np.concatenate((self.plan.window(before), missing)))
                setup.fill(missing, np.arange(ready, goal) + self.cache_num)
                setup.reader.close()
                return goal, time.perf_counter() - began, late
            if waited > _WAIT_SECONDS:
                raise WaitError(
                    f"replacements for epoch {epoch} were not ready within {_WAIT_SECONDS:.0f} s (on_late='wait'): "
                    f"{ready - before} of {goal - before} are. Give a lower replace_rate, more fill workers, or "
                    "on_late='partial'"
                )
            time.sleep(_CHECK_SECONDS)

    def _filling(self, fillers: int) -> FillSetup:
        reader = copy.copy(self.reader)
        return FillSetup(reader, self._state, self.plan, fillers)

    def _ready(self, before: int, goal: int) -> int:
        """The place up to which the window may begin, from `before` to `goal`: those who would join are there."""
        places = np.arange(before, goal) + self.cache_num
        ids = self.plan.sequence(before + self.cache_num, goal + self.cache_num)
        done = self.cache.resident(ids) | (self._state.unkept[ids] == places + 1)
        return goal if done.all() else before + int(done.argmin())

    @short_traceback
    def set_epoch(self, epoch: int) -> None:
        """What is asked for from now on is of that epoch. For loaders other than stallfree's; they need it only with
        samplers that repeat positions.
        """
        epoch = parse_whole(epoch, "epoch", 0)
        self.begin_epoch(epoch)
        if self._state.epoch != epoch:
            with self._state.hold():
                self._state.put(epoch, self._state.start(epoch) or 0)
        self._state.asked[:] = epoch - 1
        self._begun.array[0] = epoch

    # -- samples ------------------------------------------------------------------------------------------------------

    @short_traceback
    def __getitem__(self, position: int) -> Any:
        wanted = checked_ids([position], self._positions)
        return self._samples(wanted, skip=False)[0]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    @short_traceback
    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The samples at several positions, all of one epoch. With `on_error="skip"` there may be fewer.

        Raises `SampleError` for one that cannot be had, and with "skip" if none can; `IndexError`.
        """
        return self._samples(checked_ids(positions, self._positions), skip=self.on_error == "skip")

    def _samples(self, positions: Ids, *, skip: bool) -> list[Any]:
        self.reader.check()
        epoch = self._epoch_of(positions)
        start = self._state.start(epoch)
        ids = self._ids(epoch, epoch * self.replace_num if start is None else start)[positions]
        samples = self.reader.finish(self.reader.start(ids), self.plan.seed, epoch, skip=skip)
        if samples.skipped:
            self._state.count(Field.SKIPPED, len(samples.skipped))
            for error in samples.skipped:
                log.warning("left out a sample: %s", str(error).replace("\n", " "))
            if not samples.values:
                raise samples.skipped[0]
        return samples.values

    def _epoch_of(self, positions: Ids) -> int:
        """The epoch that these positions are asked for in, when nobody says it."""
        state = self._state
        newest = state.epoch
        last = state.asked[positions]
        half = self._positions / 2
        if newest < 0 or ((last == newest).any() and int((state.asked == newest).sum()) >= half):
            self._advance(newest + 1)
            newest += 1
        elif newest > 0 and (last == newest - 2).all() and int((state.asked == newest).sum()) < half:
            newest -= 1  # another rank is ahead
        state.asked[positions] = np.maximum(state.asked[positions], newest)
        self._begun.array[0] = max(int(self._begun.array[0]), newest + 1)
        return newest

    # -- by hand ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the fill processes. Has happened already; may be called at any time."""
        if self._crew is not None:
            self._crew.start()

    def is_started(self) -> bool:
        """Whether fill processes run, or none is needed."""
        return self._crew.running if self._crew is not None else not self.replace_num

    def update_cache(self) -> None:
        """Say that the epoch is over. Loaders make that known by themselves; may be called twice."""
        if self._state.epoch >= 0:
            self._state.asked[:] = self._state.epoch

    def shutdown(self) -> None:
        """Stop the fill processes. Samples can still be read, and `start` goes on. May be called twice."""
        if self._crew is not None:
            self._crew.stop()

    def rank_sampler(self, *, shuffle: bool = True, drop_last: bool = False) -> DistributedSampler[Any]:
        """Splits the window among the ranks of this host, as `LOCAL_RANK` and `LOCAL_WORLD_SIZE` say."""
        return RankSampler(self, shuffle, drop_last)

    # -- state and statistics -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the window is. `load_state_dict` in another process gives the windows that would have come.

        With `stallfree.DataLoader` it is part of the loader's state. It is fit for JSON.
        """
        asked = self._state.asked == self._state.epoch
        rest = [] if asked.all() or not asked.any() else np.flatnonzero(~asked).tolist()
        return {
            "version": 1,
            "window": [self.plan.total, self.cache_num, self.replace_num, self.plan.seed],
            "epoch": self._state.epoch,
            "starts": [list(pair) for pair in self._state.starts()],
            "over": bool(asked.any()),
            "rest": rest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises `InputError` for the state of another window."""
        version = state.get("version") if isinstance(state, dict) else None
        if version != 1:
            raise InputError(
                f"the state has version {version!r}, expected 1: give what state_dict() of this release returned"
            )
        seed = int(state["window"][3]) if self.seed is None else self.seed
        mine = [self.plan.total, self.cache_num, self.replace_num, seed]
        if state["window"] != mine:
            raise InputError(
                f"the state is of another window: {state['window']} (samples, cache_num, replaced, seed), this is "
                f"{mine}: give the same arguments"
            )
        shared = self._state
        with shared.hold():
            shared.put(-1, 0)
            if seed != self.plan.seed:
                shared.reorder(seed)
            for epoch, start in state["starts"]:
                shared.put(epoch, start)
            shared.asked[:] = state["epoch"] if state["over"] else state["epoch"] - 1
            shared.asked[np.array(state["rest"], np.int64)] = state["epoch"] - 1
        self._begun.array[0] = max(0, state["epoch"] + (state["over"] and not state["rest"]))
        if seed != self.plan.seed:
            self.plan, self._known = self._planned(seed), _UNKNOWN
            if self._crew is not None:
                self._crew.follow(self.plan)

    def stats(self) -> SmartCacheStats:
        """The counts of the cache and of the window, over all processes."""
        header, epoch = self._state.header, self._state.epoch
        start = self._state.start(epoch) if epoch >= 0 else 0
        return SmartCacheStats(
            **self.cache.stats().__dict__,
            epoch=epoch,
            window_start=start or 0,
            replace_num=self.replace_num,
            lag=max(0, epoch * self.replace_num - (start or 0)),
            late_epochs=int(header[Field.LATE]),
            wait_seconds=int(header[Field.WAITED]) / 1e9,
            skips=int(header[Field.SKIPPED]),
        )

    def where(self, id: int) -> str:
        """Where sample `id` of `data` lies, for messages."""
        return self.source.where(id)

    def close(self) -> None:
        """Stop the fill processes and leave the cache. The last process out removes it. May be called twice."""
        self.reader.end(f"{self!r} is closed: make a new one to read samples")
        self._end()
        self._begun.close()
        self.cache.close()

    def __enter__(self) -> SmartCacheDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_crew", "_end")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._crew = None
        self._end = weakref.finalize(self, _close, os.getpid(), None, self._state)

    def __repr__(self) -> str:
        return f"SmartCacheDataset({self.source!r}, cache_num={self.cache_num}, replace_num={self.replace_num})"


def _check(
    cache_num: Any, capacity: Any, replace_rate: Any, num_fill_workers: Any, on_late: Any, on_error: Any
) -> None:
    if (cache_num is None) == (capacity is None):
        raise InputError("give either cache_num (samples of the window) or capacity (bytes for them)")
    if cache_num is not None and (isinstance(cache_num, bool) or not isinstance(cache_num, int) or cache_num < 1):
        raise InputError(f"cache_num={cache_num!r}: give an int of 1 or more")
    if isinstance(replace_rate, bool) or not isinstance(replace_rate, (int, float)) or not 0 <= replace_rate <= 1:
        raise InputError(f"replace_rate={replace_rate!r}: give a share of the window, 0 (nothing is replaced) to 1")
    whole = isinstance(num_fill_workers, int) and not isinstance(num_fill_workers, bool)
    if not whole or not 1 <= num_fill_workers <= FILLERS:
        raise InputError(f"num_fill_workers={num_fill_workers!r}: give an int from 1 to {FILLERS}")
    if on_late not in ("partial", "wait"):
        raise InputError(f"on_late={on_late!r}: use 'partial' or 'wait'")
    if on_error not in ("raise", "skip"):
        raise InputError(f"on_error={on_error!r}: use 'raise' or 'skip'")


def _job() -> str:
    """The same text in all ranks of one job on this host, another in other jobs."""
    return job_name() or f"{os.getpid()}-{next(_made)}"


def _close(owner: int, crew: FillCrew | None, state: WindowState) -> None:
    if crew is not None and owner == os.getpid():
        crew.stop()
    state.close()
