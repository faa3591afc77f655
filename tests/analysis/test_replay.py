"""A replay decides as the live cache does, and as textbooks say."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stallfree import InputError
from stallfree.analysis.replay import replay
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.epoch_source import make_plan
from stallfree.pipeline.codec import encode, record_size

SIZE = 64
POLICIES = ["minio", "fifo", "lru", "lfu", "random", "importance", "oracle"]


def live(epochs: list[np.ndarray], policy: str, capacity: int, batch_size: int, sizes: np.ndarray | None) -> Any:
    """Hits, misses, evictions, rejected of each epoch in a live cache, and who is resident at the end."""
    uses = looked_up([id for ids in epochs for id in ids.tolist()])
    num_ids = max(int(ids.max()) for ids in epochs) + 1 if sizes is None else len(sizes)
    found, example = [], np.zeros(SIZE, np.uint8) if sizes is None else typical_example(sizes)
    with SampleCache(num_ids, capacity=capacity, fingerprint="live", policy=policy, example=example) as cache:
        blocks = cache.meta.num_blocks
        for number, ids in enumerate(epochs):
            before = cache.stats()
            if policy == "importance":
                cache.set_scores(range(num_ids), importance(len(epochs), num_ids)[number])
            for start in range(0, len(ids), batch_size):
                batch = ids[start : start + batch_size]
                if policy == "oracle":
                    cache.set_scores(batch, [-uses.pop(0) for _ in batch])
                values = cache.get_many(batch)
                missed = list(dict.fromkeys(id for id, v in zip(batch.tolist(), values, strict=True) if v is MISS))
                if missed:
                    data = [np.zeros(SIZE, np.uint8) if sizes is None else bytes(int(sizes[id])) for id in missed]
                    cache.put_many(missed, data)
            after = cache.stats()
            names = ("hits", "misses", "evictions", "rejected")
            found.append(tuple(getattr(after, name) - getattr(before, name) for name in names))
        return found, np.flatnonzero(cache.resident(np.arange(num_ids))).tolist(), blocks


def looked_up(trace: list[int]) -> list[float]:
    """When each access is followed by the next one to the same id, looked up from the end."""
    following: dict[int, float] = {}
    found = []
    for at in range(len(trace) - 1, -1, -1):
        found.append(following.get(trace[at], float("inf")))
        following[trace[at]] = at
    return found[::-1]


def importance(epochs: int, num_ids: int) -> np.ndarray:
    """Importances, others in each epoch, some of them alike."""
    return np.random.default_rng(num_ids).integers(0, 20, (epochs, num_ids)) / 4


def record_sizes(lengths: Any) -> list[int]:
    """Sizes of the records of so many bytes each."""
    return [record_size(*encode(bytes(length))) for length in lengths]


def typical_example(lengths: np.ndarray) -> bytes:
    """Bytes whose record is as long as the mean record, rounded down: `replay` plans its blocks for the mean."""
    mean = np.mean(record_sizes(lengths.tolist()))
    return bytes(max(length for length, size in enumerate(record_sizes(range(int(mean)))) if size <= mean))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6)
@given(
    room=st.integers(1, 40), size=st.integers(1, 9),
    trace=st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=120), min_size=1, max_size=4),
    seed=st.none() | st.integers(0, 10**6),
)  # fmt: skip
@example(room=24, size=1, trace=[[*range(60)] * 2, [*range(59, -1, -1)]], seed=3914)
def test_it_decides_as_live_caches(policy: str, room: int, size: int, trace: list[list[int]], seed: int | None) -> None:
    """For records of one size, and with a seed for records of random sizes."""
    epochs = [np.array(ids) for ids in trace]
    if seed is None:
        check_live(policy, epochs, 200_000 + room * 64, size)
    else:
        lengths = np.random.default_rng(seed).integers(200, 9000, 60)
        total = check_live(policy, epochs, 120_000 + room * 5000, size, lengths)
        assert total.storage_bytes >= total.misses * 200


@pytest.mark.parametrize("policy", ["lru", "importance"])
def test_it_decides_as_the_live_cache_when_only_some_are_queued(policy: str) -> None:
    """Large enough that the next victims are looked for again and again, and fewer at a time than in the replay."""
    rng = np.random.default_rng(2)
    assert check_live(policy, [rng.permutation(8000), rng.zipf(1.2, 6000) % 8000], 500_000, 64).evictions > 1000


def check_live(policy: str, epochs: list[np.ndarray], room: int, size: int, lengths: np.ndarray | None = None) -> Any:
    expected, resident, blocks = live(epochs, policy, room, size, lengths)
    options: dict[str, Any] = {"capacity": blocks}
    if lengths is not None:
        options = {"capacity": room, "sizes": record_sizes(lengths.tolist())}
    if policy == "importance":
        num_ids = max(int(ids.max()) for ids in epochs) + 1 if lengths is None else len(lengths)
        options["scores"] = importance(len(epochs), num_ids)
    outcome = replay(epochs, policy=policy, batch_size=size, **options)
    assert [(e.hits, e.misses, e.evictions, e.rejected) for e in outcome.epochs] == expected
    assert outcome.resident.tolist() == resident
    return outcome.total


def most_hits(trace: list[int], room: int) -> int:
    """What no policy can exceed: all contents that a cache could have, kept step by step with their hits."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for id in trace:
        after: dict[frozenset[int], int] = {}
        for there, hits in best.items():
            choices = [there]
            if id not in there:
                choices += [there | {id}] if len(there) < room else [there - {one} | {id} for one in there]
            for choice in choices:
                after[choice] = max(after.get(choice, 0), hits + (id in there))
        best = after
    return max(best.values())


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 3), st.integers(1, 4))
def test_the_oracle_hits_as_often_as_is_possible(trace: list[int], room: int, cuts: int) -> None:
    epochs = [part for part in np.array_split(np.array(trace), cuts) if len(part)]
    found = replay(epochs, policy="oracle", capacity=room, batch_size=1)
    assert found.total.hits == most_hits(trace, min(room, max(trace) + 1))


def test_shuffled_epochs_hit_as_theory_says() -> None:
    """Of a share c of the samples, lru hits c + (1 - c) ln(1 - c) of each epoch after the first, and minio c.

    More is not possible: what is hit in an epoch was there when it began.
    """
    epochs = [make_plan(1500, shuffle=True, seed=3, epoch=epoch) for epoch in range(4)]
    steady = {}
    for policy in ("minio", "lru", "random", "oracle"):
        found = replay(epochs, policy=policy, capacity="65%", batch_size=8)
        steady[policy] = np.mean([epoch.hit_ratio for epoch in found.epochs[2:]])
    assert steady["minio"] == pytest.approx(0.65)
    assert steady["lru"] == pytest.approx(0.65 + 0.35 * np.log(0.35), abs=0.03)
    assert steady["lru"] < steady["random"] < steady["minio"]
    assert steady["oracle"] == pytest.approx(steady["minio"])


def test_plans_and_shares() -> None:
    plans, heard = [make_plan(1000, shuffle=True, seed=0, epoch=epoch) for epoch in range(3)], list[Any]()
    outcome = replay(plans, policy="minio", capacity="35%", on_epoch=heard.append)
    assert [epoch.hits for epoch in outcome.epochs] == [0, 350, 350]
    assert heard == list(outcome.epochs)
    assert (outcome.capacity_items, outcome.total.accesses) == (350, 3000)
    assert outcome.total.hit_ratio == pytest.approx(700 / 3000)
    sized = replay(plans, policy="minio", capacity="100%", sizes=np.full(1000, 50_000))
    assert sized.epochs[0].storage_bytes == 50_000_000
    assert 0.9 < sized.epochs[2].hit_ratio <= 1  # blocks and index take their part
    assert replay([[0, 1, 2], [2, 1, 0]], policy="lru", capacity=10**15).epochs[1].hits == 3


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (5, {}, "trace_or_plans=5"), ([[0, -1]], {}, "0 or more"), ([[0.5]], {}, "integers"),
    ([10**15], {}, "the id 1000000000000000 takes .* of memory"),
    ([0, 5], {"capacity": "1MiB", "sizes": [1, 2, 3]}, "sizes has 3 numbers: give one for each of the ids 0 to 5"),
    ([0, 1], {"policy": "importance"}, "policy='importance': give a number for each of the ids"),
    ([0, 1], {"policy": "importance", "scores": [1]}, "each of the ids 0 to 1, or a row"),
    ([0, 1], {"policy": "importance", "scores": [1, float("nan")]}, "none of them NaN"),
    ([0, 1], {"policy": "oracle", "scores": [1, 2]}, "'importance' only, not for 'oracle'"),
]  # fmt: skip


@pytest.mark.parametrize(("trace", "arguments", "message"), BAD)
def test_bad_input(trace: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(trace, **{"policy": "lru", "capacity": 1, **arguments})
