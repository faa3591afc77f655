"""`CachedDataset`: a map-style data set whose samples stay in a cache that all processes of the host share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stallfree.cache import SampleCache
from stallfree.cache.policies import Policy
from stallfree.errors import InputError, SampleError
from stallfree.loader.reader import Reader
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.compose import Compose, Transform
from stallfree.pipeline.determinism import split
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.probe import try_step
from stallfree.pipeline.protocol import Source
from stallfree.sources import as_source
from stallfree.sources.throttle import payload_bytes
from stallfree.stats import CacheStats
from stallfree.units import format_size, parse_size

_FORMAT = "records-1"
_PROBES = 4

log = logging.getLogger("stallfree")


class CachedDataset:
    """`dataset` with a sample cache behind it. Works with any loader; with `stallfree.DataLoader` at full speed.

    A sample is `random_part(deterministic_part(fetch(id)))`. What is cached is the record as it was fetched, or what the
    deterministic part made of it; the random part runs each time anew, as a function of (seed, epoch, id). Under another
    loader than stallfree's the epoch of a sample is how often it has been asked for, or what `set_epoch` says.

    Args:
        dataset: a source such as `ImageFolder`, or any map-style data set. One that gives random samples cannot be cached:
            give its transform here.
        capacity: bytes for records and index, as an int or such as "4GiB".
        policy: "minio", "fifo", "lru", "lfu" or "random".
        store: "memory" (shared memory of this host) or a folder on a local disk.
        form: "fetched" caches records as they are fetched, "prepared" what the deterministic part makes of them, "auto"
            (the default) the prepared form if all of it fits, else the fetched one.
        name: of the cache; processes that give the same name share it. By default it follows from what is cached, so that
            jobs with the same data, policy and capacity share one.
        persist: keep the cache when the last process has left.
        transform: applied to the samples of `dataset` after its own steps, and split like them.
        seed: of the randomness.

    Attributes:
        cache: the `SampleCache`.
        form: "fetched" or "prepared".
        decision: one line that says why.

    Raises `InputError` (and its subclasses `CapacityError`, `FingerprintError`) for arguments that cannot be used,
    `SampleError` when none of the first samples can be read.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        capacity: int | str,
        policy: str | Policy = "minio",
        store: str | Path = "memory",
        form: str = "auto",
        name: str | None = None,
        persist: bool = False,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> None:
        if form not in ("auto", "fetched", "prepared"):
            raise InputError(f"form={form!r}: use 'fetched', 'prepared' or 'auto'")
        size = parse_size(capacity, "capacity")
        self.source: Source = as_source(dataset)
        self.seed = seed
        steps = Compose([self.source.pipeline, *([] if transform is None else [transform])])
        probe_id, record = _probe(self.source)
        parts = split(steps, probe=record)
        prepared = parts.deterministic(record) if form != "fetched" else record
        self.form, self.decision = _choose(form, size, len(self.source), record, prepared, len(parts.deterministic))
        log.info("%s", self.decision)
        if self.form == "prepared":
            before, rest, value = parts.deterministic, parts.random, prepared
        else:
            before, rest, value = Compose([]), steps, record
        self.cache = SampleCache(
            len(self.source),
            capacity=size,
            fingerprint=fingerprint(self.source.fingerprint(), before, _FORMAT),
            policy=policy,
            store=store,
            name=name,
            persist=persist,
            example=value,
        )
        self.cache.count_fetch(1, payload_bytes(record))
        self.cache.put(probe_id, value)
        fresh = len(parts.random) > 0
        self.reader = Reader(self.source, self.cache, before, rest, fresh=fresh)
        # Shared with the workers of any loader: how often each sample was asked for, and the epoch that was set.
        self._visits = torch.zeros(len(self.source) if fresh else 1, dtype=torch.int32).share_memory_()
        self._epoch = torch.full((1,), -1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, id: int) -> Any:
        return self.__getitems__([id])[0]

    def __getitems__(self, ids: list[int]) -> list[Any]:
        """The samples of a whole batch: one look into the cache for all. Raises `SampleError`, `IndexError`."""
        length = len(self)
        wanted = np.asarray(ids, np.int64)
        if len(wanted) and (wanted.min() < -length or wanted.max() >= length):
            raise IndexError(f"ids {ids} are not all within the data set of {length} samples")
        wanted = np.where(wanted < 0, wanted + length, wanted)
        return self.reader.finish(self.reader.start(wanted), self.seed, self._epoch_of(), skip=False).values

    def _epoch_of(self) -> int | Callable[[int], int]:
        epoch = int(self._epoch[0])
        return epoch if epoch >= 0 else self._visit

    def _visit(self, id: int) -> int:
        visits = int(self._visits[id])
        self._visits[id] = visits + 1
        return visits

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the samples from now on, in the workers too. Only for loaders other than stallfree's."""
        self._epoch[0] = epoch

    def where(self, id: int) -> str:
        """Where sample `id` lies, for messages."""
        return self.source.where(id)

    def stats(self) -> CacheStats:
        """The counts of the cache, over all processes attached to it."""
        return self.cache.stats()

    def close(self) -> None:
        """Leave the cache. The last process out removes it, unless it persists. May be called twice."""
        self.reader.close()
        self.cache.close()

    def __enter__(self) -> CachedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CachedDataset({self.source!r}, {self.form}, cache={self.cache.name!r})"


def _probe(source: Source) -> tuple[int, Any]:
    """An id that can be read and its record. Raises `InputError` if a plain data set gives random samples."""
    last: SampleError | None = None
    for id in range(min(_PROBES, len(source))):
        try:
            if getattr(source, "threads", True):
                record = source.fetch(id)
            else:
                trial = try_step(source.fetch, id)
                if trial.random is not False:
                    raise InputError(
                        f"sample {id} of {type(getattr(source, 'dataset', source)).__name__} was another one when it was "
                        f"read again ({trial.why}): a cache would freeze its augmentation. Make the data set without its "
                        "random transforms and give them as CachedDataset(..., transform=...); or, if its samples are always "
                        "the same, wrap it in a source of your own (stallfree.pipeline.protocol.Source)"
                    )
                record = trial.output
            return id, record
        except SampleError as error:
            last = error
    assert last is not None
    raise last


def _choose(
    form: str, capacity: int, samples: int, record: Any, prepared: Any, steps: int
) -> tuple[str, str]:
    """The form to cache and the line that explains it."""
    if form != "auto":
        return form, f"caching samples as {form}, as asked"
    if steps == 0:
        return "fetched", "caching samples as fetched: no deterministic step comes first"
    sizes = []
    for value in (record, prepared):
        structure, arrays = encode(value, allow_pickle=True)
        sizes.append(record_size(structure, arrays))
    fetched_all, prepared_all = (samples * size for size in sizes)
    chosen = "prepared" if prepared_all <= 0.98 * capacity or prepared_all <= fetched_all else "fetched"
    return chosen, (
        f"caching samples as {chosen}: prepared they take about {format_size(prepared_all)}, "
        f"as fetched {format_size(fetched_all)}, and there are {format_size(capacity)}"
    )

