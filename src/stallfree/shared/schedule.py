"""Who gets which batch of a group, which is prepared next, and when a slot is free: pure bookkeeping, no processes.

The batches of all epochs stand in one row: batch n of epoch e is number `e * batches + n`. Members ask for numbers that
only rise, so one number per member, its *cursor*, says what it still needs: everything from there on. A batch is
prepared if a present member needs it, and forgotten when nobody needs or holds it any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass
class Entry:
    """A batch that is being prepared, or is ready. `holders` may hold its slot."""

    ready: bool = False
    holders: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Grant:
    """Give batch `number` to `member`."""

    member: int
    serial: int
    number: int


@dataclass(frozen=True)
class Alone:
    """Tell `member` that the group serves its epoch only from batch `start` on; what is before it prepares itself."""

    member: int
    serial: int
    start: int


@dataclass(frozen=True)
class Moved:
    """Tell `member`, which is about to begin an epoch, that the group is in `epoch` by now."""

    member: int
    serial: int
    epoch: int


Answer = Grant | Alone | Moved


class Schedule:
    """The state of a group.

    Args:
        batches: of an epoch.
        ahead: batches prepared beyond the last one asked for.
    """

    def __init__(self, batches: int, ahead: int) -> None:
        self.batches = batches
        self.ahead = ahead
        self.members: dict[int, Member] = {}
        self.entries: dict[int, Entry] = {}
        self._next = -1  # of the numbers below it, none will be prepared any more; -1 before `begin`
        self._last_asked = -1

    def begin(self, epoch: int) -> None:
        """All who were in this group before are in; if nobody was, it begins with `epoch`."""
        low = self._low
        self._next = epoch * self.batches if low is None else low
        self._last_asked = max(self._last_asked, self._next - 1)

    # -- members ------------------------------------------------------------------------------------------------------

    def join(self, member: int, *, position: int | None, catchup: bool) -> int:
        """Let `member` in; the epoch that it begins with, or is in.

        Args:
            member: a number that nobody had before.
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

    def leave(self, member: int) -> list[int]:
        """`member` is gone, or dead; the batches whose slots are free now."""
        if self.members.pop(member, None) is not None:
            for entry in self.entries.values():
                entry.holders.discard(member)
        return self.free()

    def ask(self, member: int, serial: int, number: int) -> Answer | None:
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
                return Moved(member, serial, epoch)
        elif known.away:
            return Alone(member, serial, end)
        first = self._served_from(number)
        if first > number:
            known.cursor = first  # maybe in a later epoch: what is gone is nobody's need
            return Alone(member, serial, min(first, end))
        known.cursor = known.asked = number
        self._last_asked = max(self._last_asked, number)
        entry = self.entries.get(number)
        return self._grant(member, known, number) if entry is not None and entry.ready else None

    def _grant(self, member: int, known: Member, number: int) -> Grant:
        known.asked, known.granted, known.cursor = None, number, number + 1
        self.entries[number].holders.add(member)
        return Grant(member, known.serial, number)

    def skip(self, member: int, cursor: int, taken: int) -> list[int]:
        """`member` needs nothing before `cursor`, and will not take what it was given after batch `taken`.

        Returns the batches whose slots are free now.
        """
        known = self.members[member]
        known.asked, known.cursor = None, max(known.cursor, cursor)
        if known.granted is not None and known.granted > taken:
            self.entries[known.granted].holders.discard(member)
        known.granted = None
        return self.free()

    def release(self, member: int, number: int) -> list[int]:
        """`member` has let go of batch `number`; the batches whose slots are free now."""
        entry = self.entries.get(number)
        if entry is not None:
            entry.holders.discard(member)
        return self.free()

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
        self.entries[number] = Entry()
        self._next = number + 1

    def finish(self, number: int) -> tuple[list[Answer], list[int]]:
        """Batch `number` is ready: what to tell whom, and the batches whose slots are free now."""
        self.entries[number].ready = True
        grants: list[Answer] = [
            self._grant(member, known, number) for member, known in self.members.items() if known.asked == number
        ]
        return grants, self.free()

    def free(self) -> list[int]:
        """Forget the batches that nobody needs or holds; their slots are free now. To be called after `ask`."""
        low = self._low
        freed = [
            number
            for number, entry in self.entries.items()
            if entry.ready and not entry.holders and (low is None or number < low)
        ]
        for number in freed:
            del self.entries[number]
        return freed

    # -- laggards -----------------------------------------------------------------------------------------------------

    @property
    def hungry(self) -> bool:
        """Whether a member waits for a batch."""
        return any(known.asked is not None for known in self.members.values())

    def laggards(self) -> list[int]:
        """The members that are furthest behind while others wait, and do not wait themselves."""
        low = self._low
        return [
            member
            for member, known in self.members.items()
            if not known.away and known.asked is None and known.cursor == low and low in self.entries
        ]

    def leave_behind(self, member: int) -> list[int]:
        """`member` prepares the rest of its epoch itself; the batches whose slots are free now."""
        self.members[member].away = True
        return self.free()
