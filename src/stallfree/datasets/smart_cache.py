"""`SmartCacheDataset`: train on a window of the data set that moves while you train."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import current_process
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from stallfree import errors
from stallfree.cache.capacity import free_memory
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.cached_dataset import FINGERPRINT_CURE, checked_ids, token
from stallfree.datasets.epoch_source import EpochPlan, EpochSource, Ids, Position, SourceSetup, plans_epochs
from stallfree.datasets.probe import example_for, look
from stallfree.datasets.ranks import LocalRanks, find_ranks, job_name, local_ranks, part_of_host, warn_of_ranks
from stallfree.datasets.reader import Reader
from stallfree.datasets.window import Field, FillProcesses, Window, WindowPlan, replace_count
from stallfree.ipc.process import context_of, start_method
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.compose import Compose, Source
from stallfree.pipeline.fingerprint import fingerprint, key_of, tolerant
from stallfree.pipeline.randomness import peek_seed
from stallfree.pipeline.values import payload_bytes
from stallfree.platform import need_linux
from stallfree.raising import described, log, short_traceback
from stallfree.stats import SmartCacheStats
from stallfree.typevars import Closing, MapStyle, SampleT_co
from stallfree.units import format_size, parse_whole

_FORMAT = "smart-2"
_MARGIN = 1.5
_SPARE = 0.9


class SmartCacheDataset(Closing, Dataset[SampleT_co]):
    """A window of `cache_num` samples over `data`, partly replaced after each epoch.

    The samples of the window are kept in memory that all processes of the host share, after the longest deterministic
    run of their transforms; the random rest runs again each time, as a function of (seed, epoch, id). While an epoch
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
    the variables that torchrun, SLURM and the like set, or by their process group (`torch.multiprocessing.spawn`) if it
    exists before; otherwise give them one `name`.

    Args:
        data: a source such as `ImageFolder`, or any map-style data set or list.
        transform: applied to the samples of `data`, split into its deterministic and its random part.
        cache_num: N, the samples of the window; all of them if there are fewer.
        replace_rate: share of the window that is replaced after each epoch, 0 to 1. With 0, for
            validation, nothing is replaced.
        seed: of the order and of the randomness. If None, it follows from the state of torch's generator, which is not
            moved; all ranks on a host have that of the first.
        num_fill_workers: processes that prepare replacements.
        on_late: what happens when not all replacements are ready at the end of an epoch: "partial" replaces those that
            are, and the rest in later epochs; "wait" waits for them. Without a running fill process, all are replaced,
            and prepared as they are asked for.
        on_error: "raise" the error of a sample that cannot be had, or "skip" it: it is left out of its batch and
            counted. `stallfree.DataLoader` has an argument of its own for that.
        shuffle: run over the samples in a random order, else in their own.
        hosts: (number of this host, number of hosts): each has its part of the data. By default what torchrun says.
        name: of the cache.
        multiprocessing_context: how the fill processes start; Python's default if None.

    Attributes:
        dataset: the data set, as given.
        cache: the `SampleCache`.
        cache_num: N.
        replace_num: samples replaced per epoch, if they are ready: ceil(N * replace_rate), or as many as are outside of
            the window.
        window: where the window is in each epoch.

    Raises `InputError` for arguments that cannot be used, `CapacityError` (one of them) for a window that the machine's
    free memory does not hold, the error of a sample when none of the first ones can be had.

    Example:
        ```python
        with sf.SmartCacheDataset(dataset, cache_num=8, replace_rate=0.25) as window:
            loader = sf.DataLoader(window, batch_size=4, shuffle=True)
            for epoch in range(3):  # each of 8 samples, 2 of them new
                for images, labels in loader:
                    train(images, labels)
        ```
    """

    @short_traceback
    def __init__(
        self,
        data: MapStyle[Any],
        transform: Callable[[Any], SampleT_co] | None = None,
        *,
        cache_num: int,
        replace_rate: float = 0.1,
        seed: int | None = None,
        num_fill_workers: int = 1,
        on_late: str = "partial",
        on_error: str = "raise",
        shuffle: bool = True,
        hosts: tuple[int, int] | None = None,
        name: str | None = None,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> None:
        need_linux("SmartCacheDataset", "use DataLoader")
        _check(cache_num, replace_rate, num_fill_workers, on_late, on_error)
        context = context_of(multiprocessing_context)
        if replace_rate:
            start_method(context)  # before anything is created in a process that may start none
        self.dataset, self.on_error = data, on_error
        from stallfree.sources.cut import as_cut_source

        self.source: Source = as_cut_source(data)
        self.seed = None if seed is None else parse_whole(seed, "seed")
        drawn = peek_seed() if self.seed is None else self.seed
        part = part_of_host(hosts)
        total = len(range(part[0], len(self.source), part[1]))
        if not total:
            raise errors.argument_conflict(f"hosts={part}: give fewer hosts than samples, which are {len(self.source)}")
        self.cache_num = min(cache_num, total)
        self.replace_num = replace_count(self.cache_num, replace_rate, total)
        plan = WindowPlan(len(self.source), self.cache_num, self.replace_num, drawn, shuffle, part)
        steps = Compose([self.source.pipeline, *([] if transform is None else [transform])])
        first = look(self.source, steps)
        parts, values = first.parts, first.values(prepared=True)
        self.cache = self._open_cache(plan, list(values.values()), parts.deterministic, name)
        self.reader = Reader(self.source, self.cache, parts.deterministic, parts.random, steps=steps)
        self.window = Window(self.cache, plan, on_late)
        if self.window.epoch < 0:
            self.cache.count_fetch(len(values), payload_bytes([*values.values()]))
            coming = [id for id in values if id in self.window.plan.window(0)]
            self.reader.store(coming, [values[id] for id in coming])
        fillers = num_fill_workers if self.replace_num and not current_process().daemon else 0
        self._fillers = FillProcesses(self.window, self.reader, fillers, context)
        self.start()

    def _open_cache(self, plan: WindowPlan, samples: list[Any], before: Compose, name: str | None) -> SampleCache:
        with tolerant() as unknown:
            key = key_of(
                **{"data set": fingerprint(self.source.fingerprint()), "transforms": before},
                window=repr(dataclasses.replace(plan, seed=0)),
                seed=repr(self.seed),
                format=_FORMAT,
            )
        if unknown and name is None and find_ranks().here > 1:
            raise errors.no_fingerprint(
                f"the ranks of this job share one window, and {unknown[0]} has no fingerprint: {FINGERPRINT_CURE}"
            )
        job = None if unknown else job_name()  # the same in all ranks of one job on this host
        self._alone = job is None and name is None
        own_name = token() if job is None else f"{key[:20]}-smart-{job}"
        example = example_for(samples)
        return SampleCache(
            len(self.source),
            capacity=_capacity(samples, example, plan),
            fingerprint=key,
            name=own_name if name is None else name,
            example=example,
        )

    # -- epochs -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """`cache_num`."""
        self._fillers.look_after()  # samplers ask for the length once per epoch
        return self.cache_num

    def begin_epoch(self, epoch: int) -> Ids:
        """The ids of epoch `epoch`, one for each position.

        Loaders call this; the first call moves the window.

        An epoch that is neither one of the newest nor the next begins where it would if no replacement was ever late.
        Raises `WaitError` if, with `on_late="wait"`, replacements are not ready within 300 s.
        """
        self.reader.check()
        self.reader.follow()
        epoch = parse_whole(epoch, "epoch", 0)
        self._fillers.look_after()
        return self.window.begin(epoch)

    def epoch_source(self, setup: SourceSetup) -> EpochSource:
        """The source of a loader's epochs: the window.

        Its order is the one that the loader would have without it.
        """
        if plans_epochs(setup.sampler):
            raise errors.argument_conflict("a SmartCacheDataset chooses its samples: leave out the ImportanceSampler")
        if setup.ranks is not None and (setup.ranks == "auto" or setup.ranks[1] != 1):
            raise errors.ranks_conflict(
                f"ranks={setup.ranks!r} with a SmartCacheDataset, whose window is that of one host: give "
                "sampler=dataset.rank_sampler() instead"
            )
        return WindowSource(self, setup.make_order(samples=len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next samples.

        For loaders other than stallfree's; they need it only with samplers that repeat positions.
        """
        self.begin_epoch(epoch)
        self.window.set_epoch(epoch)

    # -- samples ------------------------------------------------------------------------------------------------------

    def __getitem__(self, position: int) -> SampleT_co:
        return self._samples(checked_ids([position], self.cache_num), skip=False)[0]

    def __iter__(self) -> Iterator[SampleT_co]:
        return map(self.__getitem__, range(len(self)))

    def __getitems__(self, positions: Sequence[int]) -> list[SampleT_co]:
        """The samples at several positions, all of one epoch. With `on_error="skip"` there may be fewer.

        Raises the error of one that cannot be had, and with "skip" if none can; `IdError`.
        """
        return self._samples(checked_ids(positions, self.cache_num), skip=self.on_error == "skip")

    def _samples(self, positions: Ids, *, skip: bool) -> list[SampleT_co]:
        self.reader.check()
        epoch, ids = self.window.look_up(positions)
        seed = self.window.plan.seed if self.seed is None else self.seed
        samples = self.reader.finish(self.reader.start(ids), seed, epoch, skip=skip)
        if samples.skipped:
            self.window.count_skipped(len(samples.skipped))
            for error in samples.skipped:
                log.warning("left out a sample: %s", described(error))
            if not samples.values:
                raise samples.skipped[0]
        return samples.values

    # -- by hand ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the fill processes. Has happened already; may be called at any time."""
        self._fillers.start()

    def is_started(self) -> bool:
        """Whether fill processes run, or none is needed."""
        return self._fillers.running or not self.replace_num

    def update_cache(self) -> None:
        """End the epoch. Loaders do that by themselves; may be called twice."""
        self.window.end_epoch()

    def shutdown(self) -> None:
        """Stop the fill processes.

        New samples are prepared as they are asked for, until `start`. May be called twice.
        """
        self._fillers.stop()

    def rank_sampler(self, *, shuffle: bool = True, drop_last: bool = False) -> DistributedSampler[Any]:
        """Splits the window among the ranks of this host.

        They are known from `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, or from the process group, in which all ranks must call
        this. Raises `InputError` if they do not share this window.

        Example:
            ```python
            with sf.SmartCacheDataset(dataset, cache_num=8) as window:
                loader = sf.DataLoader(window, batch_size=4, sampler=window.rank_sampler())
                batches = list(loader)
            ```
        """
        ranks = local_ranks()
        if ranks.count > 1 and self._alone:
            raise errors.ranks_conflict(
                "each rank has a window of its own, because no job was known when the data set was made: make it after "
                "init_process_group(), or give name=, the same in all ranks"
            )
        if ranks.hosts > 1 and self.window.plan.part == (0, 1):
            raise errors.ranks_conflict(
                f"the ranks run on {ranks.hosts} hosts, and this window is over all samples: give "
                f"hosts=(number of this host, {ranks.hosts})"
            )
        return RankSampler(self, ranks, shuffle, drop_last)

    # -- state and statistics -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the window is.

        `load_state_dict` in another process gives the windows that would have come.

        With `stallfree.DataLoader` it is part of the loader's state. It is fit for JSON.
        """
        return self.window.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises `InputError` for the state of another window."""
        self.window.load_state_dict(state, any_seed=self.seed is None)

    def stats(self) -> SmartCacheStats:
        """The counts of the cache and of the window, over all processes."""
        window, header = self.window, self.window.header
        start = window.start(window.epoch)
        return SmartCacheStats(
            **self.cache.stats().__dict__,
            epoch=window.epoch,
            window_start=start,
            replace_num=self.replace_num,
            lag=max(0, window.epoch * self.replace_num - start),
            late_epochs=int(header[Field.LATE]),
            wait_seconds=int(header[Field.WAITED]) / 1e9,
            skips=int(header[Field.SKIPPED]),
        )

    def where(self, id: int) -> str:
        """Where sample `id` of `data` lies, for messages."""
        return self.source.where(id)

    def close(self) -> None:
        """Stop the fill processes and leave the cache. May be called twice.

        The last process to leave removes the cache.
        """
        self.reader.end(f"{self!r} is closed: make a new one to read samples")
        self._fillers.stop()
        self.window.close()
        self.cache.close()

    def __repr__(self) -> str:
        return f"SmartCacheDataset({self.source!r}, cache_num={self.cache_num}, replace_num={self.replace_num})"


def _check(cache_num: Any, replace_rate: Any, num_fill_workers: Any, on_late: Any, on_error: Any) -> None:
    parse_whole(cache_num, "cache_num", 1)
    if isinstance(replace_rate, bool) or not isinstance(replace_rate, (int, float)) or not 0 <= replace_rate <= 1:
        raise errors.InputError(f"replace_rate={replace_rate!r}: give a share of the window, 0 (none is replaced) to 1")
    parse_whole(num_fill_workers, "num_fill_workers", 1)
    for name, value, known in (("on_late", on_late, ("partial", "wait")), ("on_error", on_error, ("raise", "skip"))):
        if value not in known:
            raise errors.InputError(f"{name}={value!r}: use {known[0]!r} or {known[1]!r}")


def _capacity(samples: list[Any], example: Any, plan: WindowPlan) -> int:
    """Return the bytes of a cache for a window and its replacements, estimated from some samples.

    Raises `CapacityError` if free memory does not hold them.
    """
    sizes = [record_size(*encode(value, allow_pickle=True)) for value in samples]
    mean, equal = sum(sizes) / len(sizes), encode(example, allow_pickle=True)[0].fixed and len(set(sizes)) == 1
    each = mean + 80 if equal else 1.13 * mean + 320  # with its share of the index, and rounded up to blocks
    count, beside, free = plan.size + plan.replace, 24 * plan.samples + (1 << 17), free_memory()
    least, most = int(count * each) + beside, int(free * _SPARE)
    if least > most:
        raise errors.capacity_too_large(
            f"cache_num={plan.size} and {plan.replace} replacements of about {format_size(int(mean))} each take "
            f"{format_size(least)}, and {format_size(free)} of memory are free here (of the host and of this control "
            f"group), of which a tenth is left to others: give cache_num={plan.size * most // least} or less, or more "
            "memory"
        )
    return least if equal else min(most, int(count * max(each * _MARGIN, max(sizes) + 320)) + beside)


class WindowSource(EpochSource):
    """Epochs of a `SmartCacheDataset`: `order` says when which position of the window comes."""

    def __init__(self, dataset: SmartCacheDataset, order: EpochSource) -> None:
        self._dataset, self.order = dataset, order
        self.planned = order.planned

    @property
    def knows_ranks(self) -> bool:
        return self.order.knows_ranks

    @property
    def next_epoch(self) -> int:
        return self._dataset.window.next_epoch

    def num_batches(self, epoch: int) -> int:
        return self.order.num_batches(epoch)

    def describe(self) -> dict[str, Any]:
        return self.order.describe()

    def check_ranks(self) -> None:
        if not self.knows_ranks:
            warn_of_ranks(window=True)

    def set_seed(self, seed: int) -> None:
        self.order.set_seed(seed)

    def begin(self, epoch: int, resume: Position | None) -> EpochPlan:
        plan = self.order.begin(epoch, resume)
        if resume is not None and resume.rest is not None:
            return plan  # of ids
        ids = self._dataset.begin_epoch(epoch)
        return dataclasses.replace(plan, batches=(ids[positions] for positions in plan.batches))

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "window" not in state:
            raise errors.state_mismatch(
                "the state has no window: it was taken with a data set that is no SmartCacheDataset. Give the same "
                "data set"
            )
        self._dataset.load_state_dict(state["window"])


class RankSampler(DistributedSampler[Any]):
    """Splits the window among the ranks of this host. Its seed is that of the window, which a state may replace."""

    def __init__(self, dataset: SmartCacheDataset, ranks: LocalRanks, shuffle: bool, drop_last: bool) -> None:
        super().__init__(dataset, num_replicas=ranks.count, rank=ranks.rank, shuffle=shuffle, drop_last=drop_last)
        self._window = dataset.window

    def __iter__(self) -> Iterator[Any]:
        if self.num_replicas == 1 and local_ranks().count > 1:
            raise errors.ranks_conflict(
                "the sampler was made before the process group, and gives each rank all samples: call rank_sampler() "
                "after init_process_group()"
            )
        self.seed = self._window.plan.seed & 0x7FFFFFFF
        return super().__iter__()
