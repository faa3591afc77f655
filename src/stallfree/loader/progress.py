"""The progress of an epoch: the batches that are left, in flight, and delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stallfree.errors import StallfreeError
from stallfree.sampling.epoch_source import Ids, Position

RECENT = 64
"""Delivered batches whose ids are kept: a prefetcher takes batches ahead, and may request an earlier state."""


class Progress:
    """The progress of an epoch. It outlives the iteration, so that a state can be saved afterwards.

    Args:
        batches: the ids of each remaining batch.
        number: of the epoch.
        first: number of the first of `batches`; those before it were delivered by an earlier process.
        dealt: see `Position`.
        repeats: counts how often the ids have come before in this epoch; None: each comes once.

    Attributes:
        number, first: as given.
        handed_out: batches delivered, those before `first` included.
    """

    def __init__(
        self,
        batches: Iterator[Ids],
        number: int,
        first: int = 0,
        dealt: dict[str, int] | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        self.number = number
        self.first = self.handed_out = first
        self._dealt = dealt
        self._batches, self._repeats = batches, repeats
        self._problem: Exception | None = None  # exception of the sampler, which ends the epoch
        self._ready: deque[tuple[Ids, int]] = deque()  # drawn from the sampler, not started
        self._started: deque[tuple[Ids, int]] = deque()  # started, not delivered
        self._recent: deque[tuple[Ids, int]] = deque(maxlen=RECENT)  # delivered

    def peek(self) -> Ids | None:
        """The ids of the next batch to start, None at the end."""
        if not self._ready:
            self._draw()
        return self._ready[0][0] if self._ready else None

    def _draw(self) -> bool:
        """Take one batch from the sampler; False if there is none."""
        try:
            ids = next(self._batches)
            self._ready.append((ids, 0 if self._repeats is None else self._repeats.count(ids)))
        except StopIteration:
            return False
        except Exception as problem:
            self._problem, self._batches = problem, iter(())
            return False
        return True

    def take_problem(self) -> Exception | None:
        """The exception of the sampler. Removed here, because its traceback refers to the iterating frame."""
        problem, self._problem = self._problem, None
        return problem

    def start(self) -> tuple[int, Ids, int]:
        """Take the batch that `peek` returned: its number, its ids, and how often these have come before."""
        number = self.handed_out + len(self._started)
        batch = self._ready.popleft()
        self._started.append(batch)
        return number, *batch

    def hand_out(self) -> None:
        """Record the delivery of the first batch in flight."""
        self._recent.append(self._started.popleft())
        self.handed_out += 1

    def position(self, batches: int, endless: Callable[[int, int], bool] | None) -> Position:
        """The position of the epoch after `batches` delivered batches, at most 64 ago.

        Args:
            batches: as above.
            endless: returns whether a sampler that has so many ids left, and batches of them, counts as endless; None
                for an epoch that is planned by (seed, epoch).

        With `endless`, this reads the rest of the sampler. Raises `StallfreeError` if that fails.
        """
        if endless is None or self._ends_not(endless):
            return Position(batches, None, self._dealt)
        recent = list(self._recent)[len(self._recent) - (self.handed_out - batches) :]
        rest = [*recent, *self._started, *self._ready]
        repeats = [repeat for _, repeat in rest]
        return Position(batches, [ids.tolist() for ids, _ in rest], self._dealt, repeats if any(repeats) else None)

    def _ends_not(self, endless: Callable[[int, int], bool]) -> bool:
        """Draw the rest of the sampler. Returns True as soon as it counts as endless."""
        left = sum(len(ids) or 1 for ids, _ in self._ready)
        while not endless(left, len(self._ready)):
            if not self._draw():
                break
            left += len(self._ready[-1][0]) or 1
        else:
            return True
        if self._problem is not None:
            raise StallfreeError(
                f"there is no state to take: the sampler raised {self._problem!r}. Correct the sampler",
                page="sampler-output",
            )
        return False


class Repeats:
    """Counts how often the ids of an epoch have come, since a sample that comes again draws other random numbers.

    Args:
        known: the counts of the first batches, from a state.
    """

    def __init__(self, known: Sequence[int] = ()) -> None:
        self._known = deque(known)
        self._times = np.zeros(0, np.int32)

    def count(self, ids: Ids) -> int:
        """The number of times that the ids of the next batch have come before: the highest among them."""
        if self._known:
            return self._known.popleft()
        if not len(ids):
            return 0
        missing = int(ids.max()) + 1 - len(self._times)
        if missing > 0:
            self._times = np.append(self._times, np.zeros(missing + len(self._times), np.int32))
        times = int(self._times[ids].max())
        self._times[ids] = times + 1
        return times
