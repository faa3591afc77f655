"""The schedule by example: which member gets which batch, what is prepared next, and when a slot is free."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from stallfree.shared.protocol import Kind
from stallfree.shared.schedule import Answer, Schedule

granted, skipped, advanced = (partial(Answer, kind) for kind in (Kind.BATCH, Kind.SKIPPED, Kind.EPOCH_ADVANCED))


class Group:
    """A schedule of 10 batches per epoch, three of them ahead, that finishes each needed batch at once."""

    def __init__(self, *members: int, batches: int = 10, ahead: int = 3) -> None:
        self.schedule = Schedule(batches, ahead)
        self.schedule.begin(0)
        self.freed: list[int] = []
        for member in members:
            assert self.schedule.join(member, position=None, catchup=False) == 0

    def prepare(self) -> list[int]:
        """Prepare all batches that are needed now."""
        started = []
        while (number := self.schedule.next_to_start()) is not None:
            started.append(number)
            self.schedule.start(number)
            self.freed += self.schedule.finish(number)[1]
        return started

    def take(self, member: int, *numbers: int, keep: bool = False) -> None:
        """Request batches for a member, and release them."""
        for number in numbers:
            told = self.schedule.request(member, number, number)
            assert told in (None, granted(member, number, number))
            self.freed += self.schedule.free()
            self.prepare()
            if not keep:
                self.freed += self.schedule.release(member, number)


def test_a_batch_is_given_as_soon_as_it_is_ready() -> None:
    group = Group(1, 2).schedule
    assert group.request(1, 5, 0) is None
    group.start(0)
    assert group.request(2, 6, 0) is None
    assert group.finish(0) == ([granted(1, 5, 0), granted(2, 6, 0)], [])
    group.start(1)
    assert group.finish(1) == ([], [])
    assert group.request(2, 7, 1) == granted(2, 7, 1)


def test_a_slot_is_free_when_the_last_one_has_let_go() -> None:
    group = Group(1, 2, 3)
    group.take(1, 0, keep=True)
    group.take(2, 0, keep=True)
    assert group.schedule.release(1, 0) == []
    assert group.schedule.release(2, 0) == []  # the third will need it
    assert group.schedule.request(3, 9, 0) == granted(3, 9, 0)
    assert group.schedule.release(3, 0) == [0]
    assert group.schedule.release(3, 0) == []
    assert group.schedule.release(1, 77) == []


def test_how_far_ahead() -> None:
    group = Group(1)
    group.schedule.request(1, 0, 0)
    assert group.prepare() == [0, 1, 2]
    group.schedule.request(1, 0, 1)
    assert group.prepare() == [3]
    group.take(1, *range(2, 7))
    assert group.schedule.epoch == 0
    group.schedule.request(1, 0, 7)
    assert group.prepare() == [9]
    group.take(1, 8, 9)
    assert group.prepare() == []  # nobody has asked for anything of the next epoch
    group.schedule.request(1, 0, 10)
    assert group.prepare() == [10, 11, 12]
    assert group.schedule.epoch == 1


def test_leaving_frees_what_one_held_and_needed() -> None:
    group = Group(1, 2, 3)
    group.take(1, 0, 1, 2)
    group.take(2, 0, keep=True)
    group.take(3, 0, 1, 2)
    assert group.freed == []
    assert group.schedule.leave(2) == [0, 1, 2]
    assert group.schedule.leave(2) == []
    assert group.schedule.leave(99) == []
    assert not group.schedule.has_waiting
    assert group.schedule.leave(1) == []
    assert group.schedule.leave(3) == [3, 4]  # prepared ahead
    assert group.schedule.next_to_start() is None


def test_skip_keeps_what_was_taken() -> None:
    group = Group(1)
    group.take(1, 0, 1, keep=True)
    assert group.schedule.skip(1, 10, 1) == [2, 3]
    assert group.schedule.skip(1, 20, 1) == []
    assert group.schedule.release(1, 1) == [1]


def test_asked_twice_it_is_given_twice_and_freed_once() -> None:
    """As after an interrupt between two requests."""
    group = Group(1)
    group.take(1, 0, keep=True)
    assert group.schedule.request(1, 9, 0) == granted(1, 9, 0)
    assert group.schedule.release(1, 0) == [0]


# --- coming -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "catchup", "epoch", "told"),
    [
        (0, False, 0, granted(2, 0, 0)),  # all of the epoch is still there
        (0, True, 0, granted(2, 0, 0)),
        (4, False, 1, None),
        (4, True, 0, skipped(2, 0, 4)),
        (9, True, 0, skipped(2, 0, 9)),
        (10, True, 1, None),  # nothing of it is left
        (10, False, 1, None),
    ],
)
def test_newcomers(gone: int, catchup: bool, epoch: int, told: Any) -> None:
    group = Group(1)
    group.take(1, *range(gone))
    group.schedule.skip(1, 10, 9) if gone == 10 else group.schedule.request(1, 0, gone)
    group.prepare()
    assert group.schedule.join(2, position=None, catchup=catchup) == epoch
    assert group.schedule.request(2, 0, epoch * 10) == told


def test_one_that_was_long_away_is_told_where_the_group_is() -> None:
    group = Group(1, 2)
    group.schedule.detach(2)
    for epoch in range(3):
        group.take(1, *range(10 * epoch, 10 * epoch + 10))
        group.schedule.skip(1, 10 * epoch + 10, 10 * epoch + 9)
    group.take(1, 30, 31)
    assert group.schedule.request(2, 0, 10) == advanced(2, 0, 3)
    group.take(1, 32)
    assert group.schedule.request(2, 0, 30) == skipped(2, 0, 32)
    assert group.schedule.request(2, 1, 32) == granted(2, 1, 32)


# --- a new coordinator ------------------------------------------------------------------------------------------------


def test_it_goes_on_where_the_members_are() -> None:
    schedule = Schedule(10, 3)
    assert schedule.join(1, position=17, catchup=False) == 1
    assert schedule.join(2, position=14, catchup=True) == 1
    schedule.begin(1)
    assert schedule.epoch == 1
    assert schedule.next_to_start() == 14
    assert schedule.request(1, 0, 17) is None
    for number in range(14, 20):
        assert schedule.next_to_start() == number
        schedule.start(number)
    assert schedule.next_to_start() is None
    assert schedule.finish(17) == ([granted(1, 0, 17)], [])
    assert schedule.request(2, 0, 14) is None
    assert schedule.join(3, position=None, catchup=False) == 2
    assert schedule.join(4, position=None, catchup=True) == 1
    assert schedule.request(4, 0, 10) == skipped(4, 0, 14)


# --- laggards ---------------------------------------------------------------------------------------------------------


def test_laggards_are_those_furthest_behind_that_do_not_wait() -> None:
    group = Group(1, 2, 3, 4)
    assert group.schedule.laggards() == []
    group.take(1, 0, 1, 2)
    group.take(2, 0)
    group.take(3, 0)
    group.take(4, 0, 1)
    assert group.schedule.laggards() == [2, 3]
    assert group.schedule.detach(2) == []
    assert group.schedule.laggards() == [3]
    assert group.schedule.detach(3) == [1]
    assert group.schedule.laggards() == [4]


def test_left_behind_for_the_rest_of_the_epoch() -> None:
    group = Group(1, 2)
    group.take(2, 0, keep=True)
    group.take(1, 0, 1, 2)
    assert group.schedule.detach(2) == [1, 2]
    assert group.schedule.request(2, 1, 1) == skipped(2, 1, 10)
    assert group.schedule.request(2, 2, 4) == skipped(2, 2, 10)
    group.take(1, *range(3, 10))
    assert group.freed == [*range(3, 10)]  # what it holds stays its own
    group.schedule.skip(1, 10, 9)
    group.schedule.skip(2, 10, 0)
    group.take(1, 10)
    assert group.schedule.laggards() == [1]  # the other one needs nothing before it says so
    assert group.freed[-1] == 10
    assert group.schedule.request(2, 3, 10) == skipped(2, 3, 11)  # and now it is one of them again
    assert group.schedule.request(2, 4, 11) == granted(2, 4, 11)
    assert group.schedule.release(2, 0) == [0]
