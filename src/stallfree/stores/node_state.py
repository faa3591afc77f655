"""Per-node shared state of a data set in servers: owners, counts, and ids assumed stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.layout import Count, Counters
from stallfree.ipc.folders import SharedFolder, default_root, sweep
from stallfree.ipc.locks import CLAIMS, FileLock
from stallfree.ipc.shared_array import shared_array
from stallfree.stores.circuit_breaker import CircuitBreaker, shared_cells
from stallfree.stores.partitioning import owners
from stallfree.stores.values import DataKey

Array = npt.NDArray[Any]

_LOCK_SECONDS = 2.0


class NodeState:
    """Attaches to the state; the first process creates its folder, and the last one removes it.

    Args:
        key: of the data set.
        num_ids: number of its samples.
        names: of the servers, in the same order in all processes; empty if keys determine the owner (Redis Cluster).

    Attributes:
        path: the folder.
        owner: int16 per id: index of its owner in `names`; empty without names.
        known: uint8 per id: whether it is assumed stored.
        moving: uint8 per id: whether a process of this node has a write in flight.
        scores: float32 per id: its score.
        typical: int64, one number: typical bytes of a value, 0 if unknown.
        uncached: int64, one number: number of steps that must not be cached.
        counters: of all these processes; each has its own row.
    """

    def __init__(self, key: DataKey, num_ids: int, names: Sequence[str]) -> None:
        def initialize(folder: Path) -> None:
            np.save(folder / "owners.npy", owners(num_ids, names) if names else np.empty(0, np.int16))
            (folder / "lock").touch(mode=0o600)

        sweep(default_root())
        self._folder = SharedFolder(f"servers-{key.hex()}", initialize=initialize)
        self.path = self._folder.path
        self.owner: Array = np.load(self.path / "owners.npy", mmap_mode="r")
        self.known = shared_array(self.path / "known", np.uint8, num_ids)
        self.moving = shared_array(self.path / "moving", np.uint8, num_ids)
        self.scores = shared_array(self.path / "scores", np.float32, num_ids)
        self.typical = shared_array(self.path / "typical", np.int64, 1)
        self.uncached = shared_array(self.path / "uncached", np.int64, 1)
        self._rows = shared_array(self.path / "counters", np.int64, (CLAIMS + 1) * len(Count))
        self.counters = Counters(self._rows.reshape(CLAIMS + 1, len(Count)))
        self._lock = FileLock(self.path / "lock")
        self.claim()

    def claim(self) -> None:
        """Claim a row of counters for this process; call it again after a fork."""
        self.counters.claim(self._lock)

    def share(self, breakers: Sequence[CircuitBreaker]) -> None:
        """Share the circuit breakers among the processes of this node."""
        for breaker, cells in zip(breakers, shared_cells(self.path / "lost", len(breakers)), strict=True):
            breaker.share(cells)

    def uncache(self, count: int) -> bool:
        """Raise `uncached` to `count`; return whether it was lower."""
        with self._lock.hold(_LOCK_SECONDS, "disabling the cache of samples in servers"):
            lower = bool(self.uncached[0] < count)
            self.uncached[0] = max(count, self.uncached[0])
        return lower

    def close(self) -> None:
        """Detach; the last process removes the folder."""
        self._lock.close()
        self._folder.close()
