"""`CachedDataset`: a map-style data set whose samples stay in a cache that all processes share; and `LocalSampler`."""

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

from stallfree import errors
from stallfree.cache.policies import Policy, make_policy
from stallfree.cache.store import Store, default_store, is_tier, open_cache, parse_capacity, sample_bytes_of
from stallfree.cache.tier import Tier
from stallfree.datasets.epoch_source import EpochSource, Ids, SourceSetup, make_plan
from stallfree.datasets.probe import FirstLook, choose_form, example_for, look
from stallfree.datasets.ranks import find_ranks
from stallfree.datasets.reader import Reader
from stallfree.ipc.shared_array import SharedCounts
from stallfree.pipeline.compose import Compose, Source
from stallfree.pipeline.fingerprint import fingerprint, key_of, tolerant
from stallfree.pipeline.randomness import peek_seed
from stallfree.pipeline.values import payload_bytes
from stallfree.raising import log, short_traceback, users_level
from stallfree.sources.mapped import normalize_id
from stallfree.stats import CacheStats
from stallfree.typevars import Closing, SampleT_co
from stallfree.units import parse_whole

_FORMAT = "records-2"
_MOST_EPOCHS = 2**31 - 2

FINGERPRINT_CURE = (
    "give name=, the same only for the same data, or give the object or the data set a method fingerprint() that "
    "returns a text which changes when the data change"
)


class CachedDataset(Closing, Dataset[SampleT_co]):
    """`dataset` with a sample cache behind it.

    Works with any loader; with `stallfree.DataLoader` at full speed.

    A sample is `random_part(deterministic_part(fetch(id)))`. What is cached is the record as it was fetched, or what
    the deterministic part made of it; the random part runs again each time, as a function of (seed, epoch, id). Under
    another loader than stallfree's the epoch of a sample is how often it has been asked for, or what `set_epoch` says;
    that is counted in shared memory, 4 bytes per sample, by all workers together.

    While the cache is filled, the first 64 samples of a loader and one in 32 of the others are made twice and compared
    bit for bit, and the states of Python's, NumPy's and torch's global generators are compared after each batch. A step
    that proves random counts as random from then on. What was cached with it is dropped for all processes, and a
    `StallfreeWarning` names it.

    When it is made, eight samples spread over the data set are made twice, in a child process, and stored: the process
    that makes a `CachedDataset` never runs the data set itself before its workers do.

    A sample belongs to the caller, who may change it. Those of one `__getitems__` may share one piece of memory, which
    lives as long as any of them: copy a sample that is to be kept for long.

    Args:
        dataset: a source such as `ImageFolder`, or any map-style data set. One that gives random samples cannot be
            cached: give its transform here, or `cut(dataset, "transform")`.
        capacity: bytes of this host's memory for records and index, as an int or such as "4GiB"; of the disk's if the
            store is a folder. 0 only with a tier: no memory for samples is used in front of it.
        policy: "minio", "fifo", "lru", "lfu", "random", "importance" or "oracle". The scores of the last two are given
            with `.cache.set_scores(ids, scores)`.
        store: where samples lie:

            - "memory": shared memory of this host.
            - A folder on a local disk.
            - A `DiskTier`: memory of `capacity`, and all samples on a local disk behind it.
            - A `RedisStore`: memory of `capacity` on each node, and servers on all nodes of a job behind it.
            - Any object with the method `attach` of `stallfree.cache.TierStore`.
            - "auto": in a job of several nodes a `RedisStore` with `capacity_per_node=capacity` and no memory in front,
              in a job of one node "memory". A job of several nodes gets "memory" on each of them, with a warning, if no
              server is installed, or if the data set has no fingerprint and no `name` is given.
        form: "fetched" caches records as they are fetched, "prepared" what the deterministic part makes of them. "auto"
            (the default) is the prepared form if all of it fits, else the smaller one; `DataLoader(cache="auto")`
            measures and chooses. "files" caches whole files of up to 64 MiB that `dataset[id]` opens by Python's
            `open`, `fsspec`, `cv2.imread` or `torchvision.io`: for a data set that reads, decodes and augments in
            `__getitem__`, which runs as always. The first time a loader opens a file, its size and time are compared
            with storage. A `StallfreeWarning` reports reads past these calls.
        name: of the cache; processes that give the same name share it. By default it follows from what is cached, so
            that jobs with the same data, policy and capacity share one. If the data set or a deterministic transform
            holds an object without a fingerprint (a lock, an open file, a client), the cache is private to this process
            and its workers, with a `StallfreeWarning`. With a name it is shared, and that object is not compared.
        persist: keep the cache when the last process has left. A tier has its own setting.
        transform: applied to the samples of `dataset` after its own steps, and split like them. A sample may be a pair
            of picture and label: `OnItem(0, step)` is for the picture alone.
        seed: of the randomness. If None, stallfree's loader draws one for itself, and under torch's loader it follows
            from torch's generator: by the seed that each iteration draws for its workers.

    Attributes:
        dataset: as given.
        cache: the `stallfree.cache.SampleCache` that holds the samples in memory, or in a folder.
        tier: what holds them behind it, as the `attach` of the store returned it; None without a tier.
        form: "fetched", "prepared" or "files".
        steps: all that is applied to a record, the source's own pipeline and `transform`.
        decision: one line that says why. It goes to the log `stallfree` too, as information.
        next_epoch: with a `seed`, the number of the epoch that the next iteration of stallfree's loaders has; they all
            count in it, so that a new loader goes on where the last one was.

    Raises `InputError` (and its subclasses `CapacityError`, `FingerprintError`) for arguments that cannot be used,
    the error of a sample when none of the first ones can be had, `StorageError` when there is no shared memory left.

    Example:
        ```python
        cached = sf.CachedDataset(dataset, capacity="8MiB")
        loader = sf.DataLoader(cached, batch_size=4, shuffle=True, num_workers=2)
        for epoch in range(2):  # the second epoch reads no file
            for images, labels in loader:
                train(images, labels)
        ```
    """

    files: Any = None
    """The data set, whose files are cached, with `form="files"`."""

    source: Source
    _first: FirstLook | None = None
    _store: Any
    _drawn: int | None

    @short_traceback
    def __init__(
        self,
        dataset: Any,
        *,
        capacity: int | str,
        policy: str | Policy = "minio",
        store: Store = "memory",
        form: str = "auto",
        name: str | None = None,
        persist: bool = False,
        transform: Callable[[Any], SampleT_co] | None = None,
        seed: int | None = None,
    ) -> None:
        if form not in ("auto", "fetched", "prepared", "files"):
            raise errors.InputError(f"form={form!r}: use 'fetched', 'prepared', 'files' or 'auto'")
        size, policy = parse_capacity(capacity, store), make_policy(policy)
        self.dataset, self.seed = dataset, None if seed is None else parse_whole(seed, "seed")
        self.next_epoch, self._drawn = 0, None
        self._auto, self._store = store == "auto", None
        steps = [] if transform is None else [transform]
        try:
            if form == "files":
                self._cache_files(steps, store, capacity=size, policy=policy, name=name, persist=persist)
            else:
                self._cache_samples(form, steps, store, capacity=size, policy=policy, name=name, persist=persist)
            self._epochs = SharedCounts(1 + len(self.source))
        except BaseException:
            if "cache" in self.__dict__:
                self.cache.close()
            raise
        log.info("%s", self.decision)

    def _cache_samples(self, form: str, steps: list[Any], store: Store, **options: Any) -> None:
        from stallfree.sources.cut import as_cut_source

        self.source = source = as_cut_source(self.dataset)
        self.steps = Compose([source.pipeline, *steps])
        with tolerant() as unknown:  # before the data set is read, which may open files and keep them
            data = fingerprint(source.fingerprint())
        first, self._first = self._first or look(source, self.steps), None
        if self._auto:
            with tolerant() as unknown_steps:
                fingerprint(first.parts.deterministic)
            unshared = [*unknown, *unknown_steps] if options["name"] is None else []
            store, options["capacity"] = default_store(options["capacity"], unshared)
        self._store = store if is_tier(store) else None  # which lives as long as its tiers are used
        available, scored = sample_bytes_of(store, options["capacity"]), options["policy"].scored
        on_disk = self._store is None and str(store) != "memory"
        self.form, self.decision = choose_form(form, first, len(source), available, scored=scored, on_disk=on_disk)
        prepared = self.form == "prepared"
        before, after = (first.parts.deterministic, first.parts.random) if prepared else (Compose([]), self.steps)
        with tolerant() as unknown_steps:
            content = "prepared" if len(before) else "fetched"
            key = key_of(**{"data set": data, "transforms": before}, form=content, format=_FORMAT)
        values = first.values(prepared=prepared)
        self._open(
            store, len(source), key, [*unknown, *unknown_steps], example=example_for([*values.values()]), **options
        )
        self.reader = Reader(source, self.cache, before, after, steps=self.steps)
        self.cache.count_fetch(len(first.samples), payload_bytes([sample.record for sample in first.samples]))
        self.reader.store([*values], [*values.values()])

    def _cache_files(self, steps: list[Any], store: Store, **options: Any) -> None:
        """Cache the files that the data set opens: see `stallfree.sources.cached_files`."""
        from stallfree.sources.cached_files import CachedFiles, ids_of_cache, look_at_files

        policy = options["policy"]
        if is_tier(store) or self._auto or policy.given:
            what = f"policy={policy.name!r}" if policy.given else "a tier"
            raise errors.argument_conflict(
                f"form='files' with {what}: give another policy, and store='memory' or a folder"
            )
        source, look = look_at_files(self.dataset)
        if look.warning:
            warnings.warn(look.warning, errors.StallfreeWarning, stacklevel=users_level())
        with tolerant() as unknown:
            key = key_of(**{"data set": fingerprint(source.fingerprint())}, form="files", format=_FORMAT)
        sizes = sorted(len(data) for _, data in look.files.values())
        example = bytes(100), bytes(sizes[len(sizes) // 2])
        self._open(store, ids_of_cache(len(source)), key, unknown, example=example, **options)
        self.source = self.files = CachedFiles(source, self.cache, look.most)
        for path, (stamp, data) in look.files.items():
            self.files.table.drop(path)  # an earlier job may have stored it
            self.files.table.put(path, stamp, data)
        self.steps = Compose(steps)
        self.reader = Reader(self.source, None, Compose([]), self.steps)
        self.form, self.decision = "files", "caching the files that the data set opens, as asked"

    def _open(self, store: Store, count: int, key: str, unknown: list[str], **options: Any) -> None:
        """Open the cache of `count` records; without a name, and if objects are `unknown`, a private one."""
        if options["name"] is None and unknown:
            key = options["name"] = private_name(store, unknown[0], persist=options["persist"])
        self.cache = open_cache(store, count, fingerprint=key, **options)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, id: int) -> SampleT_co:
        return self.__getitems__([id])[0]

    def __iter__(self) -> Iterator[SampleT_co]:
        return map(self.__getitem__, range(len(self)))  # without it, an IndexError of the data set would end a loop

    @short_traceback
    def __getitems__(self, ids: Sequence[int]) -> list[SampleT_co]:
        """The samples of a whole batch: one look into the cache for all. Raises `IdError`, or a sample's error."""
        wanted = checked_ids(ids, len(self.source))
        pending = self.reader.start(wanted)
        return self.reader.finish(pending, self._seed_now(), self._epoch_of(wanted), skip=False).values

    def _seed_now(self) -> int:
        """The seed that was given; else one that all workers of an iteration of torch's loader have in common."""
        worker = get_worker_info()
        if self.seed is not None:
            return self.seed
        if worker is not None:
            return worker.seed - worker.id
        if self._drawn is None:
            self._drawn = peek_seed()
        return self._drawn

    def _epoch_of(self, ids: Ids) -> int | list[int]:
        """The epoch that was set, or how often each of `ids` has been asked for before."""
        counts, visits = self._epochs.array, list[int]()
        if counts[0] > 0:
            return int(counts[0]) - 1
        for id in ids.tolist():
            visits.append(int(counts[1 + id]))
            counts[1 + id] += 1
        return visits

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next samples, in the workers too.

        Only for loaders other than stallfree's.

        Example:
            ```python
            cached = sf.CachedDataset(dataset, capacity="8MiB", seed=1)
            for epoch in range(2):
                cached.set_epoch(epoch)
                for images, labels in torch.utils.data.DataLoader(cached, batch_size=4):
                    train(images, labels)
            ```
        """
        self.reader.check()
        if not 0 <= parse_whole(epoch, "epoch") <= _MOST_EPOCHS:
            raise errors.InputError(f"epoch={epoch}: give 0 or more, and less than 2**31 - 1")
        self._epochs.array[0] = epoch + 1
        if self.cache.tier is not None:
            self.cache.tier.begin_epoch()

    def epoch_source(self, setup: SourceSetup) -> EpochSource:
        """The source of a loader's epochs.

        Loaders that use the seed of this data set count their epochs in it.
        """
        if self.files is not None:
            self.files.table.forget()
        return setup.make_order(counter=self) if setup.seed_of_data else setup.make_order()

    def where(self, id: int) -> str:
        """Where sample `id` lies, for messages."""
        return self.source.where(id)

    def fingerprint(self) -> str:
        """Changes with the fingerprint of the source and with the steps after it."""
        return f"CachedDataset {fingerprint(self.source.fingerprint(), self.steps)}"

    @property
    def tier(self) -> Tier | None:
        """See the attributes of this class."""
        return None if self.cache.tier is None else self.cache.tier.tier

    def stats(self) -> CacheStats:
        """The counts of the cache, over all processes attached to it.

        After `close`, those of that moment.
        """
        return self.cache.stats()

    def close(self) -> None:
        """Leave the cache. May be called twice.

        The last process to leave removes it, unless it persists.

        Samples cannot be read any more after that. Happens by itself when this object is freed.
        """
        self.reader.end(f"{self!r} is closed: make a new one to read samples")
        self.cache.close()
        if self._auto and self._store is not None:
            self._store.close()
        self._epochs.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}

    def __repr__(self) -> str:
        return f"CachedDataset({self.source!r}, {self.form}, cache={self.cache.name!r})"


def cached_after(first: FirstLook | None, dataset: Any, **options: Any) -> CachedDataset[Any]:
    """Return a `CachedDataset` that uses a first look which was taken before; with None, it takes its own."""
    cached: CachedDataset[Any] = CachedDataset.__new__(CachedDataset)
    cached._first = first
    CachedDataset.__init__(cached, dataset, **options)
    return cached


def checked_ids(ids: Sequence[int], length: int) -> Ids:
    """`ids` as an array, negative ones counted from the end. Raises `IdError`, and `TypeError` for no integers."""
    return np.array([normalize_id(id, length) for id in ids], np.int64)


def private_name(store: Any, unknown: str, *, persist: bool) -> str:
    """A name that no other process gives, with a warning that says why: `unknown` has no fingerprint.

    Raises `InputError` where a cache that others do not find is of no use.
    """
    if persist or (is_tier(store) and getattr(store, "persist", True)):
        raise errors.no_fingerprint(
            f"store={store!r:.80}, persist={persist}: no other job or node would find these samples, as {unknown} has "
            f"no fingerprint: {FINGERPRINT_CURE}"
        )
    warnings.warn(
        f"{unknown} has no fingerprint, so this cache is private: used by this process and its workers, and removed "
        f"with them. To share it with other jobs and ranks, {FINGERPRINT_CURE}",
        errors.StallfreeWarning,
        stacklevel=users_level(),
    )
    return token()


def token() -> str:
    """The name of a private cache."""
    return f"private-{os.getpid()}-{secrets.token_hex(8)}"


# -- the samples that a node stores -----------------------------------------------------------------------------------


class LocalSampler(DistributedSampler[Any]):
    """Samples of this rank, those that its own node stores first.

    For a data set that is cached over several nodes.

    Every sample comes exactly once per epoch over all ranks, as with torch's `DistributedSampler`, of which this is
    one; stallfree's loader sets the epoch. Almost nothing comes over the network then. The price: a sample is
    always seen by the same node, so batches mix a node's share and not the whole data set. Data that lie sorted in the
    data set are mixed all the same, since ownership is a hash.

    Args:
        dataset: a `CachedDataset` with a `RedisStore`; with another store every node owns all, and this is a
            `DistributedSampler`.
        shuffle: whether (seed, epoch) decides the order.
        seed: of the order, the same in all ranks.
        drop_last: leave out the last samples rather than repeat the first ones if the number of samples is no multiple
            of the number of ranks.
        rank: of this process; None for that of `torch.distributed`, or else of the variables that torchrun sets.
        num_ranks: of the job, likewise.

    Raises `InputError` when the nodes of the store do not have equally many ranks, or for a data set of another kind,
    and `ValueError` for a rank that is not one of `num_ranks`.

    Example:
        ```python
        cached = sf.CachedDataset(dataset, capacity="8MiB")  # with several nodes: store=sf.RedisStore(...)
        sampler = sf.LocalSampler(cached, rank=0, num_ranks=2)
        loader = sf.DataLoader(cached, batch_size=4, sampler=sampler)
        assert len(loader) == 2
        ```
    """

    def __init__(
        self,
        dataset: CachedDataset[Any],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        cache = getattr(dataset, "cache", None)
        if cache is None:
            raise errors.cache_required(f"LocalSampler was given {type(dataset).__name__}: give it a CachedDataset")
        ranks, seed = find_ranks(), parse_whole(seed, "seed")
        number = ranks.rank if rank is None else rank
        count = ranks.count if num_ranks is None else num_ranks
        super().__init__(dataset, num_replicas=count, rank=number, shuffle=shuffle, seed=seed, drop_last=drop_last)
        servers: Any = dataset.tier
        self._nodes: int = getattr(servers, "num_nodes", 1)
        if count % self._nodes:
            raise errors.launch_environment(
                f"{count} ranks on {self._nodes} nodes: every node needs as many ranks as any other"
            )
        self._owner = np.zeros(len(dataset), np.int16)
        if self._nodes > 1:
            self._owner, node = servers.owner(np.arange(len(dataset))), number * self._nodes // count
            if node != servers.me:
                raise errors.launch_environment(
                    f"rank {number} of {count} should be on node {node} of {self._nodes} and is on node {servers.me}: "
                    "ranks have to be numbered node by node, as torchrun does"
                )

    def __repr__(self) -> str:
        return (
            f"LocalSampler({len(self._owner)} samples, rank={self.rank}, num_ranks={self.num_replicas}, "
            f"shuffle={self.shuffle})"
        )

    def __iter__(self) -> Iterator[int]:
        """The ids of this rank, in the order of the epoch's plan; a function of ownership, not of residency.

        A node's ranks get the samples that the node owns, up to an equal number per rank. Surplus samples of a node go
        to nodes with too few, the last ones first.
        """
        nodes, per_node = self._nodes, self.num_replicas // self._nodes
        plan = make_plan(len(self._owner), shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        ids = np.resize(plan.ids, self.total_size)
        node, quota = self._owner[ids].astype(np.int64), self.num_samples * per_node
        order = np.argsort(node, kind="stable")
        counts = np.bincount(node, minlength=nodes)
        within = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        surplus = np.sort(order[within >= quota])
        node[surplus] = np.repeat(np.arange(nodes), np.maximum(0, quota - counts))
        shares = ids[np.argsort(node, kind="stable")].reshape(nodes, self.num_samples, per_node)
        return iter(shares[self.rank // per_node, :, self.rank % per_node].tolist())
