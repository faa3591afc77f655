"""The time of loops that overlap, and what is said of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.analysis.run import Pass, Row, Thread, Times, summary

# (which of three iterators is asked, seconds of work before, seconds of the wait, whether it ends then)
steps = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5), st.booleans())


@given(st.lists(steps, max_size=30))
def test_time_before_a_further_batch_counts_once(history: list[tuple[int, int, int, bool]]) -> None:
    thread, passes = Thread(), [Pass(Row("some", 1, 0, False, "here")) for _ in range(3)]
    now, between = 0.0, 0
    for number, (which, work, wait, ends) in enumerate(history):
        one, begun = passes[which], now + work
        now = begun + wait
        thread.enter(begun, one)
        thread.leave(now, wait, one.last is None)
        one.last, one.thread = None if ends else now, thread
        earlier = [ended for other, _, _, ended in history[:number] if other == which]
        between += work if earlier and not earlier[-1] else 0
    assert thread.between_seconds == between
    assert thread.first_seconds + thread.waited_seconds == sum(wait for _, _, wait, _ in history)


NAMED = "give the loader at train.py:9 persistent_workers=True; starting its workers took"
CACHE, NOTHING = "`stallfree run --cache` measures", "Next: nothing, data arrive in time"


@pytest.mark.parametrize(("first", "waited", "between", "changed", "said"), [
    (3.0, 0.1, 15.0, {}, [NAMED]), (3.0, 4.0, 7.4, {}, [NAMED, CACHE]), (3.0, 0.1, 7.4, {"num_workers": 0}, [CACHE]),
    (3.0, 0.1, 7.4, {"persistent_workers": True}, [CACHE]), (3.0, 0.1, 7.4, {"passes": 1}, [CACHE]),
    (3.0, 20.0, 1.0, {}, [CACHE]),  # a first batch takes as long as others do, times the workers
    (0.05, 0.05, 7.4, {}, [NOTHING]),
])  # fmt: skip
def test_what_is_said_of_five_passes(first: float, waited: float, between: float, changed: Any, said: Any) -> None:
    """Persistent workers are named where the start of workers is the reason."""
    times = Times(passes=5, batches=100, first_seconds=first, waited_seconds=waited, between_seconds=between).json()
    row = Row("Pictures", 32, 2, False, "train.py:9").json() | times | changed
    data = {"target": "train.py", "cache": False, "loaders": [row], "total": times}
    shown = " ".join(summary(data).split())
    assert [words for words in (NAMED, CACHE, NOTHING) if words in shown] == said
    assert f"waited for data {(first + waited) / (first + waited + between):.1%} of the time" in shown
