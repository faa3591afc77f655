"""Frozen counts that the analyser, the logs and the tests read alike."""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True)
class CacheStats:
    """Counts of a sample cache, summed over all processes attached to it.

    Processes that have ended are included.

    Attributes:
        hits: samples that were asked for and served.
        misses: samples that were asked for and not resident, changed while they were read, or damaged.
        evictions: records that were dropped to make room.
        rejected: samples that were not stored: no room and no eviction, larger than the cache, or the lock of writers
            was not free in time.
        damaged: records whose checksum or form was wrong; each was dropped and counted as a miss.
        storage_reads: fetches from the source.
        storage_bytes: bytes that these fetches brought.
        resident_items: records in the cache now.
        resident_bytes: their bytes.
        capacity_bytes: the bytes the cache may take, index included.
        used_bytes: the bytes it has taken, index included.
        tier_hits: those of the hits that came from the tier behind memory.
        tier_rejected: new samples that the tier did not store: it is full or failed, or they came too fast.

    Example:
        ```python
        with sf.CachedDataset(dataset, capacity="8MiB") as cached:
            samples = [cached[id] for id in range(len(cached))]
            print(f"{cached.stats().hit_ratio:.0%} hits, {cached.stats().used_bytes} bytes")
        ```
    """

    hits: int
    misses: int
    evictions: int
    rejected: int
    damaged: int
    storage_reads: int
    storage_bytes: int
    resident_items: int
    resident_bytes: int
    capacity_bytes: int
    used_bytes: int
    tier_hits: int
    tier_rejected: int

    @property
    def hit_ratio(self) -> float:
        """Hits over hits and misses; 0 before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


@dataclass(frozen=True)
class SmartCacheStats(CacheStats):
    """Counts of a Smart Cache and of its window, over all processes.

    Attributes:
        epoch: of the newest window; -1 before the first.
        window_start: how many samples have left the window since epoch 0.
        replace_num: samples that should be replaced per epoch.
        lag: samples that should have been replaced by now, and have not been.
        late_epochs: epochs that began without all of their new samples, or waited for them.
        wait_seconds: seconds that epochs waited at their beginning for new samples.
        skips: samples left out because of an error, under loaders other than stallfree's.

    Example:
        ```python
        with sf.SmartCacheDataset(dataset, cache_num=8, replace_rate=0.25) as window:
            batches = list(sf.DataLoader(window, batch_size=4))
            print(window.stats().lag, window.stats().advice)
        ```
    """

    epoch: int
    window_start: int
    replace_num: int
    lag: int
    late_epochs: int
    wait_seconds: float
    skips: int

    @property
    def advice(self) -> str:
        """What to do about late replacements; empty if there were none."""
        if not self.late_epochs:
            return ""
        return (
            f"replacements were late for {self.late_epochs} of {self.epoch} epochs: {self.lag} samples behind, "
            f"{self.wait_seconds:.1f} s waited. Lower replace_rate, or raise num_fill_workers"
        )


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has done since it was made.

    Attributes:
        batches: batches handed out.
        samples: samples in them. With an iterable data set, only batches, waits and workers are counted.
        hits: samples that came from a sample cache.
        misses: samples that were fetched.
        storage_bytes: bytes that the fetches brought; 0 where the training process itself indexes a data set.
        fetch_seconds: seconds that workers spent waiting for fetches.
        prep_seconds: seconds that workers spent preparing and collating.
        wait_seconds: seconds that the training loop waited in `next`.
        queue_depth: ready batches at this moment.
        retries: batches done again because a worker died or a cached sample vanished.
        workers_replaced: workers that died and were replaced.
        skips: samples left out because of an error (`on_error="skip"`).
        private_copies: batches handed over as copies, because older ones were kept or they did not fit staging.
        staging_bytes: bytes of the staging ring.
        num_workers: worker processes.

    Example:
        ```python
        for images, labels in loader:
            train(images, labels)
        stats = loader.stats()
        print(f"waited {stats.wait_seconds:.2f} s, {stats.stall_fetch_seconds:.2f} s of it for storage")
        ```
    """

    batches: int
    samples: int
    hits: int
    misses: int
    storage_bytes: int
    fetch_seconds: float
    prep_seconds: float
    wait_seconds: float
    queue_depth: int
    retries: int
    workers_replaced: int
    skips: int
    private_copies: int
    staging_bytes: int
    num_workers: int

    @property
    def stall_fetch_seconds(self) -> float:
        """The part of `wait_seconds` that would go if every fetch were instant.

        A worker that never waited for a fetch would be done earlier by what it waited; the workers share that. So this
        is the fetch stall as DS-Analyzer defines it (Mohan et al., VLDB 2021, section 3: the time that fetching adds to
        a run whose data are in memory), found without a second run.
        """
        return min(self.wait_seconds, self.fetch_seconds / max(1, self.num_workers))

    @property
    def stall_prep_seconds(self) -> float:
        """The rest of `wait_seconds`: waits that remain when every fetch is instant."""
        return self.wait_seconds - self.stall_fetch_seconds

    def __sub__(self, before: Self) -> Self:
        """What was done since `before`, for instance in one epoch. Queue, staging and workers are those of now."""
        states = ("queue_depth", "staging_bytes", "num_workers", "jobs")
        counts = {field.name for field in fields(self)}.difference(states)
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in counts})


@dataclass(frozen=True)
class SharedStats(LoaderStats):
    """Counts of one job's `SharedLoader`.

    Hits, misses, bytes and seconds of workers are those of the job's batches. A batch that several jobs receive is
    prepared once and counted by each of them.

    Attributes:
        takeovers: coordinators of the group that died and were replaced.
        jobs: processes in the group at the last message from the coordinator.

    Example:
        ```python
        with sf.SharedLoader(dataset, group="search-7", batch_size=4) as loader:
            for images, labels in loader:
                train(images, labels)
            print(f"{loader.stats().jobs} jobs share the batches")
        ```
    """

    takeovers: int
    jobs: int


@dataclass(frozen=True)
class ImportanceStats:
    """Requests of a loader with an `ImportanceSampler` to its cache, and their results.

    The plan draws H-samples with a high probability and L-samples with a low one. A deferred sample counts as a second
    request when it is requested again; the sample that was served in its place does not count as a request.

    Attributes:
        high_requests: requested H-samples.
        high_hits: requested H-samples found in the cache.
        low_requests: requested L-samples.
        low_hits: requested L-samples found in the cache.
        swaps: L-samples served earlier than planned, in place of a missing one.
        substitutions: samples served in place of a missing L-sample (`on_miss="substitute"`).
        packages_written: packages of L-samples written.
        package_bytes_written: bytes of the packages written.
        packages_read: packages read, each with one sequential read.
        package_bytes_read: bytes of the packages read.
        packages_dropped: damaged packages.
        samples_packed: samples in the packages written.

    Example:
        ```python
        loader = sf.DataLoader(dataset, batch_size=4, sampler=sf.ImportanceSampler(len(dataset)))
        batches = list(loader)
        print(f"{loader.importance_stats().hit_ratio:.0%} of the samples came from the cache")
        ```
    """

    high_requests: int = 0
    high_hits: int = 0
    low_requests: int = 0
    low_hits: int = 0
    swaps: int = 0
    substitutions: int = 0
    packages_written: int = 0
    package_bytes_written: int = 0
    packages_read: int = 0
    package_bytes_read: int = 0
    packages_dropped: int = 0
    samples_packed: int = 0

    @property
    def hit_ratio(self) -> float:
        """Samples served from the cache over samples served.

        As in iCACHE, a sample that was served in place of another one is a hit.
        """
        served = self.high_requests + self.low_requests
        hits = self.high_hits + self.low_hits + self.swaps + self.substitutions
        return hits / served if served else 0.0
