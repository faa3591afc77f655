"""A cyclic window over the data set: the samples that an epoch of a Smart Cache trains on.

The samples of all passes form one infinite sequence. The window of an epoch is `size` consecutive samples of it; when
it advances by n places, the first n samples leave and n new ones join. This is the Smart Cache of NVIDIA's Clara Train
SDK (its manual, "Smart Cache"), which MONAI's `SmartCacheDataset` continues.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError, argument_conflict

Ids = npt.NDArray[np.int64]


def replace_count(size: int, rate: float, total: int) -> int:
    """Samples replaced per epoch: ceil(size * rate), but at most the number outside the window."""
    return min(math.ceil(round(size * rate, 9)), total - size)


class WindowPlan:
    """The sequence of samples and its windows: a pure function of the arguments, the same in every process.

    Args:
        total: number of samples, with the ids 0 to `total` - 1.
        size: samples in the window, at most `total`.
        replace: samples that leave and join when the window advances by one epoch.
        seed: of the order.
        shuffle: use a random order, else the order of the ids.
        part: `(k, n)`: the k-th of n parts of the samples, for host k of n. The parts do not depend on the seed, so
            that no sample is lost if hosts have different seeds.

    Attributes:
        seed: see above.

    Raises `InputError` for numbers that define no valid window.
    """

    def __init__(
        self,
        total: int,
        size: int,
        replace: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        number, parts = part
        if not 0 <= number < parts:
            raise InputError(f"part={part}: give (number of this host, number of hosts), such as (0, 2)")
        mine = (_generator(0, 0).permutation(total) if shuffle and parts > 1 else np.arange(total))[number::parts]
        self._first = _generator(seed, 0).permutation(mine) if shuffle else mine
        self.total = len(self._first)
        if not 1 <= size <= self.total or not 0 <= replace <= self.total - size:
            raise argument_conflict(
                f"a window of {size} samples of which {replace} are replaced does not fit over {self.total} samples: "
                "give fewer"
            )
        self.size = size
        self.replace = replace
        self.seed = seed

    def sequence(self, start: int, end: int) -> Ids:
        """The ids at the places `start` to `end` - 1 of the infinite sequence."""
        return self._first[np.arange(start, end) % self.total]

    def window(self, start: int) -> Ids:
        """The ids of the window that begins at place `start`, one for each position of the data set.

        A sample keeps its position while it is in the window, and a new sample takes the position of one that left.
        """
        ids = self.sequence(start, start + self.size)
        return np.roll(ids, start % self.size)

    def others(self, start: int) -> Ids:
        """The ids outside that window, ascending."""
        outside = np.zeros(int(self._first.max()) + 1, bool)
        outside[self._first] = True
        outside[self.sequence(start, start + self.size)] = False
        return np.flatnonzero(outside)

    def shuffled(self, ids: Ids, epoch: int) -> Ids:
        """`ids`, shuffled by (seed, epoch)."""
        return ids[_generator(self.seed, epoch, 1).permutation(len(ids))]


def _generator(seed: int, *numbers: int) -> np.random.Generator:
    sequence = np.random.SeedSequence([seed & (2**64 - 1), 0x57494E44, *numbers])
    return np.random.Generator(np.random.PCG64(sequence))
