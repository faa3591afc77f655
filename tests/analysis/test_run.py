"""The time of loops that overlap, against a model that looks at the whole history at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.analysis.run import Pass, Row, Thread, _figures
from stallfree.analysis.run import summary as text

# (which of three iterators is asked, seconds of work before, seconds of the wait, whether it ends then)
steps = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5), st.booleans())


@given(st.lists(steps, max_size=30))
def test_time_between_waits_counts_once_if_any_loop_is_under_way(history: list[tuple[int, int, int, bool]]) -> None:
    row, thread = Row(("some", 1, 0, "here"), False), Thread()
    passes = [Pass(row) for _ in range(3)]
    now, waits = 0.0, []
    for which, work, wait, ends in history:
        begun = now + work
        now = begun + wait
        one = passes[which]
        thread.enter(begun, one)
        thread.leave(now, wait, one.is_fresh)
        one.last, one.mark, one.thread, one.is_fresh = now, thread.waits, thread, False
        waits.append((which, begun, now))
        if ends:
            one.last = None
    # The model: second by second, whether somebody waits, and whether a pass goes on.
    ended = [ends for _, _, _, ends in history]
    between = 0
    for second in range(int(now)):
        waiting = any(begun <= second < end for _, begun, end in waits)
        under_way = False
        for which in range(3):
            before = [at for at, (who, _, end) in enumerate(waits) if who == which and end <= second]
            after = [at for at, (who, begun, _) in enumerate(waits) if who == which and begun > second]
            under_way |= bool(before and after and not ended[before[-1]])
        between += under_way and not waiting
    assert thread.between == between
    assert thread.first + thread.waited == sum(wait for _, _, wait, _ in history)


def summary(
    first: float, waited: float, between: float, *, workers: int = 2, persistent: bool = False, passes: int = 5
) -> str:
    """What is said of a loader of so many passes of 20 batches."""
    figures = _figures(passes, 20 * passes, first, waited, between)
    row = {"dataset": "Pictures", "batch_size": 32, "num_workers": workers, "where": "train.py:9"}
    rows = [{**row, "persistent_workers": persistent, **figures}]
    return text({"target": "train.py", "loaders": rows, "total": figures})


def test_the_headline_counts_the_first_batch_of_each_pass() -> None:
    assert "waited for data 33.9% of the time of its loops" in summary(first=3.0, waited=0.8, between=7.4)


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
