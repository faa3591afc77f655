"""In which order a plan is served: whatever the cache does meanwhile, who is served, and who was, is on the ledger."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from importance_tools import Array, Drifting, Residents
from stallfree.importance.epoch import Serving

COUNT = 60

quick = settings(max_examples=40, suppress_health_check=list(HealthCheck))


class Asked(Drifting):
    """Remembers what it said last of each id, and what it was asked first since `first` was None."""

    def __init__(self, num_ids: int, seed: int, **arguments: Any) -> None:
        super().__init__(num_ids, seed, **arguments)
        self.said = np.zeros(num_ids, bool)
        self.first: tuple[list[int], list[bool]] | None = None

    def resident(self, ids: Any) -> Array:
        there = super().resident(ids)
        self.said[ids] = there
        if self.first is None:
            self.first = np.asarray(ids).tolist(), there.tolist()
        return there


class Board:
    def __init__(self) -> None:
        self.is_served: list[int] = []
        self.is_missed: list[int] = []

    def served(self, ids: Array) -> None:
        self.is_served += ids.tolist()

    def missed(self, ids: Array) -> None:
        self.is_missed += ids.tolist()


@st.composite
def epochs(draw: st.DrawFn) -> tuple[list[Array], Array, Asked, np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    planned = rng.permutation(COUNT)[: draw(st.integers(0, COUNT))]
    cuts = sorted(draw(st.lists(st.integers(0, len(planned)), max_size=12)))
    batches = [batch for batch in np.split(planned, cuts) if len(batch)]
    low = rng.random(COUNT) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    share, change = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0])), draw(st.sampled_from([0.0, 0.05, 1.0]))
    return batches, low, Asked(COUNT, draw(st.integers(0, 2**32)), share=share, change=change), rng


def serve(epoch: Any, on_miss: str, *more: Any) -> tuple[Serving, list[int], list[int], int]:
    """Serve an epoch; also the ids that were planned, those that were served, and how many of these stood for others.

    Each of a batch was its turn, or stands for a missing L-sample and was resident.
    """
    batches, low, cache, rng = epoch
    serving, ledger, others = Serving(batches, low, cache, on_miss, rng, *more), list[int](), 0
    for planned, served in zip(batches, serving, strict=True):
        ids, turn = served.tolist(), dict(zip(*cache.first, strict=True))
        assert len(turn) == len(ids) == len(set(ids)) == len(planned)
        instead = [id for id in ids if id not in turn]
        assert all(cache.said[id] and low[id] for id in instead)
        assert all(low[id] and not turn[id] for id in turn if id not in ids)
        ledger, others, cache.first = ledger + ids, others + len(instead), None
    return serving, [id for batch in batches for id in batch.tolist()], ledger, others


@quick
@given(epochs())
def test_swap_serves_each_planned_sample_exactly_once(epoch: Any) -> None:
    low, board = epoch[1], Board()
    serving, in_plan, ledger, swaps = serve(epoch, "swap", board)
    assert sorted(ledger) == sorted(in_plan)
    assert [id for id in ledger if not low[id]] == [id for id in in_plan if not low[id]]  # H-samples in their order
    assert serving.swaps == swaps == len(board.is_missed)
    assert serving.substitutions == 0
    assert board.is_served == ledger
    assert serving.high_requests == sum(not low[id] for id in in_plan)
    assert serving.low_requests == sum(low[id] for id in in_plan)  # who was deferred twice, who came early not at all
    assert serving.low_hits <= serving.low_requests
    assert serving.high_hits <= serving.high_requests


@quick
@given(epochs(), st.integers(0, 30))
def test_substitute_serves_any_unused_resident(epoch: Any, others: int) -> None:
    low, unplanned = epoch[1], {*range(COUNT)}.difference(*map(np.ndarray.tolist, epoch[0]))
    elsewhere = sorted(unplanned)[:others]
    serving, in_plan, ledger, substituted = serve(epoch, "substitute", None, np.array(elsewhere, np.int64))
    assert len(set(ledger)) == len(ledger) == len(in_plan)
    assert (serving.substitutions, serving.swaps) == (substituted, 0)
    assert {id for id in in_plan if not low[id]} <= set(ledger)
    assert not set(ledger) & set(elsewhere)
    assert len(set(ledger) - set(in_plan)) <= substituted


def test_by_hand() -> None:
    """0 to 3 are H-samples, of the L-samples 8 and 9 are resident, and so is 11, which is not in the plan."""
    batches = [np.array(ids) for ids in ([0, 4, 5], [1, 6, 7], [2, 8, 9], [3, 10])]
    low, cache = np.arange(12) >= 4, Residents(12, [1, 8, 9, 11])
    serving = Serving(batches, low, cache, "swap", np.random.default_rng(0))
    first, *others = [ids.tolist() for ids in serving]
    assert (first[0], {*first[1:]}, others) == (0, {8, 9}, [[1, 6, 7], [2, 3, 10], [4, 5]])
    assert (serving.swaps, serving.high_requests, serving.high_hits) == (2, 4, 1)
    assert serving.low_requests == 7  # 4 and 5 twice, 8 and 9 not at all, 6, 7 and 10
    serving = Serving(batches, low, cache, "substitute", np.random.default_rng(0))
    served = [ids.tolist() for ids in serving]
    assert served[0][1] == 11  # first whom the plan has no use for
    assert {8, 9} <= {*served[0], *served[1]}
    assert serving.substitutions == 3
    assert len({id for ids in served for id in ids} & {4, 5, 6, 7, 10}) == 4  # one is left out for 11


def test_residents_that_are_gone_whenever_they_are_asked_for_again() -> None:
    class Mocking(Residents):
        asked = 0

        def resident(self, ids: Any) -> Array:
            self.asked += 1
            assert self.asked < 1000, "does not come to an end"
            return np.full(len(ids), self.asked % 2 == 0)

    batches = [np.arange(10), np.arange(10, 20)]
    for on_miss in ("swap", "substitute"):
        serving = Serving(batches, np.ones(20, bool), Mocking(20), on_miss, np.random.default_rng(0))
        assert sorted(np.concatenate(list(serving)).tolist()) == list(range(20))


def test_a_sample_that_was_left_out_may_stand_for_another_once_it_is_resident() -> None:
    cache = Residents(4, [2])
    serving = Serving([np.array([0]), np.array([1])], np.ones(4, bool), cache, "substitute", np.random.default_rng(0))
    served = iter(serving)
    assert next(served).tolist() == [2]
    cache.there[:] = np.arange(4) == 0
    assert next(served).tolist() == [0]
