"""What the processes of a host share of a data set that lies in servers: who owns what, and what they have counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.counters import Count, Counters
from stallfree.folders import SharedFolder, default_root, sweep
from stallfree.locks import CLAIMS, FileLock
from stallfree.stores.spread import owners
from stallfree.stores.values import DataKey, data_key

Array = npt.NDArray[Any]

_LOCK_SECONDS = 2.0


class SharedOnHost:
    """Attach to it; the first process makes it, in a folder that the last one removes.

    Args:
        key: of the data set.
        num_ids: number of its samples.
        places: names of the servers, in the same order in all processes.

    Attributes:
        owner: the place of each sample among the servers.
        counters: of all these processes; this one has a row of its own.
        uncached: one number, how many steps samples may not be cached with.
    """

    def __init__(self, key: DataKey, num_ids: int, places: list[str]) -> None:
        def initialize(folder: Path) -> None:
            np.save(folder / "owners.npy", owners(num_ids, places))
            np.zeros((CLAIMS + 1, len(Count)), np.int64).tofile(folder / "counters")
            np.zeros(1, np.int64).tofile(folder / "uncached")
            (folder / "lock").touch(mode=0o600)

        sweep(default_root())
        name = f"servers-{data_key(key.hex(), ' '.join([str(num_ids), *places])).hex()}"
        self._folder = SharedFolder(name, initialize=initialize)
        path = self._folder.path
        self.owner: Array = np.load(path / "owners.npy", mmap_mode="r")
        rows: Array = np.memmap(path / "counters", np.int64, "r+", shape=(CLAIMS + 1, len(Count)))
        self.counters = Counters(rows)
        self.uncached: Array = np.memmap(path / "uncached", np.int64, "r+", shape=(1,))
        self._lock = FileLock(path / "lock")
        self.claim()

    def uncache(self, count: int) -> bool:
        """Raise `uncached` to `count`; whether it was lower."""
        with self._lock.hold(_LOCK_SECONDS, "noting that samples are not cached any more"):
            lower = bool(self.uncached[0] < count)
            self.uncached[0] = max(count, self.uncached[0])
        return lower

    def claim(self) -> None:
        """Have counters for this process."""
        self.counters.claim(self._lock)

    def close(self) -> None:
        """Leave it; the last one out removes it."""
        self.owner = np.empty(0, np.int16)
        self.counters = Counters(np.zeros((1, len(Count)), np.int64))
        self.uncached = np.zeros(1, np.int64)
        self._lock.close()
        self._folder.close()
