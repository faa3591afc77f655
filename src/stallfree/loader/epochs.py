"""The epochs of a loader: seeds, pools of executors, one pass after another, and the state to resume in mid-epoch.

For iterable data sets, torch's own loader makes the batches; epochs, state and counts are kept beside it.
"""

import contextlib
import copy
import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.utils.data

from stallfree.datasets.epoch_source import EpochSource, Ids, Position, check_state
from stallfree.datasets.ranks import agreed, has_process_group, numbered, rank_and_count
from stallfree.datasets.reader import Reader
from stallfree.errors import state_mismatch
from stallfree.loader.order import Order, Repeats
from stallfree.loader.pool import Counts, Options, WorkerPool
from stallfree.loader.run import EpochPass, Pass, PlainPass, Progress
from stallfree.pipeline.randomness import draw_seed, sample_seed
from stallfree.stats import LoaderStats

STATE_VERSION = 1

_MANY = 1024
"""Number of ids that a sampler may always have left without counting as endless."""


_OF_WORKERS = {"timeout", "multiprocessing_context", "prefetch_factor"}
_HANDED_ON = {*inspect.signature(torch.utils.data.DataLoader).parameters} - {"shuffle", "sampler", "batch_sampler"}
"""Arguments that are handed on to torch's loader; those of workers only if there are any."""


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
        seed = new if self.seed is None else self.seed
        if self._name and rank_and_count(self._ranks)[1] > 1 and (self.seed is None or has_process_group()):
            seed = agreed(seed if self._given is None else self._given, self._name)
            _check_seed(self._restored, seed)
            self._given = None if self._given is None else seed
        self.seed, self._name = seed, ""
        return seed


class EpochsBase:
    """The epochs of a loader, and what a `DevicePrefetcher` uses of it.

    It begins an iteration with `prefetched_by`, takes a `state_snapshot` after each batch, and counts the waits of the
    training loop (`count_wait`).

    Attributes:
        counts: of the loader.
        kept: the pool that is kept between epochs, or None.
    """

    kept: WorkerPool | None = None
    _progress: Any = None  # of the last iteration
    _prefetcher: weakref.ref[Any] | None = None

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        # Replaced, never changed: any thread may call `stats`.
        self._passes: list[weakref.ref[EpochPass]] = []

    def __iter__(self) -> Iterator[Any]:
        return self.prefetched_by(None)

    def prefetched_by(self, prefetcher: Any) -> Iterator[Any]:
        """Begin an iteration for a prefetcher; None: for the training loop."""
        begun = self._begin(prefetcher)
        self._passes = [*map(weakref.ref, self._living()), weakref.ref(begun)]
        self._prefetcher = None if prefetcher is None else weakref.ref(prefetcher)
        return begun

    def _begin(self, prefetcher: Any) -> EpochPass:
        raise NotImplementedError

    def _living(self) -> list[Any]:
        return [one for known in self._passes if (one := known()) is not None]

    def _end_passes(self) -> None:
        for one in self._living():
            one.close()

    @property
    def _active(self) -> Any:
        """The progress of the last iteration; None if it is exhausted."""
        return None if self._progress is None or self._progress.exhausted else self._progress

    def count_wait(self, seconds: float) -> None:
        """Count a wait of a prefetcher's training loop for a batch."""
        self.counts["wait_seconds"] += seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch delivered to the training loop."""
        prefetcher = None if self._prefetcher is None else self._prefetcher()
        if prefetcher is not None and prefetcher.position is not None:
            return prefetcher.state_dict()  # type: ignore[no-any-return]
        return self.state_snapshot()()

    def state_snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the present state later, at most 64 batches from now.

        That state includes the batches that a prefetcher has taken ahead.
        """
        raise NotImplementedError

    def stats(self) -> LoaderStats:
        """Return the statistics of the loader since its creation."""
        pools = {getattr(one, "pool", None) for one in self._living()} | {self.kept}
        staging = [pool.ring.bytes for pool in pools if pool is not None and not pool.closed]
        return LoaderStats(**({**self.counts, "staging_bytes": sum(staging)} if staging else self.counts))

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no iterations."""
        return {**vars(self), "_passes": [], "_progress": None, "_prefetcher": None, "kept": None}


class Epochs(EpochsBase):
    """Runs the epochs of a loader, as batches on the host.

    Args:
        source: decides the ids of each epoch.
        options: of the loader.
        seeds: of the loader.
        counts: of the loader.
        tuner: changes the options between epochs (`tuned`): see `AutoCache`; or None.
    """

    def __init__(self, source: EpochSource, options: Options, seeds: Seeds, counts: Counts, tuner: Any) -> None:
        super().__init__(counts)
        self.source, self.options, self._seeds, self._tuner = source, options, seeds, tuner
        self._epoch: int | None = None  # of the next iteration, set by the user or a state
        self._resume: Position | None = None

    def __len__(self) -> int:
        return self.source.num_batches(self.next_epoch if self._active is None else self._active.number)

    def adopt(self, options: Options, source: EpochSource, generator: torch.Generator | None) -> None:
        """Use other arguments from the next iteration on."""
        if source is not self.source:
            self._epoch = self.next_epoch
            self.source.close()
            self.source = source
        self.options, self._seeds.generator = options, generator

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

    def _begin(self, prefetcher: Any) -> EpochPass:
        source = self.source
        source.check_ranks()
        resume, self._resume = self._resume, None
        epoch = self.next_epoch
        if self._tuner is not None:
            self._tuner.follow()
        plan = source.begin(epoch, resume)
        self._set_seed(self._seeds.draw(new_workers=not self._has_workers()))
        self._prepare_reader()
        plain, options = prefetcher is None and self._is_plain(), self.options
        self.counts["num_workers"] = options.workers
        if options.persistent:
            self._end_passes()
        repeats = None if source.planned or plain else Repeats(resume.repeats or () if resume else ())
        progress = self._progress = Progress(plan, epoch, repeats)
        self._epoch = None
        if plain:
            return PlainPass(self, progress, options)
        pool = self._take_pool()
        if prefetcher is not None:
            pool.ring.slots.pin = prefetcher.pin
        return Pass(self, progress, options, pool, in_loop=prefetcher is None)

    def _is_plain(self) -> bool:
        """Whether batches are made as torch's loader makes them without workers."""
        options, reader = self.options, self.options.reader
        if options.workers or options.remote is not None or options.skip or reader.cache is not None:
            return False
        # A data set of stallfree's, and one that `cache="auto"` has made, caches at least the files that samples open.
        cached = None if self._tuner is None else self._tuner.cached
        return reader.direct and cached is None and not isinstance(getattr(options.dataset, "reader", None), Reader)

    def _prepare_reader(self) -> None:
        """Adopt changes of the data set. A cache keeps its samples, and warns."""
        tuner = self._tuner
        if tuner is not None:  # which follows changes itself
            self.options = tuner.tuned(self.options)
        reader = self.options.reader
        reader.follow()
        if reader.cache is None:
            if tuner is None and reader.settings.changes():
                self.options = replace(self.options, reader=None)
            return
        if reader.cache.tier is not None:
            reader.cache.tier.begin_epoch()
        if tuner is None:
            reader.check_settings()

    def heed_loop(self) -> Reader:
        """Heed what the loop has changed of the data set; return the reader for what is left of the epoch."""
        reader: Reader = self.options.reader
        if self._tuner is None:
            reader.check_settings()
            return reader
        return self._tuner.follow() or reader

    def _set_seed(self, seed: int) -> None:
        self.source.set_seed(seed)
        if seed != self.options.seed:
            self.options = replace(self.options, seed=seed)

    # -- the pool that is kept ----------------------------------------------------------------------------------------

    def _has_workers(self) -> bool:
        """Whether persistent workers with the present options exist, so that an iteration starts none."""
        return self.kept is not None and self.kept.options is self.options and not self.kept.closed

    def _take_pool(self) -> WorkerPool:
        """Return the pool of the next iteration."""
        if self.kept is not None:
            if self._has_workers():
                return self.kept
            self.kept.close()
        pool = WorkerPool(self.options, self._seeds.base, self.counts)
        self.kept = pool if self.options.persistent else None
        return pool

    # -- state --------------------------------------------------------------------------------------------------------

    def state_snapshot(self) -> Callable[[], dict[str, Any]]:
        """See `EpochsBase`."""
        active = self._active
        return partial(self._state, active, 0 if active is None else active.handed_out)

    def _state(self, progress: Progress | None, batches: int) -> dict[str, Any]:
        """Return the state after so many batches of an iteration; None: between iterations."""
        if progress is None:
            epoch, left = self.next_epoch, self._resume or Position()
        else:
            epoch, batches_known = progress.number, 0
            with contextlib.suppress(TypeError, NotImplementedError):  # the sampler has no length
                batches_known = self.source.num_batches(epoch)
            limits = max(_MANY, len(self.options.reader.source)), batches_known
            left = progress.position(batches, None if self.source.planned else limits)
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "seed": self.seed,
            "order": self.source.describe(),
            **vars(left),
            **self.source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises `InputError` for a state that does not match."""
        check_position(state, self.source.describe())
        self._seeds.restore(state["seed"])
        self.source.load_state_dict(state)
        if state["seed"] is not None:
            self._set_seed(state["seed"])
        self.set_epoch(state["epoch"])
        self._resume = Position(state["batches"], state["rest"], state.get("dealt"), state.get("repeats"))

    def close(self) -> None:
        """End all iterations, and stop their workers. More may be started afterwards."""
        self._end_passes()
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.close()
        self.source.close()
        if self._tuner is not None:  # its cache is closed next
            self.options = replace(self.options, reader=None)
        if self.options.log is not None:
            self.options.log.flush()


def check_position(state: Any, order: dict[str, Any]) -> None:
    """Raise `InputError` unless a loader with this `order`, as its source describes it, can resume from `state`."""
    check_state(state, STATE_VERSION, "epoch", "seed", "order", "batches", "rest")
    if state["order"] != order:
        raise state_mismatch(f"the state was taken with {state['order']}, this loader has {order}: give the same")


def _check_seed(restored: int | None, given: int | None) -> None:
    """Raise `InputError` if the seed of a state differs from that of the loader. None: there is none."""
    if None not in (restored, given) and restored != given:
        raise state_mismatch(
            f"the state was taken with seed={restored}, this loader has seed={given}: give the same, or none"
        )


# -- iterable data sets -----------------------------------------------------------------------------------------------


@dataclass
class _StreamProgress:
    """The progress of an iteration.

    Attributes:
        number: of the epoch.
        first: batches of the epoch that were delivered before the iteration.
        taken: batches of the epoch that the iteration has taken from torch's loader, failed ones included.
        state: of the data set, as loaded for the first batch; or None.
        exhausted: whether there are no more batches.
    """

    number: int
    first: int = 0
    taken: int = 0
    state: Any = None
    exhausted: bool = False


class IterableEpochs(EpochsBase):
    """Runs the epochs of a loader of an iterable data set: like `Epochs`, with torch's loader beneath.

    A state holds the number of delivered batches, and resuming takes as many from torch's loader and drops them. A data
    set with `state_dict` and `load_state_dict` resumes by these if it is iterated in this process.

    Args:
        loader: the `stallfree.DataLoader`, whose attributes are the arguments of torch's loader.
        counts: of the loader.

    Attributes:
        torchs: torch's loader.
        seed: of the workers' generators; None: torch's loader draws it.
        source: None; see `Epochs`.
    """

    source = None

    def __init__(self, loader: Any, counts: Counts) -> None:
        super().__init__(counts)
        self.seed = loader.seed
        self._next = _StreamProgress(0)  # of the next iteration
        self._set: int | None = None  # the epoch that the data set was given
        self.adopt(loader)

    def adopt(self, loader: Any) -> None:
        """Use the present attributes of `loader` from the next iteration on."""
        names = _HANDED_ON if loader.num_workers else _HANDED_ON - _OF_WORKERS
        self._arguments = {name: value for name, value in vars(loader).items() if name in names}
        self._arguments["pin_memory"] = loader.pin_memory and loader.device is None  # a prefetcher pins memory itself
        if self.seed is not None:
            self._arguments["generator"] = torch.Generator()
        self.counts["num_workers"] = loader.num_workers
        self.torchs = torch.utils.data.DataLoader(**self._arguments)

    def __len__(self) -> int:
        return len(self.torchs)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for the data set too if it has `set_epoch`."""
        dataset = self._arguments["dataset"]
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
            self._set = epoch
        self._next = _StreamProgress(epoch)
        self._progress = self._prefetcher = None

    def _begin(self, prefetcher: Any) -> EpochPass:
        progress = self._next
        if self._arguments["persistent_workers"]:  # an iteration has the workers of the previous one
            self._end_passes()
        if progress.state is not None:
            self._arguments["dataset"].load_state_dict(copy.deepcopy(progress.state))
        if self.seed is not None:
            self._arguments["generator"].manual_seed(sample_seed(self.seed, progress.number, 0))
        begun = _TorchPass(self, progress, in_loop=prefetcher is None)
        self._progress, self._next = progress, _StreamProgress(progress.number + 1)
        return begun

    # -- state --------------------------------------------------------------------------------------------------------

    def state_snapshot(self) -> Callable[[], dict[str, Any]]:
        """See `EpochsBase`."""
        progress = self._active or self._next
        of_dataset, dataset = progress.state, self._arguments["dataset"]
        here = progress.taken > progress.first and not self._arguments["num_workers"]
        if here and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
            of_dataset = copy.deepcopy(dataset.state_dict())
        state = {
            "version": STATE_VERSION,
            "epoch": progress.number,
            "seed": self.seed,
            "order": self._describe(),
            "batches": max(progress.first, progress.taken),
            "rest": None,
            "dataset": of_dataset,
            "dataset_epoch": self._set,
        }
        return lambda: state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises `InputError` for a state that does not match."""
        check_position(state, self._describe())
        if state["dataset_epoch"] is not None:
            self.set_epoch(state["dataset_epoch"])
        batches, of_dataset = state["batches"], state["dataset"]
        taken = 0 if of_dataset is None else batches
        self._next = _StreamProgress(state["epoch"], batches, taken, of_dataset)
        self._progress = self._prefetcher = None

    def _describe(self) -> dict[str, Any]:
        return {"seed": self.seed, **{name: self._arguments[name] for name in ("batch_size", "num_workers")}}

    def close(self) -> None:
        """End all iterations and their workers. More may be started afterwards."""
        self._end_passes()
        if self.torchs._iterator is not None:  # that of persistent workers
            self.torchs._iterator._shutdown_workers()  # type: ignore[attr-defined]
        self.torchs = torch.utils.data.DataLoader(**self._arguments)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"torchs": torch.utils.data.DataLoader(**self._arguments)}


class _TorchPass(EpochPass):
    """One pass over torch's loader. The batches that were delivered before the pass are dropped."""

    def __init__(self, epochs: IterableEpochs, progress: _StreamProgress, *, in_loop: bool) -> None:
        self._batches: Any = iter(epochs.torchs)
        super().__init__(epochs, progress, in_loop=in_loop)

    def _take(self) -> tuple[Any, Any]:
        begun, progress = time.monotonic(), self.progress
        while True:
            try:
                batch = next(self._batches)
            except Exception as error:  # torch's loader continues with the following batch
                progress.taken += not isinstance(error, StopIteration)
                raise
            progress.taken += 1
            if progress.taken > progress.first:
                break
        self.counts["batches"] += 1
        if self._in_loop:
            self.counts["wait_seconds"] += time.monotonic() - begun
        return batch, None

    def _stop(self) -> None:
        batches, self._batches = self._batches, None
        if hasattr(batches, "_shutdown_workers") and not batches._persistent_workers:
            batches._shutdown_workers()  # an exception may keep the iterator alive
