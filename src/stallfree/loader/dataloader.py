"""`DataLoader`: takes what `torch.utils.data.DataLoader` takes, yields what it yields, without its stalls."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import default_collate, default_convert

from stallfree.device import DevicePrefetcher
from stallfree.errors import InputError
from stallfree.frames import short_traceback
from stallfree.loader.arguments import (
    WAIT_SECONDS,
    check_auto,
    check_functions,
    check_importance,
    check_numbers,
    check_ranked,
    check_sampling,
    context_of,
    seed_of,
)
from stallfree.loader.auto import AutoCache
from stallfree.loader.cached_dataset import CachedDataset
from stallfree.loader.crew import Crew, Options, new_counts
from stallfree.loader.epoch import Progress
from stallfree.loader.event_log import EventLog
from stallfree.loader.host_loader import HostLoader
from stallfree.loader.importance import Importance
from stallfree.loader.iteration import Iteration
from stallfree.loader.order import Order
from stallfree.loader.output import check_output
from stallfree.loader.ranks import agreed, has_process_group, numbered, rank_and_count
from stallfree.loader.reader import Reader, reader_of
from stallfree.loader.same_order import check_prepared, check_same_order, check_same_window
from stallfree.loader.samplers import shown_samplers
from stallfree.loader.shown import own_collate, shown_by
from stallfree.loader.smart_cache import SmartCacheDataset
from stallfree.loader.state import STATE_VERSION, check_state
from stallfree.pipeline.randomness import draw_seed
from stallfree.plans import ImportanceSampler
from stallfree.stats import ImportanceStats, LoaderStats
from stallfree.stores import DiskTier
from stallfree.units import parse_size, parse_whole


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Batches of a map-style data set, prepared ahead by worker processes into standing shared memory.

    The arguments of `torch.utils.data.DataLoader` mean what they mean there; differences and additions are below. It is
    a subclass, so that other libraries take it for a loader; nothing is inherited but the names.

    Args:
        dataset: a `CachedDataset`, a source, or any map-style data set.
        batch_size: samples per batch; None: samples one by one, not collated.
        shuffle: another order each epoch, a function of (seed, epoch).
        sampler: gives ids (integers). An `ImportanceSampler` decides which samples an epoch has.
        batch_sampler: gives lists of ids.
        num_workers: worker processes; 0 (the default): the training process itself. With `cache="auto"`, the default is
            as many as pay.
        collate_fn: makes a batch of a list of samples; torch's default if None. What it draws is a function of (seed,
            epoch, number of the batch).
        pin_memory: yield batches in pinned memory, when there is an accelerator.
        drop_last: leave out a last batch that is not full.
        timeout: seconds to wait for a batch before `WaitError`; 0 means 300.
        worker_init_fn: called in each worker with its number. Workers start with their first task: none, when all
            batches can be gathered out of the cache.
        multiprocessing_context: "fork", "forkserver", "spawn" or a context; Python's default if None.
        generator: the seed is drawn from it in place of torch's default generator.
        prefetch_factor: batches under way per worker; 2 if None.
        persistent_workers: keep the workers from epoch to epoch. A new iteration then ends the one before.
        pin_memory_device: taken for compatibility.
        in_order: taken for compatibility; batches always come in order.
        seed: of order and augmentation. If None, that of the `CachedDataset` or `SmartCacheDataset`; else it is drawn
            from torch's generator when the first iteration begins, as torch's loader draws it.
        with_ids: yield `Batch(data, ids, weights)`. With an `ImportanceSampler`, that is what comes in any case.
        on_error: "raise" a `SampleError` for a sample that cannot be had, or "skip" it: it is left out, counted, and
            the first ones are reported in the log. After an error, `next` goes on with the batch that follows.
        staging: bytes for the ring of ready batches, as an int or such as "256MiB". None: as many batches as are under
            way, and three that may be kept. A batch that does not fit is handed over as a copy.
        device: such as "cuda": yield batches that are there, copied while the model works with those before them (see
            `DevicePrefetcher`, with its defaults). The ring is pinned for that, once with `persistent_workers`;
            `pin_memory` is not needed. None: yield batches of the host.
        cache: "auto": the first iteration measures how fast storage, prep and cache are, and makes the cache that gains
            most by the model of speed: of samples as fetched, prepared, or some of each; or none. It prints a line that
            says what and why. See `decision` and `cached`. None: no cache but that of a `CachedDataset`.
        capacity: bytes for that cache, as an int or such as "16GiB"; jobs on this host with the same data share it.
        store: a `DiskTier` that this cache may use below memory, where that pays.
        ranks: (rank, number of ranks), or "auto" for those of `torch.distributed`, or else of RANK and WORLD_SIZE: deal
            one order out among the ranks, as torch's `DistributedSampler` does. Each sample is on one rank. So that all
            ranks have equally many, the first ones are repeated, or the last ones left out with `drop_last`. All ranks
            use the seed of rank 0. A state may be loaded with another number of ranks. `(0, 1)`: this process has all
            samples, without a warning that there are several ranks.
        output: "torch", or "numpy": yield arrays where there are tensors, ids and weights included, in the same memory.
            They hold a batch as tensors do. `InputError` while iterating for what NumPy has no form for (bfloat16).
        event_log: file that gets a line per event, for `stallfree simulate` to draw (see `stallfree.events`): who
            fetched, prepared or gathered which batch when, and when the training loop had it. It is made anew here, and
            complete whenever no iteration is under way. Steps are not in it with a `device`.

    Attributes:
        cached: the `CachedDataset` that `cache="auto"` has made; None without, before the first iteration, and where no
            cache pays.
        decision: the line that says what `cache="auto"` decided; "" before the first iteration.

    A batch is memory of its own for as long as one of its tensors is alive: kept batches are never overwritten. Raises
    `InputError` for arguments that cannot be used; while iterating `SampleError`, `WorkerError` and `WaitError`.
    """

    multiprocessing_context: Any = None  # torch's property accepts one only with workers
    _dataset_kind = 0  # map-style: what torch's constructor sets, which is not called
    _iterator = None

    _epoch = 0  # of the next iteration, unless something else counts epochs
    _pinned = False  # by `set_epoch` or a state
    _base_seed = 0  # of the workers' own generators
    _resume: dict[str, Any] | None = None
    _progress: Progress | None = None
    _crew: Crew | None = None  # of persistent workers
    _iteration: weakref.ref[Iteration] | None = None
    _given_by: weakref.ref[DevicePrefetcher] | None = None

    @short_traceback
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        with_ids: bool = False,
        on_error: str = "raise",
        staging: int | str | None = None,
        device: torch.device | str | int | None = None,
        cache: str | None = None,
        capacity: int | str | None = None,
        store: DiskTier | None = None,
        event_log: str | os.PathLike[str] | None = None,
        output: str = "torch",
        ranks: tuple[int, int] | str | None = None,
    ) -> None:
        room = check_auto(cache, capacity, store, sampler)
        open_workers, num_workers = num_workers is None and room is not None, 0 if num_workers is None else num_workers
        check_numbers(num_workers, batch_size, timeout, prefetch_factor, persistent_workers)
        check_sampling(batch_size, shuffle, sampler, batch_sampler, drop_last)
        check_functions(collate_fn, worker_init_fn, on_error)
        check_ranked(ranks, sampler, batch_sampler, windowed=isinstance(dataset, SmartCacheDataset))
        self.arrays = check_output(output, pin_memory, device)
        self.dataset = dataset
        self.batch_size = batch_size if batch_sampler is None else None
        self.shuffle, self.num_workers = bool(shuffle), num_workers
        single = batch_size is None and batch_sampler is None
        self.collate_fn: Any = collate_fn or (default_convert if single else default_collate)
        self.pin_memory, self.pin_memory_device = pin_memory, pin_memory_device
        self.drop_last, self.timeout, self.worker_init_fn = drop_last, timeout, worker_init_fn
        context = context_of(multiprocessing_context)
        self.multiprocessing_context = None if multiprocessing_context is None else context
        self.prefetch_factor, self.persistent_workers = prefetch_factor, persistent_workers
        self.generator, self.with_ids, self.in_order = generator, with_ids, in_order
        self.on_error, self.staging, self.cache, self.capacity, self.store = on_error, staging, cache, capacity, store
        self.event_log, self.output, self.ranks = event_log, output, ranks
        self.seed = self._given = seed_of(dataset, seed, generator)
        reader = reader_of(dataset)
        self._auto: AutoCache | None = None
        if room is not None:
            self._auto = AutoCache(dataset, room, None if open_workers else num_workers, store)
            self.num_workers = num_workers = self._auto.num_workers
        self._options = Options(
            reader=reader,
            dataset=dataset,
            collate=own_collate(self.collate_fn, single=single),
            single=single,
            seed=self.seed or 0,
            skip=on_error == "skip",
            workers=num_workers,
            ahead=(prefetch_factor or 2) * max(1, num_workers),
            context=context,
            worker_init=worker_init_fn,
            seconds=timeout or WAIT_SECONDS,
            staging=None if staging is None else parse_size(staging, "staging"),
            log=None if event_log is None else EventLog(event_log),
            begun=time.monotonic(),
        )
        self._log = self._options.log
        self._windowed = dataset if isinstance(dataset, SmartCacheDataset) else None
        self._order, self._importance = self._plan(reader, batch_size, sampler, batch_sampler)
        self.sampler, self.batch_sampler = shown_samplers(self, self._order, sampler, batch_sampler)
        self._agree = numbered(f"{len(reader.source)}-{batch_size}") if ranks is not None else ""
        self._counts = {**new_counts(), "num_workers": num_workers}
        self._crews: list[weakref.ref[Crew]] = []  # made anew and never changed: any thread may ask for `stats`
        self._counts_in = (
            dataset if seed is None and isinstance(dataset, CachedDataset) and self._given is not None else None
        )
        self._prefetcher = None if device is None else DevicePrefetcher(HostLoader(self), device)
        self.device = None if self._prefetcher is None else self._prefetcher.device

    def _plan(
        self, reader: Reader, batch_size: int | None, sampler: Any, batch_sampler: Any
    ) -> tuple[Order, Importance | None]:
        """What says which samples an epoch has, and in which order."""
        samples, mixed = len(reader.source), self.shuffle
        if self._windowed is not None:  # a whole epoch of it has an order of its own
            samples, mixed = len(self._windowed), self.shuffle and not self._windowed.full_epoch
        size, drop = self.batch_size, self.drop_last
        order = Order(samples, size, mixed, sampler, batch_sampler, drop, self.seed, self.ranks)
        if not isinstance(sampler, ImportanceSampler):
            return order, None
        if reader.share < 1:
            raise InputError("an ImportanceSampler wants samples of one form: give form='fetched' or 'prepared'")
        check_importance(sampler, reader.cache, samples, batch_size, windowed=self._windowed is not None)
        return order, Importance(sampler, reader, self._options.context, size or 1, drop)

    # -- epochs -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of an epoch. Raises `TypeError` if the sampler has no length.

        With an `ImportanceSampler`, of the epoch that is under way, else of the next one, whose plan is drawn for that.
        """
        if self._importance is None:
            return len(self._order)
        return self._importance.steps(self._next_epoch() if self._progress is None else self._progress.number)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`. Without it, each iteration is another epoch, counted from 0.

        A `SmartCacheDataset`, an `ImportanceSampler`, a `DistributedSampler` and a `CachedDataset` with a seed count
        the epochs of all loaders that are made over them: a new loader goes on with the next one.
        """
        self._epoch, self._pinned = parse_whole(epoch, "epoch", 0), True
        self._resume = self._progress = self._given_by = None

    def _next_epoch(self) -> int:
        """The number of the epoch that comes next, by what was set or by what counts it."""
        if self._pinned:
            return self._epoch
        if self._windowed is not None:
            return self._windowed.next_epoch
        if self._importance is not None:
            return self._importance.sampler.next_epoch
        counted = 0 if self._counts_in is None else self._counts_in.next_epoch
        return max(self._epoch, counted, self._order.next_epoch)

    @short_traceback
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._iterate(None) if self._prefetcher is None else iter(self._prefetcher)

    def prefetched_by(self, prefetcher: DevicePrefetcher) -> Iterator[Any]:
        """Batches of the host for a prefetcher, which pins the slots, and says what the training loop waits for."""
        return self._iterate(prefetcher)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by `Accelerator.prepare`, which leaves this loader as it is, and does not put torch's in its place."""
        check_prepared(knows_ranks=self._order.knows_ranks)
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Accelerate sets it, too."""

    def _iterate(self, prefetcher: DevicePrefetcher | None) -> Iterator[Any]:
        if not self._order.knows_ranks:
            if self._windowed is None:
                check_same_order(sampler=not self._order.own)
            else:
                check_same_window()
        resume, self._resume = self._resume, None
        epoch = self._next_epoch()
        first, dealt = self._order.place(*(0, None) if resume is None else (resume["batches"], resume["dealt"]))
        rest = None
        if resume is not None and resume["rest"] is not None:
            rest = [np.asarray(ids, np.int64) for ids in resume["rest"]]
        served = None
        if self._importance is not None:
            served = (
                self._importance.begin(epoch, self._counts) if rest is None else self._importance.resume(first, rest)
            )
        if rest is not None:
            batches = iter(rest)
        else:
            batches = self._order.batches(epoch, first, dealt["start"]) if served is None else served.batches
            if self._windowed is not None:
                ids = self._windowed.begin_epoch(epoch)
                batches = (ids[positions] for positions in batches)
        self._draw_seeds()
        self._options.reader.follow()
        self._options.reader.check_settings()
        if self._auto is not None:
            self._follow(self._auto)
        if self._crew is not None:
            before = None if self._iteration is None else self._iteration()
            if before is not None:
                before.close()
        crew = self._crew
        if crew is None or crew.closed:
            crew = Crew(self._options, self._base_seed, self._counts)
            self._crews = [*map(weakref.ref, self._living()), weakref.ref(crew)]
            self._crew = crew if self.persistent_workers else None
        crew.counts_waits = prefetcher is None
        if prefetcher is not None:
            crew.ring.slots.pin = prefetcher.pin
        self._progress = Progress(batches, epoch, first, dealt)
        self._given_by = None if prefetcher is None else weakref.ref(prefetcher)
        self._epoch, self._pinned = epoch + 1, False
        if self._counts_in is not None:
            self._counts_in.next_epoch = epoch + 1
        iteration = Iteration(self, crew, self._progress, served, sees_steps=prefetcher is None)
        self._iteration = weakref.ref(iteration)
        return iteration

    def _draw_seeds(self) -> None:
        """Draw what torch's loader draws when an iteration begins, from the same generators.

        So the same samplers give the same order here and there, and a model draws the same numbers.
        """
        if self._crew is None or self._crew.closed:
            self._base_seed = draw_seed(self.generator)
        if self.shuffle and self.generator is None:
            draw_seed()  # as torch's RandomSampler
        seed, drawn = self._base_seed if self.seed is None else self.seed, self.seed is None
        name, self._agree = self._agree, ""
        if name and rank_and_count(self.ranks)[1] > 1 and (drawn or has_process_group()):
            seed = agreed(seed, name)
        self._set_seed(seed)

    def _set_seed(self, seed: int) -> None:
        if seed != self._options.seed and self._crew is not None:  # of persistent workers, which have the other one
            self._crew.close()
        self.seed = self._order.seed = seed
        self._options = replace(self._options, seed=seed)

    def _follow(self, auto: AutoCache) -> None:
        """Do as `cache="auto"` decides."""
        assert self.seed is not None
        reader = auto.begin(self.seed)
        options = self._options
        if reader is options.reader and auto.num_workers == options.workers:
            return
        self._options = replace(
            options,
            reader=reader,
            workers=auto.num_workers,
            ahead=(self.prefetch_factor or 2) * max(1, auto.num_workers),
        )
        self.num_workers = self._counts["num_workers"] = auto.num_workers
        if self._crew is not None:  # of persistent workers, which know nothing of it
            self._crew.close()
            self._crew = None

    @property
    def cached(self) -> CachedDataset | None:
        """See the class."""
        return None if self._auto is None else self._auto.cached

    @property
    def decision(self) -> str:
        """See the class."""
        return "" if self._auto is None else self._auto.decision

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training is: `load_state_dict` in another process goes on with exactly the samples that are left.

        For the loader's own order that is two integers; with a `sampler` or `batch_sampler`, which may be random, the
        ids that are left are in the state, so it must come to an end; with an `ImportanceSampler`, who is served in
        whose place is then decided for the rest of the epoch. Take the state in the process that iterates,
        between two batches. It is fit for JSON.
        """
        given_by = None if self._given_by is None else self._given_by()
        if given_by is not None and given_by.ahead:
            return given_by.state_dict()  # type: ignore[no-any-return]
        return self.state_at(self.position)

    @property
    def position(self) -> tuple[Progress, int] | None:
        """Where the iteration is, for `state_at`; batches that are copied ahead count. None between two."""
        return None if self._progress is None else (self._progress, self._progress.handed_out)

    def state_at(self, position: tuple[Progress, int] | None) -> dict[str, Any]:
        """The state as it was when the iteration was at `position`, at most 64 batches ago."""
        order, epoch = self._order.describe(), self._next_epoch()
        state: dict[str, Any] = {"version": STATE_VERSION, "epoch": epoch, "seed": self.seed, "order": order}
        if self._windowed is not None:
            state["window"] = self._windowed.state_dict()
        if position is None:
            state |= self._resume or {"batches": 0, "rest": None, "dealt": None}
        else:
            progress, batches = position
            rest = None if self._order.own else progress.rest(batches)
            state |= {"epoch": progress.number, "batches": batches, "rest": rest, "dealt": progress.dealt}
        if self._importance is not None:
            state["importance"] = self._importance.sampler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next iteration gives what was left.

        Raises `InputError` for what is no state, and for one of another version, seed or order.
        """
        windowed, importance = self._windowed, self._importance
        given = None if self._agree else self._given  # with `ranks`, the state has the seed of rank 0
        check_state(
            state, self._order.describe(), given, window=windowed is not None, importance=importance is not None
        )
        if windowed is not None:
            windowed.load_state_dict(state["window"])
        if importance is not None:
            importance.sampler.load_state_dict(state["importance"])
        if state["seed"] is not None:
            self._set_seed(state["seed"])
        self._epoch, self._pinned = state["epoch"], True
        self._resume = {"batches": state["batches"], "rest": state["rest"], "dealt": state.get("dealt")}
        self._progress = self._given_by = None

    def count_wait(self, seconds: float) -> None:
        """A prefetcher's training loop has waited for a batch."""
        self._counts["wait_seconds"] += seconds

    @short_traceback
    def update(self, ids: torch.Tensor, losses: torch.Tensor) -> None:
        """Tell the `ImportanceSampler` the losses of a batch: `Batch.ids`, and one loss for each of them.

        Does not wait for the device that they are on. Raises `InputError` without an `ImportanceSampler`.
        """
        if self._importance is None:
            raise InputError(
                "update is for a loader with sampler=ImportanceSampler(...): give it one, or leave out the call"
            )
        self._importance.sampler.update(ids, losses)

    def stats(self) -> LoaderStats:
        """What this loader has done since it was made."""
        staging = [crew.ring.bytes for crew in self._living() if not crew.closed]
        return LoaderStats(**{**self._counts, **({"staging_bytes": sum(staging)} if staging else {})})

    def importance_stats(self) -> ImportanceStats:
        """What the plans of the `ImportanceSampler` asked the cache for. Raises `InputError` without one."""
        if self._importance is None:
            raise InputError(
                "importance_stats is for a loader with sampler=ImportanceSampler(...): give it one, or use stats()"
            )
        return self._importance.stats()

    def close(self) -> None:
        """End all iterations and their workers. The loader may be iterated again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        for crew in self._living():
            crew.close()
        self._crew = None
        if self._auto is not None:
            self._auto.close()
        if self._importance is not None:
            self._importance.close()
        if self._log is not None:
            iteration = None if self._iteration is None else self._iteration()
            if iteration is not None:
                iteration.end_step()
            self._log.flush()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __repr__ = shown_by("batch_size", "shuffle", "num_workers", "drop_last", "device")

    def _living(self) -> list[Crew]:
        return [crew for known in self._crews if (crew := known()) is not None]

    def _finished(self, progress: Progress, samples: int, seconds: float, waited: float) -> None:
        if self._progress is progress:
            self._progress = None
        if self._auto is not None and progress.first == 0:
            self._auto.end(samples, seconds, waited)
