"""The time of loops that overlap, against a model that looks at the whole history at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stallfree.observe.loops import Pass, Row, Thread


class Loader:
    dataset, batch_size, num_workers = "some", 1, 0


class Iterator:
    pass


# (which of three iterators is asked, seconds of work before, seconds of the wait, whether it ends then)
steps = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5), st.booleans())


@given(st.lists(steps, max_size=30))
def test_time_between_waits_counts_once_if_any_loop_is_under_way(history: list[tuple[int, int, int, bool]]) -> None:
    loader, iterators = Loader(), [Iterator() for _ in range(3)]
    row = Row(loader, ("some", 1, 0, "here"))
    passes = [Pass(iterator, row, None, lambda _: None) for iterator in iterators]
    thread = Thread()
    now, waits = 0.0, []
    for which, work, wait, ends in history:
        begun = now + work
        now = begun + wait
        one = passes[which]
        thread.enter(begun, one)
        thread.leave(now, wait, one.fresh)
        one.last, one.mark, one.thread, one.fresh = now, thread.waits, thread, False
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
