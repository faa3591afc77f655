"""Who gets which batch of a group, what is prepared next, and when a slot is free: by example."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from stallfree.shared.protocol import Kind
from stallfree.shared.schedule import Answer, Schedule

granted, skipped, advanced = (partial(Answer, kind) for kind in (Kind.BATCH, Kind.SKIPPED, Kind.EPOCH_ADVANCED))


class Group:
    """A schedule of 10 batches an epoch, three of them ahead, that prepares what it wants at once."""

    def __init__(self, *members: int, batches: int = 10, ahead: int = 3) -> None:
        self.schedule = Schedule(batches, ahead)
        self.schedule.begin(0)
        self.freed: list[int] = []
        for member in members:
            assert self.schedule.join(member, position=None, catchup=False) == 0

    def prepare(self) -> list[int]:
        """All that is wanted now."""
        started = []
        while (number := self.schedule.next_to_start()) is not None:
            started.append(number)
            self.schedule.start(number)
            self.freed += self.schedule.finish(number)[1]
        return started

    def take(self, member: int, *numbers: int, keep: bool = False) -> None:
        """Let a member ask for batches and let go of them."""
        for number in numbers:
            told = self.schedule.ask(member, number, number)
            assert told in (None, granted(member, number, number))
            self.freed += self.schedule.free()
            self.prepare()
            if not keep:
                self.freed += self.schedule.release(member, number)


def test_a_batch_is_given_as_soon_as_it_is_ready() -> None:
    group = Group(1, 2).schedule
    assert group.ask(1, 5, 0) is None
    group.start(0)
    assert group.ask(2, 6, 0) is None
    assert group.finish(0) == ([granted(1, 5, 0), granted(2, 6, 0)], [])
    group.start(1)
    assert group.finish(1) == ([], [])
    assert group.ask(2, 7, 1) == granted(2, 7, 1)


def test_a_slot_is_free_when_the_last_one_has_let_go() -> None:
    group = Group(1, 2, 3)
    group.take(1, 0, keep=True)
    group.take(2, 0, keep=True)
    assert group.schedule.release(1, 0) == []
    assert group.schedule.release(2, 0) == []  # the third will need it
    assert group.schedule.ask(3, 9, 0) == granted(3, 9, 0)
    assert group.schedule.release(3, 0) == [0]
    assert group.schedule.release(3, 0) == []
    assert group.schedule.release(1, 77) == []


def test_slots_are_freed_in_any_order() -> None:
    group = Group(1)
    group.take(1, 0, 1, 2, keep=True)
    assert group.schedule.release(1, 1) == [1]
    assert group.schedule.release(1, 0) == [0]


def test_nothing_is_prepared_before_somebody_asks() -> None:
    schedule = Schedule(10, 3)
    assert schedule.next_to_start() is None
    schedule.begin(0)
    assert schedule.next_to_start() is None
    assert schedule.join(1, position=None, catchup=False) == 0
    assert schedule.next_to_start() is None
    assert not schedule.hungry
    schedule.ask(1, 0, 0)
    assert schedule.hungry
    assert schedule.next_to_start() == 0


def test_before_the_beginning_nothing_is_started() -> None:
    schedule = Schedule(10, 3)
    assert schedule.join(1, position=4, catchup=False) == 0
    assert schedule.ask(1, 0, 4) is None
    assert schedule.next_to_start() is None
    schedule.begin(7)
    assert schedule.next_to_start() == 4


def test_how_far_ahead() -> None:
    group = Group(1)
    group.schedule.ask(1, 0, 0)
    assert group.prepare() == [0, 1, 2]
    group.schedule.ask(1, 0, 1)
    assert group.prepare() == [3]
    group.take(1, *range(2, 7))
    assert group.schedule.epoch == 0
    group.schedule.ask(1, 0, 7)
    assert group.prepare() == [9]
    group.take(1, 8, 9)
    assert group.prepare() == []  # nobody has asked for anything of the next epoch
    group.schedule.ask(1, 0, 10)
    assert group.prepare() == [10, 11, 12]
    assert group.schedule.epoch == 1


def test_what_all_have_left_out_is_not_prepared() -> None:
    group = Group(1, 2)
    group.take(1, 0, 1)
    group.take(2, 0)
    assert group.schedule.skip(1, 10, 1) == []
    assert group.schedule.skip(2, 10, 0) == [1, 2, 3]
    assert group.schedule.ask(1, 0, 10) is None
    assert group.prepare() == [10, 11, 12]


def test_leaving_frees_what_one_held_and_needed() -> None:
    group = Group(1, 2, 3)
    group.take(1, 0, 1, 2)
    group.take(2, 0, keep=True)
    group.take(3, 0, 1, 2)
    assert group.freed == []
    assert group.schedule.leave(2) == [0, 1, 2]
    assert group.schedule.leave(2) == []
    assert group.schedule.leave(99) == []
    assert not group.schedule.hungry
    assert group.schedule.leave(1) == []
    assert group.schedule.leave(3) == [3, 4]  # prepared ahead
    assert group.schedule.next_to_start() is None


def test_what_is_under_way_when_the_last_one_leaves_is_freed_later() -> None:
    group = Group(1).schedule
    group.ask(1, 0, 0)
    group.start(0)
    assert group.leave(1) == []
    assert group.finish(0) == ([], [0])


def test_skip_takes_back_what_is_on_its_way() -> None:
    group = Group(1)
    group.take(1, 0, keep=True)
    assert group.schedule.ask(1, 0, 1) == granted(1, 0, 1)
    assert group.schedule.skip(1, 10, 0) == [1, 2]  # but not 0, which it holds
    assert group.schedule.release(1, 0) == [0]


def test_skip_keeps_what_was_taken() -> None:
    group = Group(1)
    group.take(1, 0, 1, keep=True)
    assert group.schedule.skip(1, 10, 1) == [2, 3]
    assert group.schedule.skip(1, 20, 1) == []
    assert group.schedule.release(1, 1) == [1]


def test_skip_takes_back_a_request() -> None:
    group = Group(1, 2).schedule
    group.ask(1, 0, 0)
    group.ask(2, 0, 0)
    group.start(0)
    group.skip(1, 10, -1)
    assert group.finish(0) == ([granted(2, 0, 0)], [])
    assert not group.hungry


def test_skip_does_not_go_back() -> None:
    group = Group(1, 2)
    group.take(1, *range(5))
    group.schedule.skip(1, 2, 4)
    group.take(2, *range(5))
    assert group.freed == [0, 1, 2, 3, 4]


def test_the_answer_carries_the_latest_serial() -> None:
    group = Group(1).schedule
    assert group.ask(1, 3, 0) is None
    assert group.ask(1, 4, 0) is None
    group.start(0)
    assert group.finish(0) == ([granted(1, 4, 0)], [])


def test_asked_twice_it_is_given_twice_and_freed_once() -> None:
    """As after an interrupt between two requests."""
    group = Group(1)
    group.take(1, 0, keep=True)
    assert group.schedule.ask(1, 9, 0) == granted(1, 9, 0)
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
    group.schedule.skip(1, 10, 9) if gone == 10 else group.schedule.ask(1, 0, gone)
    group.prepare()
    assert group.schedule.join(2, position=None, catchup=catchup) == epoch
    assert group.schedule.ask(2, 0, epoch * 10) == told


def test_who_waits_for_the_next_epoch_does_not_hide_the_present_one() -> None:
    group = Group(1)
    group.take(1, 0, 1)
    group.schedule.ask(1, 0, 2)
    assert group.schedule.join(2, position=None, catchup=False) == 1
    assert group.schedule.ask(2, 0, 10) is None
    assert group.schedule.epoch == 1
    assert group.schedule.join(3, position=None, catchup=True) == 0
    assert group.schedule.ask(3, 0, 0) == skipped(3, 0, 2)
    assert group.schedule.join(4, position=None, catchup=False) == 1


def test_one_that_is_left_behind_does_not_say_where_the_group_is() -> None:
    group = Group(1, 2)
    group.take(1, *range(12))
    group.schedule.leave_behind(2)
    group.prepare()
    assert group.schedule.join(3, position=None, catchup=True) == 1


def test_a_newcomer_keeps_what_it_is_to_get() -> None:
    """From the moment that it is let in."""
    group = Group(1)
    group.take(1, 0, 1, 2, 3)
    group.schedule.join(2, position=None, catchup=True)
    group.take(1, 4, 5)
    assert group.freed == [0, 1, 2, 3]
    assert group.schedule.ask(2, 0, 0) == skipped(2, 0, 4)
    assert group.schedule.ask(2, 1, 4) == granted(2, 1, 4)


def test_what_somebody_still_holds_is_not_given_to_newcomers_if_there_is_a_gap() -> None:
    group = Group(1)
    group.take(1, 0)
    group.take(1, 1, keep=True)
    group.take(1, 2, 3)
    group.schedule.join(2, position=None, catchup=True)
    assert group.schedule.ask(2, 0, 0) == skipped(2, 0, 4)


def test_what_somebody_still_holds_is_given_to_newcomers() -> None:
    group = Group(1)
    group.take(1, 0)
    group.take(1, 1, 2, 3, keep=True)
    group.schedule.join(2, position=None, catchup=True)
    assert group.schedule.ask(2, 0, 0) == skipped(2, 0, 1)
    assert group.schedule.ask(2, 1, 1) == granted(2, 1, 1)
    assert group.schedule.release(1, 1) == []
    assert group.schedule.release(2, 1) == [1]


def test_one_that_was_long_away_is_told_where_the_group_is() -> None:
    group = Group(1, 2)
    group.schedule.leave_behind(2)
    for epoch in range(3):
        group.take(1, *range(10 * epoch, 10 * epoch + 10))
        group.schedule.skip(1, 10 * epoch + 10, 10 * epoch + 9)
    group.take(1, 30, 31)
    assert group.schedule.ask(2, 0, 10) == advanced(2, 0, 3)
    group.take(1, 32)
    assert group.schedule.ask(2, 0, 30) == skipped(2, 0, 32)
    assert group.schedule.ask(2, 1, 32) == granted(2, 1, 32)


def test_one_that_was_long_away_and_finds_all_at_the_end() -> None:
    group = Group(1, 2)
    group.schedule.leave_behind(2)
    group.take(1, *range(20))
    group.schedule.skip(1, 20, 19)
    assert group.schedule.ask(2, 0, 10) == advanced(2, 0, 2)
    assert group.schedule.ask(2, 0, 20) is None
    assert group.prepare() == [20, 21, 22]


# --- a new coordinator ------------------------------------------------------------------------------------------------


def test_it_goes_on_where_the_members_are() -> None:
    schedule = Schedule(10, 3)
    assert schedule.join(1, position=17, catchup=False) == 1
    assert schedule.join(2, position=14, catchup=True) == 1
    schedule.begin(1)
    assert schedule.epoch == 1
    assert schedule.next_to_start() == 14
    assert schedule.ask(1, 0, 17) is None
    for number in range(14, 20):
        assert schedule.next_to_start() == number
        schedule.start(number)
    assert schedule.next_to_start() is None
    assert schedule.finish(17) == ([granted(1, 0, 17)], [])
    assert schedule.ask(2, 0, 14) is None
    assert schedule.join(3, position=None, catchup=False) == 2
    assert schedule.join(4, position=None, catchup=True) == 1
    assert schedule.ask(4, 0, 10) == skipped(4, 0, 14)


def test_it_begins_anew_when_nobody_was_there() -> None:
    schedule = Schedule(10, 3)
    schedule.begin(4)
    assert schedule.epoch == 3
    assert schedule.join(1, position=None, catchup=True) == 4
    assert schedule.ask(1, 0, 40) is None
    assert schedule.next_to_start() == 40


def test_one_that_comes_back_late() -> None:
    schedule = Schedule(10, 3)
    schedule.join(1, position=17, catchup=False)
    schedule.begin(2)
    schedule.ask(1, 0, 17)
    schedule.start(17)
    schedule.finish(17)
    schedule.release(1, 17)
    assert schedule.join(2, position=12, catchup=False) == 1
    assert schedule.ask(2, 0, 12) == skipped(2, 0, 18)  # the first that is still to come
    assert schedule.ask(2, 0, 18) is None
    assert schedule.join(3, position=25, catchup=False) == 2
    assert schedule.epoch == 2  # somebody has been that far
    assert schedule.ask(3, 0, 25) is None
    assert schedule.next_to_start() == 18


def test_what_only_a_late_one_kept_is_free_when_it_moves_on() -> None:
    schedule = Schedule(2, 4)
    schedule.join(1, position=8, catchup=False)
    schedule.begin(0)
    schedule.join(2, position=2, catchup=False)
    for number in (8, 9):
        schedule.ask(1, 0, number)
        schedule.start(number)
        schedule.finish(number)
        assert schedule.release(1, number) == []
    assert schedule.skip(1, 10, 9) == []
    assert schedule.ask(1, 0, 10) is None
    assert schedule.free() == []
    assert schedule.ask(2, 0, 2) == advanced(2, 0, 5)
    assert schedule.free() == [8, 9]


# --- laggards ---------------------------------------------------------------------------------------------------------


def test_laggards_are_those_furthest_behind_that_do_not_wait() -> None:
    group = Group(1, 2, 3, 4)
    assert group.schedule.laggards() == []
    group.take(1, 0, 1, 2)
    group.take(2, 0)
    group.take(3, 0)
    group.take(4, 0, 1)
    assert group.schedule.laggards() == [2, 3]
    assert group.schedule.leave_behind(2) == []
    assert group.schedule.laggards() == [3]
    assert group.schedule.leave_behind(3) == [1]
    assert group.schedule.laggards() == [4]


def test_who_waits_is_no_laggard() -> None:
    group = Group(1, 2)
    assert group.schedule.ask(1, 0, 0) is None
    group.schedule.start(0)
    assert group.schedule.laggards() == [2]
    assert group.schedule.ask(2, 0, 0) is None
    assert group.schedule.laggards() == []


def test_left_behind_for_the_rest_of_the_epoch() -> None:
    group = Group(1, 2)
    group.take(2, 0, keep=True)
    group.take(1, 0, 1, 2)
    assert group.schedule.leave_behind(2) == [1, 2]
    assert group.schedule.ask(2, 1, 1) == skipped(2, 1, 10)
    assert group.schedule.ask(2, 2, 4) == skipped(2, 2, 10)
    group.take(1, *range(3, 10))
    assert group.freed == [*range(3, 10)]  # what it holds stays its own
    group.schedule.skip(1, 10, 9)
    group.schedule.skip(2, 10, 0)
    group.take(1, 10)
    assert group.schedule.laggards() == [1]  # the other one needs nothing before it says so
    assert group.freed[-1] == 10
    assert group.schedule.ask(2, 3, 10) == skipped(2, 3, 11)  # and now it is one of them again
    assert group.schedule.ask(2, 4, 11) == granted(2, 4, 11)
    assert group.schedule.release(2, 0) == [0]


def test_left_behind_alone_nothing_is_prepared() -> None:
    group = Group(1)
    group.take(1, 0)
    assert group.schedule.leave_behind(1) == [1, 2]
    assert group.schedule.next_to_start() is None
    assert group.schedule.ask(1, 0, 1) == skipped(1, 0, 10)
    assert group.schedule.ask(1, 0, 10) is None
    assert group.prepare() == [10, 11, 12]


def test_a_laggard_that_comes_back_late_after_a_takeover_is_found() -> None:
    """What it needs next was never prepared for it, but all that follows is kept for it."""
    schedule = Schedule(10, 4)
    schedule.join(1, position=7, catchup=False)
    schedule.begin(0)
    for number in range(7, 12):
        schedule.ask(1, 0, number)
        schedule.start(number)
        schedule.finish(number)
        schedule.release(1, number)
    schedule.join(2, position=5, catchup=False)
    assert schedule.ask(2, 0, 5) == skipped(2, 0, 10)
    schedule.skip(2, 10, -1)
    for number in range(12, 16):
        schedule.ask(1, 0, number)
        schedule.start(number)
        schedule.finish(number)
        schedule.release(1, number)
    assert schedule.ask(1, 0, 16) is None
    assert schedule.laggards() == [2]
    assert schedule.leave_behind(2) == [12, 13, 14, 15]
