"""A process that is forked inside the loop and keeps its batch, as an asynchronous saver or a plot does."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf

PATIENCE = 60.0
VALUES = 20_000
"""Values of a sample: several pages."""


class Data:
    def __init__(self, samples: int = 48) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.full((VALUES,), id, dtype=torch.int32)


class Saver:
    """A forked process that looks at its batch when it is asked to."""

    def __init__(self, batch: torch.Tensor) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()

        def save() -> None:
            theirs.recv()
            theirs.send([np.unique(row).tolist() for row in batch.numpy()])

        self._process = context.Process(target=save, daemon=True)
        self._process.start()
        theirs.close()

    def saved(self) -> Any:
        """The values of each row of the batch."""
        self._ours.send(None)
        assert self._ours.poll(PATIENCE)
        values = self._ours.recv()
        self._process.join()
        return values


@pytest.mark.parametrize("loader_of", ["shared", "with a prefetcher"])
def test_the_child_keeps_its_batch(loader_of: str) -> None:
    savers, expected = [], []
    with sf.SharedLoader(Data(), group="forked", batch_size=2, num_workers=1) as loader:
        batches: Any = loader if loader_of == "shared" else sf.DevicePrefetcher(loader, "cpu")
        for epoch in range(2):
            for number, batch in enumerate(batches):
                if number in (2, 3, 7):
                    savers.append(Saver(batch))
                    expected.append([[int(value)] for value in batch[:, 0]])
                assert batch[:, -1].tolist() == [2 * number, 2 * number + 1], epoch
        del batch
        assert [saver.saved() for saver in savers] == expected
        if loader_of != "shared":
            batches.close()


def test_many_forks_cost_no_memory() -> None:
    with sf.SharedLoader(Data(samples=80), group="forked-often", batch_size=2, num_workers=1) as loader:
        staging = []
        for number, batch in enumerate(loader):
            saver = Saver(batch)
            assert saver.saved() == [[2 * number], [2 * number + 1]]
            staging.append(loader.stats().staging_bytes)
        del batch
        assert max(staging) <= 2 * staging[8]
        assert number == 39


def test_what_the_parent_writes_meanwhile_is_not_lost() -> None:
    """Another thread changes its batch in place, without Python's lock, while processes are forked."""
    with sf.SharedLoader(Data(samples=64), group="forked-writes", batch_size=16, num_workers=1) as loader:
        for number, batch in enumerate(loader):
            writes = 0
            done = threading.Event()

            def write(batch: torch.Tensor = batch, done: threading.Event = done) -> None:
                nonlocal writes
                while not done.is_set():
                    batch.add_(1)
                    writes += 1

            writer = threading.Thread(target=write)
            writer.start()
            savers = [Saver(batch) for _ in range(3)]
            for saver in savers:
                saver.saved()
            done.set()
            writer.join()
            expected = torch.arange(16 * number, 16 * number + 16, dtype=torch.int32) + writes
            assert torch.equal(batch, expected[:, None].expand(16, VALUES))
