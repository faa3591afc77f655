"""The progress of an epoch: the batches that are left, in flight, and delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

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
        end_stream: see `EpochPlan`.

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
        end_stream: Callable[[Ids], None] | None = None,
    ) -> None:
        self.number = number
        self.first = self.handed_out = first
        self._dealt = dealt
        self._end_stream = end_stream
        self._batches = batches
        self._problem: Exception | None = None  # exception of the sampler, which ends the epoch
        self._ready: deque[Ids] = deque()  # drawn from the sampler, not started
        self._started: deque[Ids] = deque()  # started, not delivered
        self._recent: deque[Ids] = deque(maxlen=RECENT)  # delivered

    def peek(self) -> Ids | None:
        """The ids of the next batch to start, None at the end."""
        if not self._ready:
            self._draw()
        return self._ready[0] if self._ready else None

    def _draw(self) -> bool:
        """Take one batch from the sampler; False if there is none."""
        try:
            self._ready.append(next(self._batches))
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

    def start(self) -> tuple[int, Ids]:
        """Take the batch that `peek` returned: its number and ids."""
        number = self.handed_out + len(self._started)
        ids = self._ready.popleft()
        self._started.append(ids)
        return number, ids

    def hand_out(self) -> None:
        """Record the delivery of the first batch in flight."""
        self._recent.append(self._started.popleft())
        self.handed_out += 1

    def end_stream(self, ids: Ids) -> None:
        """Draw no more batches of the stream that these ids are from, if they are from one."""
        if self._end_stream is not None:
            self._end_stream(ids)

    def position(self, batches: int, *, planned: bool) -> Position:
        """The position of the epoch after `batches` delivered batches, at most 64 ago.

        Unless the epoch is `planned` by (seed, epoch), this reads the rest of the sampler. Raises `StallfreeError` if
        that fails.
        """
        return Position(batches, None if planned else self._rest(batches), self._dealt)

    def _rest(self, first: int) -> list[list[int]]:
        while self._draw():
            pass
        if self._problem is not None:
            raise StallfreeError(
                f"there is no state to take: the sampler raised {self._problem!r}. Correct the sampler",
                page="sampler-output",
            )
        recent = list(self._recent)[len(self._recent) - (self.handed_out - first) :]
        return [ids.tolist() for ids in (*recent, *self._started, *self._ready)]
