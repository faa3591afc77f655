"""The time of loops that overlap, and what is said of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.analysis.run import Pass, Row, Thread, Times
from stallfree.analysis.run import summary as text

# (which of three iterators is asked, seconds of work before, seconds of the wait, whether it ends then)
steps = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5), st.booleans())


@given(st.lists(steps, max_size=30))
def test_time_before_a_further_batch_counts_once(history: list[tuple[int, int, int, bool]]) -> None:
    row, thread = Row(("some", 1, 0, "here"), False), Thread()
    passes = [Pass(row) for _ in range(3)]
    now, between = 0.0, 0
    for number, (which, work, wait, ends) in enumerate(history):
        begun = now + work
        now = begun + wait
        one = passes[which]
        thread.enter(begun, one)
        thread.leave(now, wait, one.is_fresh)
        one.last, one.thread, one.is_fresh = None if ends else now, thread, False
        earlier = [ended for other, _, _, ended in history[:number] if other == which]
        between += work if earlier and not earlier[-1] else 0
    assert thread.between == between
    assert thread.first + thread.waited == sum(wait for _, _, wait, _ in history)


def summary(
    first: float, waited: float, between: float, *, workers: int = 2, persistent: bool = False, passes: int = 5
) -> str:
    """What is said of a loader of so many passes of 20 batches."""
    figures = Times(passes, 20 * passes, first, waited, between).json()
    row = {"dataset": "Pictures", "batch_size": 32, "num_workers": workers, "where": "train.py:9"}
    rows = [{**row, "persistent_workers": persistent, **figures}]
    return text({"target": "train.py", "cache": False, "loaders": rows, "total": figures})


@pytest.mark.parametrize(
    ("shown", "named", "further"),
    [
        (summary(3.0, 0.1, 15.0), True, False),  # workers start in each pass, and that is all
        (summary(3.0, 4.0, 7.4), True, True),
        (summary(3.0, 0.1, 7.4, workers=0), False, True),
        (summary(3.0, 0.1, 7.4, persistent=True), False, True),
        (summary(3.0, 0.1, 7.4, passes=1), False, True),
        (summary(3.0, 27.0, 1.0), False, True),  # a first batch takes as long as others do, times the workers
        (summary(0.05, 0.05, 7.4), False, False),
    ],
)
def test_persistent_workers_are_named_where_their_start_is_the_reason(shown: str, named: bool, further: bool) -> None:
    assert ("train.py:9 are started again" in shown) == ("persistent_workers=True" in shown) == named
    assert ("`stallfree run --cache`" in shown) == further


def test_the_headline_counts_the_first_batch_of_each_pass() -> None:
    assert "waited for data 33.9% of the time of its loops" in summary(first=3.0, waited=0.8, between=7.4)
