"""The schedule of a group: assigns batches to members, selects the next batch and the slots to free. Does no I/O.

The batches of all epochs form one sequence: batch n of epoch e has the number `e * batches + n`. Members request rising
numbers, so one number per member, its *cursor*, describes what it still needs: that batch and all later ones. The
lowest batch that a member needs is prepared first, and kept until no member needs or holds it. A batch is a function of
its number, so one that was dropped can be prepared again.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class MemberState:
    """The state of one member.

    Attributes:
        cursor: number of the next batch that it needs.
        waits: whether it has requested that batch.
        held: batches that are leased to it.
    """

    cursor: int
    waits: bool = False
    held: set[int] = field(default_factory=set)

    def grant(self) -> None:
        """Lease the requested batch to the member."""
        self.held.add(self.cursor)
        self.waits, self.cursor = False, self.cursor + 1


@dataclass
class Entry:
    """A batch that is being prepared or is ready.

    Attributes:
        task: what the executors have to do.
        slot: its slot, once it is ready.
        packed: its result as bytes, once it is ready.
        kept: whether a process may read its slot after its release.
    """

    task: Any = None
    slot: int | None = None
    packed: bytes = b""
    kept: bool = False

    @property
    def ready(self) -> bool:
        """Whether it is ready."""
        return self.slot is not None


class Schedule:
    """The state of a group.

    Args:
        batches: batches per epoch.
        ahead: batches prepared beyond the last one requested.
        epoch: the epoch that the first newcomer starts with.

    Attributes:
        members: the state of each member.
        entries: the batches that are being prepared or are ready.
    """

    def __init__(self, batches: int, ahead: int, epoch: int = 0) -> None:
        self.batches, self.ahead = batches, ahead
        self.members: dict[Hashable, MemberState] = {}
        self.entries: dict[int, Entry] = {}
        self._last_requested = -1
        self._freed_below = epoch * batches  # no batch from here on has been freed

    # -- members ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that a newcomer starts with: the first one of which no batch has been freed."""
        return max(-(-self._freed_below // self.batches), self._last_requested // self.batches)

    def join(self, member: Hashable, position: int) -> None:
        """Add a member that needs batch `position` next."""
        self._last_requested = max(self._last_requested, position - 1)
        self._freed_below = max(self._freed_below, position)
        self.members[member] = MemberState(position)

    def is_behind(self, position: int) -> bool:
        """Return whether a batch is of an earlier epoch than any that a member needs."""
        low = self._low
        return low is not None and position // self.batches < low // self.batches

    def leave(self, member: Hashable) -> list[Entry]:
        """Remove a member; returns the batches whose slots are now free.

        It or its children may keep reading the batches that it holds.
        """
        if member in self.members:
            for number in self.members.pop(member).held:
                self.entries[number].kept = True
        return self.free()

    def request(self, member: Hashable, number: int, *, waits: bool = True) -> bool:
        """Register that a member needs no batch before `number`, and whether it waits for that one.

        Returns whether it is granted, since the batch is ready.
        """
        state = self.members[member]
        state.cursor, state.waits = number, waits
        granted = waits and number in self.entries and self.entries[number].ready
        if waits:
            self._last_requested = max(self._last_requested, number)
        if granted:
            state.grant()
        return granted

    def release(self, member: Hashable, number: int, *, kept: bool = False) -> list[Entry]:
        """Release a member's lease on batch `number`; returns the batches whose slots are now free.

        If it is `kept`, another process may still read it.
        """
        if number in self.members[member].held:
            self.members[member].held.remove(number)
            self.entries[number].kept |= kept
        return self.free(number)

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def _low(self) -> int | None:
        """The lowest number that a member needs."""
        return min((state.cursor for state in self.members.values()), default=None)

    def next_to_start(self) -> int | None:
        """Return the batch to prepare next, or None if no more are needed for now."""
        low = self._low
        if low is None:
            return None
        last = self._last_requested
        end = min((last // self.batches + 1) * self.batches, last + self.ahead)
        return next((number for number in range(low, end) if number not in self.entries), None)

    @property
    def in_flight(self) -> int:
        """Number of batches that are being prepared."""
        return sum(not entry.ready for entry in self.entries.values())

    def start(self, number: int, task: Any) -> None:
        """Mark batch `number` as being prepared."""
        self.entries[number] = Entry(task)

    def finish(self, number: int, slot: int, packed: bytes) -> tuple[list[Any], list[Entry]]:
        """Mark batch `number` as ready; returns the members that it is granted to, and the batches to free."""
        self.entries[number].slot, self.entries[number].packed = slot, packed
        waiting = [member for member, state in self.members.items() if state.waits and state.cursor == number]
        for member in waiting:
            self.members[member].grant()
        return waiting, self.free(number)

    def free(self, *numbers: int) -> list[Entry]:
        """Forget batches, of all or of `numbers`, that no member needs or holds; returns them: their slots are free."""
        low, freed = self._low, []
        for number in numbers or list(self.entries):
            entry = self.entries.get(number)
            if entry is not None and entry.ready and (low is None or number < low) and not self._is_held(number):
                freed.append(self.entries.pop(number))
                self._freed_below = max(self._freed_below, number + 1)
        return freed

    def _is_held(self, number: int) -> bool:
        return any(number in state.held for state in self.members.values())

    # -- a full ring --------------------------------------------------------------------------------------------------

    @property
    def lowest_awaited(self) -> int | None:
        """The lowest batch that a member waits for; None if no member waits."""
        return min((state.cursor for state in self.members.values() if state.waits), default=None)

    def drop_one(self) -> list[Entry]:
        """Forget the last ready batch after the first one that a member waits for; it is prepared again later.

        Returns it, since its slot is now free; or nothing, if all slots hold batches that come before.
        """
        awaited = self.lowest_awaited
        ready = (number for number, entry in self.entries.items() if entry.ready and not self._is_held(number))
        last = max(ready, default=-1)
        return [] if awaited is None or last <= awaited else [self.entries.pop(last)]

    def laggards(self) -> list[Any]:
        """Return the members that are furthest behind and are not waiting, while others wait."""
        low = self._low
        return [
            member
            for member, state in self.members.items()
            if not state.waits and state.cursor == low and low in self.entries
        ]
