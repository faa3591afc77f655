"""`DataLoader`: the interface of `torch.utils.data.DataLoader`, without its stalls."""

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Generic

import torch.utils.data
from torch.utils.data import default_collate, default_convert

from stallfree.datasets.epoch_source import EpochSource, SourceSetup
from stallfree.errors import argument_conflict
from stallfree.ipc.process import context_of
from stallfree.loader.arguments import WAIT_SECONDS, as_int, check_arguments, check_settings, seed_of, shown_by
from stallfree.loader.epochs import Epochs, IterableEpochs, Seeds
from stallfree.loader.event_log import EventLog
from stallfree.loader.order import order_of, shown_samplers
from stallfree.loader.pool import Options, new_counts
from stallfree.pipeline.compose import Transform
from stallfree.raising import short_traceback
from stallfree.sources.mapped import is_iterable
from stallfree.stats import ImportanceStats, LoaderStats
from stallfree.typevars import BatchT_co, Closing
from stallfree.units import parse_size, parse_whole

if TYPE_CHECKING:
    from stallfree.datasets.cached_dataset import CachedDataset


class DataLoader(Closing, torch.utils.data.DataLoader[Any], Generic[BatchT_co]):
    """Batches of a data set, prepared ahead by worker processes in reused shared memory.

    The arguments of `torch.utils.data.DataLoader` have the same meaning; differences and additions are below. It is a
    subclass, so that other libraries accept it as a loader; only the names are inherited.

    Args:
        dataset: a `CachedDataset`, a source, any map-style data set, or an `IterableDataset`: torch's own loader makes
            its batches, with these arguments. What needs ids is refused. Resuming drops the batches that were
            delivered, or uses `load_state_dict` of the data set with `num_workers=0`.
        batch_size: samples per batch; None: single samples, not collated.
        shuffle: use a new order each epoch, a function of (seed, epoch).
        sampler: yields ids (integers). An `ImportanceSampler` decides the samples of an epoch.
        batch_sampler: yields lists of ids.
        num_workers: worker processes; 0 (the default): the training process itself. With `cache="auto"`, the default is
            the number that is fastest. With workers, a cache, a `device` or `on_error="skip"`, random numbers are a
            function of (seed, epoch, id); otherwise they come from the global generators, as with torch's loader.
        collate_fn: creates a batch from a list of samples; torch's default if None. Where samples are seeded, its
            random numbers are a function of (seed, epoch, batch number).
        pin_memory: yield batches in pinned memory if there is an accelerator.
        drop_last: leave out an incomplete last batch.
        timeout: seconds to wait for a batch before `WaitError`; 0 means 300. With `num_workers=0` for sources that are
            fetched in threads: a `dataset[id]` of the training process itself cannot be interrupted.
        worker_init_fn: called in each worker with its number. Workers start with their first task: none starts if all
            batches can be gathered from the cache.
        multiprocessing_context: "fork", "forkserver", "spawn" or a context. If None, Python's default; workers that
            `cache="auto"` chose are forked.
        generator: the seed is drawn from it instead of torch's default generator.
        prefetch_factor: batches in flight per worker; 2 if None.
        persistent_workers: keep the workers between epochs. A new iteration then ends the previous one.
        pin_memory_device: accepted for compatibility.
        in_order: accepted for compatibility; batches are always in order.
        seed: of order and augmentation. If None, that of the `CachedDataset` or `SmartCacheDataset`; else it is drawn
            from torch's generator when the first iteration begins, as torch's loader draws it. Of an
            `IterableDataset`, it seeds the workers' generators.
        with_ids: yield `Batch(data, ids, weights)`. Always the case with an `ImportanceSampler`.
        on_error: "raise" the error of a sample that fails, or "skip" it: it is left out and counted, and the
            first ones are logged. After an error, `next` continues with the next batch.
        staging: bytes for the ring of ready batches, as an int or a string like "256MiB". None: space for the batches
            in flight, and three that may be kept. A batch that does not fit is delivered as a copy.
        device: a device such as "cuda": yield batches on it, copied while the model processes earlier ones (see
            `DevicePrefetcher`, with its defaults). The ring is pinned for that, once with `persistent_workers`;
            `pin_memory` is not needed. None: yield batches on the host.
        cache: "auto": before the first epoch, one process of the host measures some samples in a child process, and
            chooses what is kept in memory by the modelled gain: samples as they are read or prepared, also of the data
            set cut at its transform; the files that it opens; or nothing. One printed line says what is kept, how large
            that is, what an epoch saves, and how many workers there are. See `decision` and `cached`. None: no cache
            but that of a `CachedDataset`.
        capacity: for that cache: bytes as an int or a string like "16GiB", or a share of the free memory like "50%",
            the default. Shared by jobs on this host with equal data and capacity.
        transform: with `cache="auto"`: applied to the samples after the data set's own steps, as in `CachedDataset`.
        ranks: (rank, number of ranks), or "auto" for those of `torch.distributed`, or else of RANK and WORLD_SIZE:
            partition one order among the ranks, as torch's `DistributedSampler` does. Each sample is on one rank. To
            equalize the ranks, the first samples are repeated, or the last ones omitted with `drop_last`. All ranks use
            the seed of rank 0. A state may be loaded with another number of ranks. `(0, 1)`: this process has all
            samples, without the warning about several ranks.
        workers: `RayWorkers`: workers on a Ray cluster, in place of local ones. Not with `cache="auto"`.
        event_log: file that receives a line per event, for `stallfree simulate` to draw: the time and process of each
            fetch, prep and gather of a batch, and of its use in the training loop. It is overwritten here, and complete
            whenever no iteration is active. With a `device` it has no steps.

    Attributes:
        cached: the `CachedDataset` that `cache="auto"` has created; None without it, before the first iteration, and if
            no cache is faster.
        decision: the decision of `cache="auto"` in one line, with its reasons; "" before the first iteration.

    A batch owns its memory while any of its tensors is alive: kept batches are never overwritten. Raises `InputError`
    for invalid arguments; while iterating the errors of the user's code, `WorkerError` and `WaitError`.

    Example:
        ```python
        with sf.DataLoader(dataset, batch_size=4, shuffle=True, cache="auto", capacity="8MiB") as loader:
            for epoch in range(2):
                for images, labels in loader:
                    train(images, labels)
            print(loader.decision)
        ```
    """

    multiprocessing_context: Any = None  # torch's property accepts one only with workers
    _iterator = None

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
        transform: Transform | None = None,
        event_log: str | os.PathLike[str] | None = None,
        ranks: tuple[int, int] | str | None = None,
        workers: Any = None,
    ) -> None:
        # All arguments are attributes: other libraries read them to recreate a loader.
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = bool(shuffle)
        self.sampler = sampler  # type: ignore[assignment]
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers  # type: ignore[assignment]
        self.collate_fn = collate_fn  # type: ignore[assignment]
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.generator = generator
        self.prefetch_factor = prefetch_factor
        self.workers = workers
        self.persistent_workers = persistent_workers
        self.pin_memory_device = pin_memory_device
        self.in_order = in_order
        self.seed = seed
        self.with_ids = with_ids
        self.on_error = on_error
        self.staging = staging
        self.device = device
        self.cache = cache
        self.capacity = capacity
        self.transform = transform
        self.event_log = event_log
        self.ranks = ranks
        self._dataset_kind = int(is_iterable(dataset))
        memory = check_arguments(self)
        self._auto: Any = None
        if memory is not None:
            from stallfree.analysis.auto import AutoCache

            self._auto = AutoCache(dataset, memory, as_int(num_workers), transform)
        self.batch_size = as_int(batch_size) if batch_sampler is None else None
        self.num_workers = (as_int(num_workers) or 0) if self._auto is None else self._auto.num_workers
        self.prefetch_factor = as_int(prefetch_factor) or (2 if as_int(num_workers) else None)  # as torch shows it
        self.seed = seed_of(dataset, seed, generator)
        self.multiprocessing_context = None if multiprocessing_context is None else context_of(multiprocessing_context)
        self.collate_fn = collate_fn or self._default_collate
        self._requested = memory is None or num_workers is not None
        self._staging = None if staging is None else parse_size(staging, "staging")
        self._counts = counts = new_counts() | {"num_workers": self.num_workers}
        self._epochs: Epochs | IterableEpochs
        if self._dataset_kind:
            self._epochs = IterableEpochs(self, counts)
            self.sampler, self.batch_sampler = self._epochs.torchs.sampler, self._epochs.torchs.batch_sampler
        else:
            options = self._options(None, None if event_log is None else EventLog(event_log))
            by_dataset = seed is None and self.seed is not None
            source = self._source(options, sampler, batch_sampler, seed_of_data=by_dataset)
            seeds = Seeds(self.seed, generator, self.shuffle, ranks, f"{len(options.reader.source)}-{self.batch_size}")
            self._epochs = Epochs(source, options, seeds, counts, self._auto)
            self.sampler, self.batch_sampler = shown_samplers(self, self._epochs, sampler, batch_sampler)
        self._prefetcher: Any = None
        if device is not None:
            from stallfree.device.prefetcher import DevicePrefetcher

            self._prefetcher = DevicePrefetcher(self._epochs, device)
            self.device = self._prefetcher.device
        self._adopted = _settable_values(vars(self))
        self.__initialized = True  # see `__setattr__`

    @property
    def _default_collate(self) -> Callable[[Any], Any]:
        return default_convert if self.batch_size is None and self.batch_sampler is None else default_collate

    def _options(self, reader: Any, log: EventLog | None) -> Options:
        """Return the options that follow from the attributes; `reader`: see `Options`."""
        return Options(
            reader=reader,
            dataset=self.dataset,
            collate=None if self.collate_fn is self._default_collate else self.collate_fn,
            single=self._default_collate is default_convert,
            seed=self.seed or 0,
            skip=self.on_error == "skip",
            workers=self.num_workers,
            ahead=(self.prefetch_factor or 2) * max(1, self.num_workers),
            context=context_of(self.multiprocessing_context, requested=self._requested),
            worker_init=self.worker_init_fn,
            seconds=self.timeout or WAIT_SECONDS,
            staging=self._staging,
            log=log,
            remote=self.workers,
            with_ids=self.with_ids,
            pin=self.pin_memory and self.device is None,
            persistent=self.persistent_workers,
        )

    def _source(self, options: Options, sampler: Any, batch_sampler: Any, *, seed_of_data: bool) -> EpochSource:
        setup = SourceSetup(
            samples=len(options.reader.source),
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=self.drop_last,
            ranks=self.ranks,
            seed=self.seed,
            seed_of_data=seed_of_data,
            reader=options.reader,
            auto=self._auto,
            context=options.context,
            counts=self._counts,
            order=order_of,
        )
        return order_of(setup, self.dataset)

    # -- attributes that are set later ---------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises `InputError` for arguments that torch's loader does not allow to be set, and for its own ones."""
        if self.__initialized:
            if name in _FIXED:
                raise argument_conflict(
                    f"{name} of a loader that exists cannot be set: make a DataLoader with {name}=..."
                )
            if name == "multiprocessing_context" and value is not None:
                value = context_of(value)
        object.__setattr__(self, name, value)

    def _adopt(self) -> None:
        """Use the attributes that were set since the last iteration."""
        values = _settable_values(vars(self))
        if all(map(operator.is_, values, self._adopted)):
            return
        check_settings(self)
        self.collate_fn, self.num_workers = self.collate_fn or self._default_collate, operator.index(self.num_workers)
        if self._auto is not None and self.num_workers != self._adopted[_SETTABLE.index("num_workers")]:
            self._auto.use_workers(self.num_workers)
        epochs = self._epochs
        if isinstance(epochs, IterableEpochs):
            epochs.adopt(self)
        else:
            before, source = epochs.options, epochs.source
            same_data = self.dataset is before.dataset and bool(self.num_workers) == bool(before.workers)
            options = self._options(before.reader if same_data else None, before.log)
            if options.reader is not before.reader or not all(map(operator.is_, values[:3], self._adopted)):
                by_batches = self.batch_sampler is not None
                samplers = (None, self.batch_sampler) if by_batches else (self.sampler, None)
                source = self._source(options, *samplers, seed_of_data=False)
            epochs.adopt(options, source, self.generator)
        self._adopted = _settable_values(vars(self))

    # -- epochs -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of an epoch. Raises `TypeError` if the sampler has no length.

        With an `ImportanceSampler`, of the active epoch, else of the next one. Several ranks agree on the next one when
        it begins; until then the length of the last one counts.
        """
        self._adopt()
        return len(self._epochs)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Without it, iterations are consecutive epochs, counted from 0.

        A `SmartCacheDataset`, an `ImportanceSampler`, a `DistributedSampler` and a `CachedDataset` with a seed count
        the epochs of all loaders over them: a new loader continues with the next one. An `IterableDataset` that has
        `set_epoch` is given the number.
        """
        self._epochs.set_epoch(parse_whole(epoch, "epoch", 0))

    @short_traceback
    def __iter__(self) -> Iterator[BatchT_co]:  # type: ignore[override]
        self._adopt()
        return self._begun(iter(self._epochs if self._prefetcher is None else self._prefetcher))

    _get_iterator = __iter__  # type: ignore[assignment]  # subclasses of torch's loader call it

    def _begun(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return `iterator`, whose start has drawn the seed and chosen the workers."""
        self.__dict__["seed"] = self._epochs.seed
        if self.num_workers != self._counts["num_workers"]:
            self.__dict__["num_workers"] = self._counts["num_workers"]
            self._adopted = _settable_values(vars(self))
        return iterator

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by `Accelerator.prepare`, before it prepares this loader."""
        from stallfree.integrations.accelerate import is_prepared

        return is_prepared(DataLoader, partitioned=getattr(self._epochs.source, "partitioned", False))

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Accelerate also sets it."""

    @property
    def cached(self) -> "CachedDataset[Any] | None":
        """See the class."""
        return None if self._auto is None else self._auto.cached

    @property
    def decision(self) -> str:
        """See the class."""
        return "" if self._auto is None else self._auto.decision

    # -- for a prefetcher: see `Epochs` --------------------------------------------------------------------------

    def prefetched_by(self, prefetcher: Any) -> Iterator[BatchT_co]:
        """Host batches for a prefetcher.

        The prefetcher pins the ring and counts the waits of the training loop.
        """
        self._adopt()
        return self._begun(self._epochs.prefetched_by(prefetcher))

    def count_wait(self, seconds: float) -> None:
        """Count a wait of a prefetcher's training loop for a batch."""
        self._epochs.count_wait(seconds)

    def state_snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the present state later, at most 64 batches from now."""
        return self._epochs.state_snapshot()

    # -- state and statistics -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the iteration, for `load_state_dict` in this or another process.

        Resuming yields exactly the remaining samples.

        For the loader's own order the state is two integers. With a `sampler` or `batch_sampler`, which may be random,
        it contains the remaining ids. One that has more ids left than there are samples, and more batches than its
        length says, counts as endless: the state then has the number of batches, and resuming leaves out as many. With
        an `ImportanceSampler`, it fixes the substitutions for the rest of the epoch. Save it in the iterating process,
        between two batches. It is serializable as JSON.

        Example:
            ```python
            for images, labels in loader:
                train(images, labels)
                torch.save(loader.state_dict(), "loader.pt")
            ```
        """
        return self._epochs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state: the next iteration yields the remaining samples.

        Raises `InputError` for an invalid state, and for one of another version, seed or order.

        Example:
            ```python
            loader = sf.DataLoader(dataset, batch_size=4, seed=1)
            batches = iter(loader)
            first = next(batches)
            resumed = sf.DataLoader(dataset, batch_size=4, seed=1)
            resumed.load_state_dict(loader.state_dict())
            assert len(list(resumed)) == 3
            ```
        """
        self._epochs.load_state_dict(state)
        self.__dict__["seed"] = self._epochs.seed

    def update(self, ids: torch.Tensor, losses: torch.Tensor) -> None:
        """Pass the losses of a batch to the `ImportanceSampler`.

        `ids` are `Batch.ids`; `losses` has one loss for each of them.

        Does not wait for their device. Raises `InputError` without an `ImportanceSampler`.
        """
        self._importance("update").update(ids, losses)

    def importance_stats(self) -> ImportanceStats:
        """The cache requests of the plans of the `ImportanceSampler`. Raises `InputError` without one."""
        return self._importance("importance_stats").stats()  # type: ignore[no-any-return]

    def _importance(self, method: str) -> Any:
        source = self._epochs.source
        if not hasattr(source, "update"):
            raise argument_conflict(
                f"{method} is for a loader with sampler=ImportanceSampler(...): give it one, or leave out the call"
            )
        return source

    def stats(self) -> LoaderStats:
        """The statistics of this loader since its creation."""
        return self._epochs.stats()

    def close(self) -> None:
        """Stop all iterations and their workers. The loader may be iterated again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._epochs.close()
        if self._auto is not None:
            self._auto.close()

    __repr__ = shown_by("batch_size", "shuffle", "num_workers", "drop_last", "device")


_SETTABLE = (
    *("dataset", "sampler", "batch_sampler"),  # in subclasses that repeat a sampler
    *("collate_fn", "generator", "multiprocessing_context", "num_workers", "pin_memory", "prefetch_factor", "timeout"),
    "worker_init_fn",
)
"""Attributes that apply from the next iteration on if they are set."""

_settable_values: Callable[[Any], tuple[Any, ...]] = operator.itemgetter(*_SETTABLE)

_FIXED = {*inspect.signature(DataLoader).parameters} - {*_SETTABLE[3:], "pin_memory_device", "in_order"}
"""Arguments whose attributes may not be set."""
