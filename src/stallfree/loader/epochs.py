"""The epochs of a loader: seeds, pools of executors, one pass after another, and the state to resume in mid-epoch."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from stallfree.datasets.epoch_source import EpochPlan, EpochSource, Ids, Position
from stallfree.datasets.ranks import agreed, has_process_group, numbered, rank_and_count
from stallfree.datasets.reader import Reader, reader_of
from stallfree.errors import state_format, state_mismatch
from stallfree.loader.batch import PlainBatches
from stallfree.loader.order import Order, Repeats
from stallfree.loader.pool import Counts, Options, WorkerPool
from stallfree.loader.run import Pass, PlainPass, Progress, delivery
from stallfree.pipeline.randomness import draw_seed
from stallfree.stats import LoaderStats

STATE_VERSION = 1

_MANY = 1024
"""Number of ids that a sampler may always have left without counting as endless."""


class Seeds:
    """Draws the same seeds as torch's loader at the start of an iteration, from the same generators.

    So the same samplers yield the same order as under torch, and a model draws the same random numbers.

    Args:
        given: the seed of order and augmentation; None: the first one drawn, with `shuffle` by the sampler that the
            loader shows, else for workers.
        generator: as passed to the loader.
        shuffle: whether torch's loader would have a `RandomSampler`, which also draws a seed.
        ranks: as passed to the loader. All ranks of one job use the seed of rank 0.
        name: the same for this loader in all ranks.

    Attributes:
        seed: of order and augmentation; None before it is drawn.
        shuffle, generator: as given; the generator may be replaced.
        base: of the workers' generators.
    """

    def __init__(
        self, given: int | None, generator: torch.Generator | None, shuffle: bool, ranks: Any, name: str
    ) -> None:
        self.seed = self._given = given
        self._restored: int | None = None  # the seed of a state
        self.base = 0
        self.generator, self.shuffle, self._ranks = generator, shuffle, ranks
        self._name = "" if ranks is None else numbered(name)

    def restore(self, seed: int | None) -> None:
        """Take the seed of a state, if it has one. Raises `InputError` if the loader was given another one.

        In a process group, the seed given to rank 0 counts: it is known, and checked, when the next iteration begins.
        """
        if seed is None:
            return
        if not (self._name and has_process_group() and rank_and_count(self._ranks)[1] > 1):
            _check_seed(seed, self._given)
        self.seed = self._restored = seed

    def draw(self, *, new_workers: bool) -> int:
        """The seed, drawn at the first iteration. `new_workers`: whether torch's loader would start workers now.

        Raises `InputError` if rank 0 was given another seed than that of the state.
        """
        if new_workers:
            self.base = draw_seed(self.generator)
        new = draw_seed(self.generator) if self.shuffle else self.base
        seed, drawn = new if self.seed is None else self.seed, self.seed is None
        name, self._name = self._name, ""
        if name and rank_and_count(self._ranks)[1] > 1 and (drawn or has_process_group()):
            seed = agreed(seed if self._given is None else self._given, name)
            self._given = None if self._given is None else seed
            _check_seed(self._restored, seed)
        _check_seed(self._restored, self._given)
        self.seed = seed
        return seed

    def renew(self) -> None:
        """Draw another seed for workers that are started in the place of persistent ones."""
        self.base = draw_seed(self.generator)


class EpochsBase:
    """What a `DevicePrefetcher` uses of a loader.

    It begins an iteration with `prefetched_by`, records the `position` after each batch, requests the state there
    (`state_at`), and counts the waits of the training loop (`count_wait`).
    """

    counts: Counts
    position: Any
    _prefetcher: weakref.ref[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._begin(None)

    def prefetched_by(self, prefetcher: Any) -> Iterator[Any]:
        """Begin an iteration for a prefetcher."""
        return self._begin(prefetcher)

    def _begin(self, prefetcher: Any) -> Iterator[Any]:
        raise NotImplementedError

    def count_wait(self, seconds: float) -> None:
        """Count a wait of a prefetcher's training loop for a batch."""
        self.counts["wait_seconds"] += seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch delivered to the training loop."""
        prefetcher = None if self._prefetcher is None else self._prefetcher()
        if prefetcher is not None and prefetcher.ahead:
            return prefetcher.state_dict()  # type: ignore[no-any-return]
        return self.state_at(self.position)

    def state_at(self, position: Any) -> dict[str, Any]:
        """Return the state at `position` of the iteration, at most 64 batches ago."""
        raise NotImplementedError


class Epochs(EpochsBase):
    """Runs the epochs of a loader, as batches on the host.

    Args:
        source: decides the ids of each epoch.
        options: of the pools.
        seeds: of the loader.
        counts: of the loader.
        with_ids, pin: see `output.delivery`.
        persistent: keep the pool between epochs. An iteration then ends the previous one.
        tuner: changes the options between epochs (`tuned`): see `AutoCache`; or None.

    Attributes:
        kept: the pool that is kept between epochs, or None.
    """

    def __init__(
        self,
        source: EpochSource,
        options: Options,
        seeds: Seeds,
        counts: Counts,
        *,
        with_ids: bool,
        pin: bool,
        persistent: bool,
        tuner: Any,
    ) -> None:
        self.source, self.options, self.counts = source, options, counts
        self._seeds, self._with_ids, self._pin = seeds, with_ids, pin
        self._persistent, self._tuner = persistent, tuner
        self._uncached = options.reader
        self._epoch: int | None = None  # of the next iteration, set by the user or a state
        self._resume: Position | None = None
        self._progress: Progress | None = None
        self._begin_process()

    def _begin_process(self) -> None:
        """Begin without pools and passes; in a forked child, those that there are belong to the parent."""
        self._process = os.getpid()
        self.kept: WorkerPool | None = None
        self._kept_options: Options | None = None
        # Replaced, never changed: any thread may call `stats`.
        self._pools: list[weakref.ref[WorkerPool]] = []
        self._passes: list[weakref.ref[Pass | PlainPass]] = []

    def __len__(self) -> int:
        return self.source.num_batches(self.next_epoch if self._progress is None else self._progress.number)

    def adopt(self, options: Options, source: EpochSource, generator: torch.Generator | None, *, pin: bool) -> None:
        """Use other arguments from the next iteration on."""
        if source is not self.source:
            self._epoch = self.next_epoch
            self.source.close()
            self.source = source
        if options.reader is not self.options.reader:
            self._uncached = options.reader
        self.options, self._pin, self._seeds.generator = options, pin, generator

    @property
    def seed(self) -> int | None:
        """The seed of order and augmentation; None before it is drawn."""
        return self._seeds.seed

    # -- iterations ---------------------------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch."""
        return self.source.next_epoch if self._epoch is None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which begins at its start."""
        self.source.set_epoch(epoch)
        self._epoch = epoch
        self._resume = self._progress = self._prefetcher = None

    def next_ids(self, order: Order, epoch: int | None) -> Ids:
        """Begin an epoch of the loader's own order, by default the next one, and return its ids.

        For an iteration over the sampler that the loader shows, such as that of a loader which skips the first batches.
        """
        if order.shuffles:
            seed = self._seeds.draw(new_workers=False)
            self._set_seed(seed)
            order.set_seed(seed)
        if epoch is None and getattr(self.source, "order", self.source) is order:
            epoch, self._epoch, self._resume = self.next_epoch, None, None
        number = order.next_epoch if epoch is None else epoch
        order.begin(number, None)
        return order.ids(number)

    def _begin(self, prefetcher: Any) -> Pass | PlainPass:
        if self._process != os.getpid():
            self._begin_process()
        source = self.source
        source.check_ranks()
        resume, self._resume = self._resume, None
        epoch = self.next_epoch
        plan = source.begin(epoch, resume)
        seed = self._seeds.draw(new_workers=not self._has_workers())
        source.set_seed(seed)
        self._follow_data()
        plain = prefetcher is None and self._is_plain()
        if not plain or self._tuner is not None:
            self._set_seed(seed)
        if self._tuner is not None:
            had_workers = self._has_workers()
            self.options = self._tuner.tuned(self.options)
            if had_workers and not self._has_workers():
                self._seeds.renew()
            plain = prefetcher is None and self._is_plain()
        options = self.options
        self.counts["num_workers"] = options.workers
        if self._persistent:
            self._end_passes()
        repeats = None if source.planned or plain else Repeats(resume.repeats or () if resume else ())
        batches = _without_first(plan.batches, plan.skip, repeats) if plan.skip else plan.batches
        progress = self._progress = Progress(batches, epoch, plan.first, plan.dealt, repeats)
        self._prefetcher = None if prefetcher is None else weakref.ref(prefetcher)
        self._epoch = None
        deliver = delivery(with_ids=self._with_ids, weigh=plan.on_delivered, pin=self._pin)
        begun: Pass | PlainPass
        if plain:
            batch = PlainBatches(options.reader, options.collate, options.single, options.skip)
            end = self._end_of(plan, progress, None, options.reader.settings.note)
            begun = PlainPass(batch, progress, self.counts, self, deliver, end, options.log, log_steps=True)
        else:
            pool = self._take_pool(None if prefetcher is None else prefetcher.pin)
            end = self._end_of(plan, progress, pool, pool.note_settings)
            begun = Pass(pool, progress, self, deliver, end, log_steps=prefetcher is None)
        self._passes = [*(known for known in self._passes if known() is not None), weakref.ref(begun)]
        return begun

    def _is_plain(self) -> bool:
        """Whether batches are made as torch's loader makes them without workers."""
        options = self.options
        reader = options.reader
        if options.workers or options.remote is not None or reader.cache is not None or not reader.direct:
            return False
        # A data set of stallfree's, and one that `cache="auto"` has made, caches at least the files that samples open.
        cached = None if self._tuner is None else self._tuner.cached
        return cached is None and not isinstance(getattr(options.dataset, "reader", None), Reader)

    def _end_of(
        self, plan: EpochPlan, progress: Progress, pool: WorkerPool | None, note_settings: Callable[[], None]
    ) -> Callable[[bool], None]:
        """Return the function that is called at the end of a pass, with whether the epoch is exhausted."""

        def end(exhausted: bool) -> None:
            if exhausted and self._progress is progress:
                self._progress = None
            note_settings()
            plan.end()
            if pool is not None and pool is not self.kept:
                pool.close()

        return end

    def _follow_data(self) -> None:
        """Adopt changes of the data set. A cache keeps its samples, and warns."""
        reader = self.options.reader
        reader.follow()
        if reader.cache is not None:
            if reader.cache.tier is not None:
                reader.cache.tier.begin_epoch()
            reader.check_settings()
        elif self._tuner is None and reader.settings.changes():
            divided = reader_of(self.options.dataset, divide=self.options.workers > 0)
            self.options = replace(self.options, reader=divided)

    def _set_seed(self, seed: int) -> None:
        self.source.set_seed(seed)
        if seed != self.options.seed:
            self.options = replace(self.options, seed=seed)

    # -- pools and passes ---------------------------------------------------------------------------------------------

    def _has_workers(self) -> bool:
        """Whether persistent workers with the present options exist, so that an iteration starts none."""
        kept = self.kept
        return kept is not None and self._kept_options is self.options and not kept.closed

    def _take_pool(self, pin: Callable[[Any], Any] | None) -> WorkerPool:
        """Return the pool of the next iteration. `pin` registers memory with a device; set by a prefetcher."""
        pool = self.kept
        if pool is None or not self._has_workers():
            if pool is not None:
                pool.close()
            pool = WorkerPool(self.options, self._seeds.base, self.counts)
            self._pools = [*map(weakref.ref, self._living()), weakref.ref(pool)]
            if self._persistent:
                self.kept, self._kept_options = pool, self.options
        pool.counts_waits = pin is None
        if pin is not None:
            pool.ring.slots.pin = pin
        return pool

    def _living(self) -> list[WorkerPool]:
        return [pool for known in self._pools if (pool := known()) is not None]

    def _end_passes(self) -> None:
        for known in self._passes:
            if (one := known()) is not None:
                one.close()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def position(self) -> tuple[Progress, int] | None:
        """The position of the iteration for `state_at`, including batches taken ahead. None between iterations."""
        return None if self._progress is None else (self._progress, self._progress.handed_out)

    def state_at(self, position: tuple[Progress, int] | None) -> dict[str, Any]:
        """The state at `position` of the iteration, at most 64 batches ago."""
        if position is None:
            epoch, left = self.next_epoch, self._resume or Position()
        else:
            progress, batches = position
            epoch = progress.number
            left = progress.position(batches, None if self.source.planned else self._endless(epoch))
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "seed": self.seed,
            "order": self.source.describe(),
            **vars(left),
            **self.source.state_dict(),
        }

    def _endless(self, epoch: int) -> Callable[[int, int], bool]:
        """Whether a sampler counts as endless: it has more ids left than there are samples, and more than it says."""
        most, known = max(_MANY, len(self.options.reader.source)), 0
        with contextlib.suppress(TypeError, NotImplementedError):  # it has no length
            known = self.source.num_batches(epoch)
        return lambda ids, batches: ids > most and batches > known

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises `InputError` for a state that does not match."""
        check_state(state, self.source.describe())
        self._seeds.restore(state["seed"])
        self.source.load_state_dict(state)
        if state["seed"] is not None:
            self._set_seed(state["seed"])
        self.set_epoch(state["epoch"])
        self._resume = Position(state["batches"], state["rest"], state.get("dealt"), state.get("repeats"))

    # -- counts -------------------------------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """Return the statistics of the loader since its creation."""
        staging = [pool.ring.bytes for pool in self._living() if not pool.closed]
        return LoaderStats(**({**self.counts, "staging_bytes": sum(staging)} if staging else self.counts))

    def close(self) -> None:
        """End all iterations, and stop their workers. More may be started afterwards."""
        if self._process != os.getpid():
            self._begin_process()
        self.kept = None
        self._end_passes()
        for pool in self._living():
            pool.close()
        self.source.close()
        if self._tuner is not None:  # its cache is closed next
            self.options = replace(self.options, reader=self._uncached)
        if self.options.log is not None:
            self.options.log.flush()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no iterations."""
        nothing: dict[str, Any] = {"kept": None, "_kept_options": None, "_pools": [], "_passes": []}
        return {**self.__dict__, "_progress": None, "_prefetcher": None, **nothing}


def _without_first(batches: Iterator[Ids], count: int, repeats: Repeats | None) -> Iterator[Ids]:
    """`batches` without the first ones, which are counted in `repeats`. They are drawn with the next one."""
    for ids in islice(batches, count):
        if repeats is not None:
            repeats.count(ids)
    yield from batches


def check_state(state: Any, order: dict[str, Any]) -> None:
    """Raise `InputError` unless a loader can resume from `state`.

    Args:
        state: as returned by `state_dict()`.
        order: of the loader, as its source describes it.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if version != STATE_VERSION:
        raise state_format(
            f"the state has version {version!r}, expected {STATE_VERSION}: give what state_dict() of this "
            "release returned"
        )
    missing = {"epoch", "seed", "order", "batches", "rest"} - state.keys()
    if missing:
        raise state_format(f"the state lacks {', '.join(sorted(missing))}: give what state_dict() returned")
    if state["order"] != order:
        raise state_mismatch(f"the state was taken with {state['order']}, this loader has {order}: give the same")


def _check_seed(restored: int | None, given: int | None) -> None:
    """Raise `InputError` if the seed of a state differs from that of the loader. None: there is none."""
    if None not in (restored, given) and restored != given:
        raise state_mismatch(
            f"the state was taken with seed={restored}, this loader has seed={given}: give the same, or none"
        )
