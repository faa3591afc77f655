"""The schedule of a group: assigns batches to members, selects the next batch and the slots to free. Does no I/O.

The batches of all epochs form one sequence: batch n of epoch e has the number `e * batches + n`. Members request rising
numbers, so one number per member, its *cursor*, describes what it still needs: that batch and all later ones. A batch
is prepared if a present member needs it, and forgotten when no member needs or holds it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stallfree.shared.protocol import Kind


@dataclass
class Member:
    """The state of one member.

    Attributes:
        cursor: number of the next batch that it needs from the group.
        requested: number of the batch that it waits for, or None.
        serial: serial of its last request; answers carry it.
        granted: number of the batch last granted to it, or None.
        detached: whether it prepares the rest of its epoch locally, and needs no batch until the next epoch.
        held: batches that are leased to it.
    """

    cursor: int
    requested: int | None = None
    serial: int = 0
    granted: int | None = None
    detached: bool = False
    held: set[int] = field(default_factory=set)


class Answer(NamedTuple):
    """A message for `member`: `Kind.BATCH`, `Kind.SKIPPED` or `Kind.EPOCH_ADVANCED`.

    After SKIPPED, the member prepares the batches of its epoch before `number` locally.
    """

    kind: Kind
    member: Any
    serial: int
    number: int


class Schedule:
    """The state of a group.

    Args:
        batches: batches per epoch.
        ahead: batches prepared beyond the last one requested.
    """

    def __init__(self, batches: int, ahead: int) -> None:
        self.batches = batches
        self.ahead = ahead
        self.members: dict[Hashable, Member] = {}
        self.entries: dict[int, bool] = {}
        """The batches that are being prepared (False) or are ready (True)."""
        self._next = -1  # lower numbers will not be prepared any more; -1 before `begin`
        self._last_asked = -1

    def begin(self, epoch: int) -> None:
        """Start with the lowest batch that a returning member needs, or with `epoch` if there is no member."""
        low = self._low
        self._next = epoch * self.batches if low is None else low
        self._last_asked = max(self._last_asked, self._next - 1)

    # -- members ------------------------------------------------------------------------------------------------------

    def join(self, member: Hashable, *, position: int | None, catchup: bool) -> int:
        """Add a member; returns the epoch that it starts with, or is in.

        Args:
            member: key of the new member.
            position: the batch that it needs next, if it was in this group before; None for a newcomer.
            catchup: a newcomer joins the epoch of the slowest member, even in the middle of it.
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
        if low is not None:  # members that wait for the next epoch have requested its first batch
            epoch = min(epoch, low // self.batches)
        first = self._served_from(epoch * self.batches)
        whole = first == epoch * self.batches
        return epoch if whole or (catchup and first < (epoch + 1) * self.batches) else epoch + 1

    def _served_from(self, number: int) -> int:
        """Return the first number, at least `number`, from which on all batches are ready or still to be prepared."""
        if number >= self._next:
            return number
        first = self._next
        while first > number and first - 1 in self.entries:
            first -= 1
        return first

    def leave(self, member: Hashable) -> list[int]:
        """Remove a member; returns the batches whose slots are now free."""
        self.members.pop(member, None)
        return self.free()

    def request(self, member: Hashable, serial: int, number: int) -> Answer | None:
        """Register a request for batch `number`; returns the answer if there is one already."""
        known = self.members[member]
        known.serial = serial
        end = (number // self.batches + 1) * self.batches
        if number % self.batches == 0:
            known.detached = True  # exclude it from the members that determine the group's epoch
            epoch = max(number // self.batches, self._epoch_for_newcomer(catchup=True))
            known.detached = False
            if self._served_from(number) >= end:  # that epoch is over
                known.cursor = self._served_from(epoch * self.batches)
                return Answer(Kind.EPOCH_ADVANCED, member, serial, epoch)
        elif known.detached:
            return Answer(Kind.SKIPPED, member, serial, end)
        first = self._served_from(number)
        if first > number:
            known.cursor = first  # possibly in a later epoch: batches that are gone are not needed
            return Answer(Kind.SKIPPED, member, serial, min(first, end))
        known.cursor = known.requested = number
        self._last_asked = max(self._last_asked, number)
        return self._grant(member, known, number) if self.entries.get(number) else None

    def _grant(self, member: Hashable, known: Member, number: int) -> Answer:
        known.requested, known.granted, known.cursor = None, number, number + 1
        known.held.add(number)
        return Answer(Kind.BATCH, member, known.serial, number)

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
    def epoch(self) -> int:
        """The last epoch of which a batch was requested; -1 before the first request."""
        return self._last_asked // self.batches

    @property
    def _low(self) -> int | None:
        """The lowest number that an attached member needs."""
        return min((known.cursor for known in self.members.values() if not known.detached), default=None)

    def next_to_start(self) -> int | None:
        """Return the batch to prepare next, or None if no more are needed for now."""
        low = self._low
        if low is None or self._next < 0:
            return None
        number = max(self._next, low)
        end = min((self._last_asked // self.batches + 1) * self.batches, self._last_asked + self.ahead)
        return number if number < end else None

    def start(self, number: int) -> None:
        """Mark batch `number` as being prepared."""
        self.entries[number] = False
        self._next = number + 1

    def finish(self, number: int) -> tuple[list[Answer], list[int]]:
        """Mark batch `number` as ready; returns the answers to waiting members, and the batches to free."""
        self.entries[number] = True
        grants = [
            self._grant(member, known, number) for member, known in self.members.items() if known.requested == number
        ]
        return grants, self._free([number])

    def free(self) -> list[int]:
        """Forget the batches that no member needs or holds; returns them, since their slots are now free.

        Call it after a `request` that was not answered with a batch.
        """
        return self._free(list(self.entries))

    def _free(self, numbers: Iterable[int]) -> list[int]:
        """Free those of `numbers` that no member needs or holds."""
        low = self._low
        freed = [
            number
            for number in numbers
            if self.entries.get(number)
            and (low is None or number < low)
            and not any(number in known.held for known in self.members.values())
        ]
        for number in freed:
            del self.entries[number]
        return freed

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
            if not known.detached and known.requested is None and known.cursor == low and low in self.entries
        ]

    def detach(self, member: Hashable) -> list[int]:
        """Detach a member for the rest of its epoch; returns the batches whose slots are now free."""
        self.members[member].detached = True
        return self.free()
