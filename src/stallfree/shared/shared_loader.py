"""`SharedLoader`: jobs on one host that train on the same data share its preparation."""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic

from torch.utils.data import default_collate

from stallfree.datasets.epoch_source import SourceSetup, check_state
from stallfree.datasets.ranks import find_ranks, job_name
from stallfree.datasets.reader import reader_of
from stallfree.datasets.smart_cache import SmartCacheDataset
from stallfree.errors import InputError, argument_conflict, object_closed, state_mismatch
from stallfree.ipc import process
from stallfree.loader import arguments, pool
from stallfree.loader.messages import FAILED, NOTHING, Ids
from stallfree.loader.order import Order
from stallfree.loader.run import delivery
from stallfree.pipeline.fingerprint import fingerprint, tolerant
from stallfree.pipeline.randomness import Randomness, draw_seed
from stallfree.platform import need_linux
from stallfree.raising import note_samples, raisable, short_traceback
from stallfree.shared import coordinator, link, member
from stallfree.shared.rebatching import Rebatching
from stallfree.stats import SharedStats
from stallfree.typevars import BatchT_co, Closing
from stallfree.units import parse_size, parse_whole

_STATE_VERSION = 3


class SharedLoader(Closing, Generic[BatchT_co]):
    """A loader whose batches are prepared once for all jobs of a `group`.

    The jobs run on one host and give the same `group`.

    Used in each job like a `DataLoader`. The first job starts a coordinator process, which runs the workers and holds
    the ring of ready batches; the other jobs find it by the group's name. Each job gets every sample exactly once per
    epoch, with that epoch's augmentation, and all jobs get the same batches. This is the coordinated prep of CoorDL
    (Mohan et al., VLDB 2021, section 4.3), with leases instead of hand-out counts, and with failure handling.

    Jobs may join, leave and die at any time. A job that joins begins with the next epoch. When the coordinator ends
    with the job that started it, or dies, the next job that notices starts another. A batch is a function of (seed,
    epoch, ids), so none is lost or repeated. A job is in the group from its first iteration until `close`, or until the
    loader is freed. A slow job holds up the others when the ring is full of batches that it has not taken. If it does
    so for half of `timeout`, it is dropped: in the middle of an epoch its loop raises `WaitError`, otherwise it joins
    again. So close the loader if the process continues after training. Used as a context manager, the loader is closed
    even if the frame of a failed or pruned trial is kept alive, as Optuna does.

    A job's changes to the tensors of its batch are invisible to other jobs. A copy of the loader, also in another
    process, is another job of the group. A job has one iteration at a time: a new one ends the last one, whose next
    batch is an `InputError`.

    Args:
        dataset: a `CachedDataset`, a source, or any map-style data set, the same in all jobs.
        group: name of the group: letters, digits, `.`, `_` and `-`, not starting with `.` or `-`.
        batch_size: samples per batch of this job (of each rank, if the job has several). It may differ between jobs:
            a multiple or a divisor of that of the first job, times its ranks.
        shuffle: shuffle in each epoch; the order is a function of (seed, epoch).
        num_workers: worker processes of the group, 1 or more. The first job decides.
        collate_fn: makes a batch of a list of samples; torch's default if None. Any other one requires that all jobs
            have the same batch size, and no ranks.
        drop_last: drop an incomplete last batch; the same in all jobs.
        pin_memory: yield batches in pinned memory, if there is an accelerator.
        timeout: seconds to wait for a batch, while no job of the group gets one, before `WaitError`; 0 means 300.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: "fork", "forkserver", "spawn" or a context; Python's default if None.
        prefetch_factor: batches in flight per worker; 2 if None. The first job decides.
        seed: seed of order and augmentation. If None, that of the `CachedDataset`, or that of the group: the first job
            that iterates draws one from torch's generator.
        with_ids: yield `Batch(data, ids, weights)`.
        on_error: "raise" the error of a sample that cannot be read in every job, or "skip" the sample. If all of
            a rank's samples of a batch are skipped, that rank has one batch less than the others.
        staging: bytes for the ring of ready batches, as an int or a string such as "256MiB". None: twice `num_workers`
            batches, and four for each job in the group. The first job decides.
        job_transform: applied in this process to each batch of this job, after the shared prep. Its random draws are a
            function of (seed, epoch, number of the batch).

    Attributes:
        group: the group's name.
        num_workers: as given.

    The ranks of a job come from `torch.distributed` if it is initialised, else from the variables `RANK` and
    `WORLD_SIZE`. Each rank gets its rows of every `batch_size` times `WORLD_SIZE` samples, and all ranks get the same
    number of batches.

    Raises `InputError` for invalid arguments, and for a job whose data set, transform, seed or batches differ from the
    group's. Iteration raises the errors of the user's code, `WorkerError` and `WaitError`.

    Example:
        ```python
        with sf.SharedLoader(dataset, group="search-7", batch_size=4, shuffle=True) as loader:
            for images, labels in loader:  # the same lines in each job
                train(images, labels)
        ```
    """

    @short_traceback
    def __init__(
        self,
        dataset: Any,
        *,
        group: str,
        batch_size: int = 1,
        shuffle: bool = False,
        num_workers: int = 1,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        prefetch_factor: int | None = None,
        seed: int | None = None,
        with_ids: bool = False,
        on_error: str = "raise",
        staging: int | str | None = None,
        job_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        need_linux("SharedLoader", "use DataLoader, one in each job")
        arguments.check_numbers(num_workers, batch_size, timeout, prefetch_factor)
        arguments.check_functions(collate_fn, worker_init_fn, on_error)
        parse_whole(num_workers, "num_workers", 1)
        parse_whole(batch_size, "batch_size", 1)
        if job_transform is not None and not callable(job_transform):
            raise InputError(f"job_transform={job_transform!r} cannot be called: give a function, or None")
        if isinstance(dataset, SmartCacheDataset):
            raise argument_conflict(
                "a SmartCacheDataset is a window of one job over the data: give the data set that it wraps, or a "
                "CachedDataset of that"
            )
        self.dataset, self.group, self.num_workers = dataset, group, num_workers
        self.batch_size, self.drop_last, self.with_ids = batch_size, bool(drop_last), with_ids
        self.seed = arguments.seed_of(dataset, seed, None)
        self._shuffle, self._ranks = bool(shuffle), find_ranks()
        self._transform, self._drawing = job_transform, Randomness(job_transform)
        options = pool.Options(
            reader=reader_of(dataset),
            dataset=dataset,
            collate=None if collate_fn is default_collate else collate_fn,
            single=False,
            seed=self.seed or 0,
            skip=on_error == "skip",
            workers=num_workers,
            ahead=(prefetch_factor or 2) * num_workers,
            context=process.context_of(multiprocessing_context),
            worker_init=worker_init_fn,
            seconds=timeout or arguments.WAIT_SECONDS,
            staging=None if staging is None else parse_size(staging, "staging"),
            log=None,
            with_ids=with_ids,
            pin=pin_memory,
        )
        self._deliver = delivery(options, None)
        self._samples = len(options.reader.source)
        self._member = self._join(options)
        self._counts = pool.new_counts()
        self._next_epoch, self._resumed, self._done = 0, False, 0
        self._pass: Callable[[], EpochIterator | None] = lambda: None  # the last one begun
        self._end = process.finalize_here(self, self._member.close)

    def _join(self, options: pool.Options) -> member.Member:
        source, ranks, steps = options.reader.source, self._ranks, getattr(self.dataset, "steps", None)
        with tolerant():  # the group is identified by name: objects without a fingerprint are assumed to be equal
            same = {
                "the data set": fingerprint(source.fingerprint()),
                "the transform": fingerprint(source.pipeline if steps is None else steps),
                "collate_fn": fingerprint(options.collate),
                "seed": self.seed,
                "shuffle": self._shuffle,
                "drop_last": self.drop_last,
                "on_error": "skip" if options.skip else "raise",
                "protocol": member.PROTOCOL,
            }
        chunk = self.batch_size * ranks.count
        decided = {"workers": options.workers, "ahead": options.ahead, "staging": options.staging}
        terms = member.Terms(same, chunk, decided)
        group = member.Group(self.group, terms, self.batch_size, ranks.count, options.collate is None)
        setup = coordinator.GroupSetup(
            folder=group.folder,
            options=replace(options, **group.terms.options),
            base_seed=0,
            order=Order(SourceSetup(self._samples, group.terms.chunk, self._shuffle, seed=self.seed)),
        )
        job = f"{os.getpid()}-{id(self)}" if ranks.count == 1 else job_name() or f"child of {os.getppid()}"
        return member.Member(group, setup, link.Hello(job, ranks.here))

    # -- epochs -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The group's epoch in the active pass, or in the next one.

        It may rise by more than one, if the group was further on.
        """
        active = self._active_pass
        return self._next_epoch if active is None else active.epoch

    @property
    def _active_pass(self) -> "EpochIterator | None":
        iteration = self._pass()
        return None if iteration is None or iteration.ended else iteration

    def _rebatching(self, epoch: int) -> Rebatching:
        order, chunk = self._member.setup.order, self._member.group.terms.chunk
        return Rebatching(
            *(self._samples, chunk, self.batch_size, self._ranks, self.drop_last),
            planned=lambda number: next(iter(order.batches(epoch, number))),
        )

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self._rebatching(0))

    @short_traceback
    def __iter__(self) -> Iterator[BatchT_co]:
        if not self._end.alive:
            raise object_closed(f"the loader of the group {self.group!r} is closed: make a new one")
        joining, setup = self._member, self._member.setup
        process.start_method(setup.options.context)  # a script without a main guard would wait for itself
        if active := self._active_pass:
            active.close(replaced=True)
        cache = setup.options.reader.cache
        if cache is not None and cache.tier is not None:
            cache.tier.begin_epoch()
        drawn = draw_seed()
        if self._shuffle:
            draw_seed()  # torch's RandomSampler draws a second seed
        if not joining.joined:
            setup.base_seed = drawn
            if self.seed is None:
                self._set_seed(joining.group.agree_on_seed(drawn, drawn=True))
            batches = len(setup.order)
            if self._resumed:
                joining.join(self._next_epoch * batches + self._rebatching(0).first_chunk(self._done))
            else:
                self._next_epoch = joining.join() // batches
        iteration = EpochIterator(self, self._next_epoch, self._done)
        self._resumed, self._done = False, 0
        self._pass = weakref.ref(iteration)
        return iteration

    def _set_seed(self, seed: int) -> None:
        setup = self._member.setup
        self.seed = setup.order.seed = seed
        setup.options = replace(setup.options, seed=seed)

    def _finish_batch(self, epoch: int, number: int, data: Any, ids: Ids) -> Any:
        """Return batch `number` of an epoch as this job's loop receives it."""
        if self._transform is not None:
            with self._drawing as drawing:
                drawing.seed(self._member.setup.options.seed, epoch, -1 - number)
                try:
                    data = self._transform(data)
                except Exception as error:
                    note_samples(error, ids.tolist(), "transforming")
                    raise raisable(error)  # noqa: B904  # its cause is set
        self._counts["batches"] += 1
        self._counts["samples"] += len(ids)
        return data if self._deliver is None else self._deliver(data, ids)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the job's position: the group's epoch and the number of batches already yielded.

        It is serializable as JSON.
        """
        active = self._active_pass
        done = self._done if active is None else active.done
        return {"version": _STATE_VERSION, "epoch": self.epoch, "batches": done, "terms": self._terms()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned; call it before the first iteration.

        A new group starts there. A group that is further on in the same epoch waits until this job has caught up.
        Raises `InputError` for a state of another loader, and after the first iteration; the first iteration raises it
        if the group is in a later epoch.
        """
        if self._member.joined:
            raise state_mismatch("this loader is in its group already: load the state before the first iteration")
        check_state(state, _STATE_VERSION, "epoch", "batches", "terms")
        seed, mine = state["terms"].get("seed"), self._terms()
        if None in (seed, self.seed):
            mine["seed"] = seed
        if state["terms"] != mine:
            raise state_mismatch(f"the state was taken with {state['terms']}, this loader has {mine}: give the same")
        if self.seed is None and seed is not None:
            self._set_seed(self._member.group.agree_on_seed(seed))
        self._next_epoch, self._done, self._resumed = int(state["epoch"]), int(state["batches"]), True

    def _terms(self) -> dict[str, Any]:
        """Return the settings that must be equal for a position to mean the same in two loaders."""
        sizes = {"samples": self._samples, "batch_size": self.batch_size, "ranks": self._ranks.count}
        return {**sizes, "seed": self.seed, "shuffle": self._shuffle, "drop_last": self.drop_last}

    # -- statistics, end, copies --------------------------------------------------------------------------------------

    def stats(self) -> SharedStats:
        """Return the statistics of this job's loader since its creation."""
        joined, workers = self._member, self._member.setup.options.workers
        sizes = {"num_workers": workers, "staging_bytes": joined.staging_bytes}
        return SharedStats(**self._counts | sizes, takeovers=joined.deaths, jobs=joined.jobs)

    def close(self) -> None:
        """Leave the group; batches that are still held stay valid. Idempotent.

        The last job ends its processes.
        """
        if active := self._active_pass:
            active.close()
        self._end()

    def __reduce__(self) -> Any:
        state = self.state_dict() if self._resumed and not self._member.joined else None
        return partial(type(self), **self._arguments), (), state

    __setstate__ = load_state_dict

    __repr__ = arguments.shown_by("group", "batch_size", "drop_last")


class EpochIterator(Iterator[Any]):
    """One epoch of one job. A later one of the same loader ends it.

    Args:
        loader: kept alive as long as this object.
        epoch: the epoch.
        done: number of batches already yielded, if the epoch is resumed.

    Attributes:
        done: number of batches yielded or left out.
        ended: whether the pass has ended.
        epoch: the group's epoch.
    """

    def __init__(self, loader: SharedLoader[Any], epoch: int, done: int) -> None:
        self.ended = self._replaced = False
        self._loader, self._member = loader, loader._member
        self._batches = len(self._member.setup.order)
        self._ready: deque[tuple[int, Any, Ids]] = deque()
        self._begin(epoch, done)

    def _begin(self, epoch: int, done: int) -> None:
        self.epoch, self.done, self._rebatching = epoch, done, self._loader._rebatching(epoch)
        first = epoch * self._batches
        self._next, self._end = first + self._rebatching.first_chunk(done), first + self._rebatching.chunks

    def __len__(self) -> int:
        return len(self._rebatching)

    @short_traceback
    def __next__(self) -> Any:
        if self._replaced:
            raise argument_conflict(
                "a later iteration of this SharedLoader has begun, and ended this one: a job has one at a time. Make "
                "a second loader to go through the data twice at once"
            )
        while not self._ready:
            if self.ended or self._next >= self._end:
                self.close()
                raise StopIteration
            self._take_chunk()
        number, data, ids = self._ready.popleft()
        self.done = number + 1
        return self._loader._finish_batch(self.epoch, number, data, ids)

    def _take_chunk(self) -> None:
        """Take one more chunk and queue the batches that it completes."""
        counts, started = self._loader._counts, time.monotonic()
        try:
            while (result := self._member.take(self._next, self._end)) is None:
                self._begin(self._member.join() // self._batches, 0)
        finally:
            counts["wait_seconds"] += time.monotonic() - started
        result.add_to(counts)
        number, self._next = self._next - self.epoch * self._batches, self._next + 1
        failed = result.status == FAILED
        batches = self._rebatching.feed(number, result.value, NOTHING if failed else result.ids)
        self._ready.extend(batch for batch in batches if batch[0] >= self.done)
        if failed:
            raise result.value

    def close(self, *, replaced: bool = False) -> None:
        """End this pass; notify the group that no more of this epoch is needed. Idempotent.

        If it is `replaced` by a later one, its next batch is an error.
        """
        if not self.ended:
            self.ended, self._replaced = True, replaced
            self._ready.clear()
            self._loader._next_epoch = self.epoch + 1
            if self._member.joined:
                self._member.skip((self.epoch + 1) * self._batches)

    def __del__(self) -> None:
        self.close()
