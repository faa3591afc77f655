"""The two loaders that the demo compares. Both fetch, decode, transform and collate alike, shuffled anew each epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from stallfree.cli._demo_train import Waits
from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.errors import InputError, SampleError
from stallfree.loader.dataloader import DataLoader
from stallfree.sources import ThrottledSource


class TorchJob:
    """`torch.utils.data.DataLoader` over `source`.

    That loader does not know what it waits for. Its workers note how long they fetch and how long they prepare, and
    what the training loop waited is divided in the same proportion.
    """

    name = "torch"

    def __init__(self, source: ThrottledSource, *, batch_size: int, workers: int) -> None:
        self._source = source
        self._seconds = torch.zeros((workers, 2), dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
        self._loader = torch.utils.data.DataLoader(
            _Timed(source, self._seconds),
            batch_size=batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
        )
        self._before = (0.0, 0.0, 0)

    def batches(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        self._before = self._counted()
        try:
            yield from self._loader
        except InputError as error:  # torch's loader puts the worker's traceback before what was said there
            raise InputError(str(error).strip().rpartition("InputError: ")[2]) from None

    def waits(self, waited: float) -> Waits:
        fetch, prep, size = (now - before for now, before in zip(self._counted(), self._before, strict=True))
        share = fetch / (fetch + prep) if fetch + prep else 0.0
        return Waits(waited * share, waited * (1 - share), 0, int(size))

    def _counted(self) -> tuple[float, float, int]:
        fetch, prep = self._seconds.sum(0).tolist()
        return fetch, prep, self._source.bytes

    def __enter__(self) -> TorchJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader._iterator = None  # the only way to end persistent workers


class _Timed(Dataset[Any]):
    """`source` as a map-style data set that adds what fetching and preparing take to the row of its worker."""

    def __init__(self, source: ThrottledSource, seconds: torch.Tensor) -> None:
        self._source = source
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, id: int) -> Any:
        worker = get_worker_info()
        row = self._seconds[worker.id if worker is not None else 0]
        try:
            start = time.perf_counter()
            record = self._source.fetch(id)
            fetched = time.perf_counter()
            sample = self._source.pipeline(record)
        except SampleError as error:
            raise InputError(str(error)) from None
        except Exception as error:
            raise InputError(f"preparing sample {id} ({self._source.where(id)}) failed: {error}") from None
        row += torch.tensor([fetched - start, time.perf_counter() - fetched], dtype=torch.float64)
        return sample


class StallfreeJob:
    """`stallfree.DataLoader` over `stallfree.CachedDataset` over `source`."""

    name = "stallfree"

    def __init__(self, source: ThrottledSource, *, capacity: int, batch_size: int, workers: int) -> None:
        self._source = source
        self.cached = CachedDataset(source, capacity=capacity)
        self._loader = DataLoader(
            self.cached, batch_size=batch_size, shuffle=True, num_workers=workers, persistent_workers=True
        )
        self._before = (self._loader.stats(), 0)

    def batches(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        self._before = (self._loader.stats(), self._source.bytes)
        return self._loader

    def waits(self, waited: float) -> Waits:
        before, size = self._before
        epoch = self._loader.stats() - before
        return Waits(epoch.stall_fetch_seconds, epoch.stall_prep_seconds, epoch.hits, self._source.bytes - size)

    def read_cache(self, ids: Sequence[int]) -> None:
        """Reads `ids` out of the cache, in one call."""
        self.cached.cache.get_many(ids)

    def __enter__(self) -> StallfreeJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.close()
        self.cached.close()
