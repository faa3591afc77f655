"""Who gets which batch of a group, which is prepared next, and when a slot is free: pure bookkeeping, no processes.

The batches of all epochs stand in one row: batch n of epoch e is number `e * batches + n`. Members ask for numbers that
only rise, so one number per member, its *cursor*, says what it still needs: everything from there on. A batch is
prepared if a present member needs it, and forgotten when nobody needs or holds it any more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from stallfree.ipc.consumers import Leases
from stallfree.shared.protocol import Kind


@dataclass
class Member:
    """What is known of one consumer.

    Attributes:
        cursor: number of the next batch that it needs from the group.
        asked: number that it waits for, or None.
        serial: of its last request; answers carry it.
        granted: number that it was given last, or None.
        away: left behind: it prepares the rest of its epoch itself and needs nothing until its next one.
    """

    cursor: int
    asked: int | None = None
    serial: int = 0
    granted: int | None = None
    away: bool = False


class Answer(NamedTuple):
    """What to send to `member`: `Kind.BATCH`, `Kind.SKIPPED` or `Kind.EPOCH_ADVANCED`.

    With SKIPPED, it prepares by itself what is before `number` in its epoch.
    """

    kind: Kind
    member: Any
    serial: int
    number: int


class Schedule:
    """The state of a group.

    Args:
        batches: of an epoch.
        ahead: batches prepared beyond the last one asked for.
    """

    def __init__(self, batches: int, ahead: int) -> None:
        self.batches = batches
        self.ahead = ahead
        self.members: dict[Hashable, Member] = {}
        self.entries: dict[int, bool] = {}
        """The batches that are being prepared (False) or are ready."""
        self._leases = Leases()
        self._next = -1  # of the numbers below it, none will be prepared any more; -1 before `begin`
        self._last_asked = -1

    def begin(self, epoch: int) -> None:
        """All who were in this group before are in; if nobody was, it begins with `epoch`."""
        low = self._low
        self._next = epoch * self.batches if low is None else low
        self._last_asked = max(self._last_asked, self._next - 1)

    # -- members ------------------------------------------------------------------------------------------------------

    def join(self, member: Hashable, *, position: int | None, catchup: bool) -> int:
        """Let `member` in; the epoch that it begins with, or is in.

        Args:
            member: stands for one that was not there before.
            position: the batch that it needs next, if it was in this group before; None for a newcomer.
            catchup: a newcomer takes part in the epoch in which the last of the others are, even in mid-epoch.
        """
        if position is None:
            position = self._epoch_for_newcomer(catchup) * self.batches
        else:
            self._last_asked = max(self._last_asked, position - 1)
        self.members[member] = Member(self._served_from(position))
        return position // self.batches

    def _epoch_for_newcomer(self, catchup: bool) -> int:
        epoch = self.epoch
        low = self._low
        if low is not None:  # those who wait for the next epoch have asked for its first batch
            epoch = min(epoch, low // self.batches)
        first = self._served_from(epoch * self.batches)
        whole = first == epoch * self.batches
        return epoch if whole or (catchup and first < (epoch + 1) * self.batches) else epoch + 1

    def _served_from(self, number: int) -> int:
        """The first number, not below `number`, from which on all batches are there or still to come."""
        if number >= self._next:
            return number
        first = self._next
        while first > number and first - 1 in self.entries:
            first -= 1
        return first

    def leave(self, member: Hashable) -> list[int]:
        """`member` is gone, or dead; the batches whose slots are free now."""
        if self.members.pop(member, None) is not None:
            self._leases.leave(member)
        return self.free()

    def ask(self, member: Hashable, serial: int, number: int) -> Answer | None:
        """`member` asks for batch `number`; the answer, if there is one already."""
        known = self.members[member]
        known.serial = serial
        end = (number // self.batches + 1) * self.batches
        if number % self.batches == 0:
            known.away = True  # it does not count among those who say where the group is
            epoch = max(number // self.batches, self._epoch_for_newcomer(catchup=True))
            known.away = False
            if self._served_from(number) >= end:  # that epoch is over
                known.cursor = self._served_from(epoch * self.batches)
                return Answer(Kind.EPOCH_ADVANCED, member, serial, epoch)
        elif known.away:
            return Answer(Kind.SKIPPED, member, serial, end)
        first = self._served_from(number)
        if first > number:
            known.cursor = first  # maybe in a later epoch: what is gone is nobody's need
            return Answer(Kind.SKIPPED, member, serial, min(first, end))
        known.cursor = known.asked = number
        self._last_asked = max(self._last_asked, number)
        return self._grant(member, known, number) if self.entries.get(number) else None

    def _grant(self, member: Hashable, known: Member, number: int) -> Answer:
        known.asked, known.granted, known.cursor = None, number, number + 1
        self._leases.grant(number, member)
        return Answer(Kind.BATCH, member, known.serial, number)

    def skip(self, member: Hashable, cursor: int, taken: int) -> list[int]:
        """`member` needs nothing before `cursor`, and will not take what it was given after batch `taken`.

        Returns the batches whose slots are free now.
        """
        known = self.members[member]
        known.asked, known.cursor = None, max(known.cursor, cursor)
        if known.granted is not None and known.granted > taken:
            self._leases.release(known.granted, member)
        known.granted = None
        return self.free()

    def release(self, member: Hashable, number: int) -> list[int]:
        """`member` has let go of batch `number`; the batches whose slots are free now."""
        self._leases.release(number, member)
        return self._free([number])

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The last one that was asked for; -1 before the first."""
        return self._last_asked // self.batches

    @property
    def _low(self) -> int | None:
        """The lowest number that a present member needs."""
        return min((known.cursor for known in self.members.values() if not known.away), default=None)

    def next_to_start(self) -> int | None:
        """The batch to prepare next; None if no more are wanted for now."""
        low = self._low
        if low is None or self._next < 0:
            return None
        number = max(self._next, low)
        end = min((self._last_asked // self.batches + 1) * self.batches, self._last_asked + self.ahead)
        return number if number < end else None

    def start(self, number: int) -> None:
        """Batch `number` is being prepared."""
        self.entries[number] = False
        self._next = number + 1

    def finish(self, number: int) -> tuple[list[Answer], list[int]]:
        """Batch `number` is ready: what to tell whom, and the batches whose slots are free now."""
        self.entries[number] = True
        grants = [self._grant(member, known, number) for member, known in self.members.items() if known.asked == number]
        return grants, self._free([number])

    def free(self) -> list[int]:
        """Forget the batches that nobody needs or holds; their slots are free now.

        To be called after an `ask` that was not answered with a batch.
        """
        return self._free(list(self.entries))

    def _free(self, numbers: Iterable[int]) -> list[int]:
        """The same, of some batches."""
        low = self._low
        freed = [
            number
            for number in numbers
            if self.entries.get(number) and (low is None or number < low) and not self._leases.holders(number)
        ]
        for number in freed:
            del self.entries[number]
        return freed

    # -- laggards -----------------------------------------------------------------------------------------------------

    @property
    def hungry(self) -> bool:
        """Whether a member waits for a batch."""
        return any(known.asked is not None for known in self.members.values())

    def laggards(self) -> list[Any]:
        """The members that are furthest behind while others wait, and do not wait themselves."""
        low = self._low
        return [
            member
            for member, known in self.members.items()
            if not known.away and known.asked is None and known.cursor == low and low in self.entries
        ]

    def leave_behind(self, member: Hashable) -> list[int]:
        """`member` prepares the rest of its epoch itself; the batches whose slots are free now."""
        self.members[member].away = True
        return self.free()
