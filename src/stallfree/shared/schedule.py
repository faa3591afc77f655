"""The schedule of a group: assigns batches to members, selects the next batch and the slots to free. Does no I/O.

The batches of all epochs form one sequence: batch n of epoch e has the number `e * batches + n`. Members request rising
numbers, so one number per member, its *cursor*, describes what it still needs: that batch and all later ones. The
lowest batch that a member needs is prepared first, and kept until no member needs or holds it. A batch is a function of
its number, so one that was dropped can be prepared again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class Member:
    """The state of one member.

    Attributes:
        cursor: number of the next batch that it needs.
        requested: number of the batch that it waits for, or None.
        serial: serial of its last request; grants carry it.
        granted: number of the batch last granted to it, or None.
        held: batches that are leased to it.
        dropped: whether it lagged too long: it gets no more batches, and keeps those that it holds.
    """

    cursor: int
    requested: int | None = None
    serial: int = 0
    granted: int | None = None
    held: set[int] = field(default_factory=set)
    dropped: bool = False


class Grant(NamedTuple):
    """Batch `number` for `member`, which requested it with `serial`."""

    member: Any
    serial: int
    number: int


class Schedule:
    """The state of a group.

    Args:
        batches: batches per epoch.
        ahead: batches prepared beyond the last one requested.
        epoch: the epoch that the first newcomer starts with.
    """

    def __init__(self, batches: int, ahead: int, epoch: int = 0) -> None:
        self.batches, self.ahead = batches, ahead
        self.members: dict[Hashable, Member] = {}
        self.entries: dict[int, bool] = {}
        """The batches that are being prepared (False) or are ready (True)."""
        self._last_requested = -1
        self._freed_below = epoch * batches  # no batch from here on has been freed

    # -- members ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that a newcomer starts with: the first one of which no batch has been freed."""
        return max(-(-self._freed_below // self.batches), self._last_requested // self.batches)

    def join(self, member: Hashable, position: int | None = None) -> int:
        """Add a member that needs `position` next, or a newcomer (None); returns the number of its first batch."""
        position = self.epoch * self.batches if position is None else position
        self._last_requested = max(self._last_requested, position - 1)
        self._freed_below = max(self._freed_below, position)
        self.members[member] = Member(position)
        return position

    def is_behind(self, position: int) -> bool:
        """Return whether a batch is of an earlier epoch than any that a member needs."""
        low = self._low
        return low is not None and position // self.batches < low // self.batches

    def leave(self, member: Hashable) -> list[int]:
        """Remove a member; returns the batches whose slots are now free."""
        self.members.pop(member, None)
        return self.free()

    def request(self, member: Hashable, serial: int, number: int) -> Grant | None:
        """Register a request for batch `number`; returns the grant if the batch is ready."""
        known = self.members[member]
        if known.dropped:
            return None
        known.serial, known.cursor, known.requested = serial, number, number
        self._last_requested = max(self._last_requested, number)
        return self._grant(member, known, number) if self.entries.get(number) else None

    def _grant(self, member: Hashable, known: Member, number: int) -> Grant:
        known.requested, known.granted, known.cursor = None, number, number + 1
        known.held.add(number)
        return Grant(member, known.serial, number)

    def skip(self, member: Hashable, cursor: int, taken: int) -> list[int]:
        """Advance a member to `cursor` and revoke the batch granted to it after batch `taken`.

        Returns the batches whose slots are now free.
        """
        known = self.members[member]
        known.requested, known.cursor = None, max(known.cursor, cursor)
        if known.granted is not None and known.granted > taken:
            known.held.discard(known.granted)
        known.granted = None
        return self.free()

    def release(self, member: Hashable, number: int) -> list[int]:
        """Release a member's lease on batch `number`; returns the batches whose slots are now free."""
        self.members[member].held.discard(number)
        return self._free([number])

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def _low(self) -> int | None:
        """The lowest number that a member needs."""
        return min((known.cursor for known in self.members.values() if not known.dropped), default=None)

    def next_to_start(self) -> int | None:
        """Return the batch to prepare next, or None if no more are needed for now."""
        low = self._low
        if low is None:
            return None
        last = self._last_requested
        end = min((last // self.batches + 1) * self.batches, last + self.ahead)
        return next((number for number in range(low, end) if number not in self.entries), None)

    def start(self, number: int) -> None:
        """Mark batch `number` as being prepared."""
        self.entries[number] = False

    def finish(self, number: int) -> tuple[list[Grant], list[int]]:
        """Mark batch `number` as ready; returns the grants to waiting members, and the batches to free."""
        self.entries[number] = True
        grants = [
            self._grant(member, known, number) for member, known in self.members.items() if known.requested == number
        ]
        return grants, self._free([number])

    def free(self) -> list[int]:
        """Forget the batches that no member needs or holds; returns them, since their slots are now free."""
        return self._free(list(self.entries))

    def _free(self, numbers: Iterable[int]) -> list[int]:
        """Free those of `numbers` that no member needs or holds."""
        low = self._low
        freed = [
            number
            for number in numbers
            if self.entries.get(number) and (low is None or number < low) and not self._is_held(number)
        ]
        for number in freed:
            del self.entries[number]
        self._freed_below = max([self._freed_below, *(number + 1 for number in freed)])
        return freed

    def _is_held(self, number: int) -> bool:
        return any(number in known.held for known in self.members.values())

    def drop_one(self) -> list[int]:
        """Forget the last ready batch after the first one that a member waits for; it is prepared again later.

        Returns it, since its slot is now free; or nothing, if all slots hold batches that come before.
        """
        waiting = min((known.requested for known in self.members.values() if known.requested is not None), default=None)
        ready = [number for number, done in self.entries.items() if done and not self._is_held(number)]
        last = max(ready, default=-1)
        if waiting is None or last <= waiting:
            return []
        del self.entries[last]
        return [last]

    # -- laggards -----------------------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether a member waits for a batch."""
        return any(known.requested is not None for known in self.members.values())

    def laggards(self) -> list[Any]:
        """Return the members that are furthest behind and are not waiting, while others wait."""
        low = self._low
        return [
            member
            for member, known in self.members.items()
            if not known.dropped and known.requested is None and known.cursor == low and low in self.entries
        ]

    def drop(self, member: Hashable) -> list[int]:
        """Drop a laggard; returns the batches whose slots are now free."""
        self.members[member].dropped = True
        return self.free()
