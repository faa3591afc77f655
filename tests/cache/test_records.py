"""Records as they lie in a cache, for those who pass them on; and caches that are visited, not held."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cache_tools import make

from stallfree.cache import MISS, SampleCache
from stallfree.errors import CodecError, InputError
from stallfree.pipeline.codec import read_record, split_record

PICTURE = (torch.zeros(3, 50, dtype=torch.uint8), 0)


class Point(NamedTuple):
    """A named tuple, beside whose text its record has no fixed size."""

    id: int
    text: str


def picture(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((3, 50), id, dtype=torch.uint8), id


def copied(cache: SampleCache, ids: list[int]) -> list[np.ndarray]:
    """What `view_records` shows, copied, as somebody does who sends it; empty for what is not there, or no more."""
    views = cache.view_records(ids)
    records = [np.concatenate(parts) if parts else np.empty(0, np.uint8) for parts in views.parts]
    return [record if good else record[:0] for record, good in zip(records, views.unchanged(), strict=True)]


def whole(record: np.ndarray) -> Any:
    return read_record(record, copy=True)


def test_records_describe_themselves_in_whatever_form_they_lie() -> None:
    with make(20, 60, example=PICTURE, name="one") as cache:
        cache.put_many([1, 2], [picture(1), picture(2)])
        cache.put(3, {"text": "of another form" * 100})
        cache.put(4, None)
        found = copied(cache, [2, 9, 3, 4, 2])
        assert len(found[1]) == 0
        first, third, fourth, again = (whole(found[at]) for at in (0, 2, 3, 4))
        assert torch.equal(first[0], picture(2)[0])
        assert first[1] == 2
        assert torch.equal(again[0], first[0])
        assert third == {"text": "of another form" * 100}
        assert fourth is None
        assert cache.stats().hits == cache.stats().misses == 0


def test_records_move_from_one_cache_to_another() -> None:
    with (
        make(20, 60, example=PICTURE, name="from") as source,
        make(20, 60, example=PICTURE, name="to") as target,
        make(20, 400, name="uneven") as uneven,
    ):
        values = {1: picture(1), 5: picture(5), 6: "text", 7: [1, None, {"a": np.arange(5)}]}
        source.put_many(list(values), list(values.values()))
        records = [split_record(record) for record in copied(source, list(values))]
        for cache in (target, uneven):
            assert cache.put_records(list(values), records).all()
            assert cache.put_records(list(values), records).all()
            for id, value in values.items():
                assert repr(cache.get(id)) == repr(value)
        assert target.stats().resident_bytes == source.stats().resident_bytes


LONG = "of another form" * 200


@pytest.mark.parametrize("long", [False, True])
def test_a_record_that_is_changed_while_it_is_looked_at_is_none(long: bool) -> None:
    with make(20, 60, example=PICTURE, name="changing") as cache:
        cache.put_many([1, 2], [LONG if long else picture(1), picture(2)])
        views = cache.view_records([1, 2, 1, 9])
        assert views.unchanged().tolist() == [True, True, True, False]
        cache.drop([1])
        cache.put_many([3, 4], [picture(3), LONG])  # in its place
        assert views.unchanged().tolist() == [False, True, False, False]
        assert whole(np.concatenate(views.parts[1]))[1] == 2
        cache.put(1, picture(1))
        assert views.unchanged().tolist() == [False, True, False, False]  # it is another one
        assert whole(copied(cache, [1])[0])[1] == 1


@pytest.mark.parametrize("long", [False, True])
def test_a_record_that_goes_between_two_looks_is_none(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is given to others after it was read in the index, and before its chain is."""
    with make(20, 60, example=PICTURE, name="going") as cache:
        cache.put_many([1, 2], [LONG if long else picture(1), picture(2)])

        real = type(cache._records).look

        def look(records: Any, ids: Any) -> Any:
            found = real(records, ids)
            cache.drop([1])
            cache.put_many([3, 4, 5], [picture(3), LONG, picture(5)])
            return found

        monkeypatch.setattr(type(cache._records), "look", look)
        one, two = copied(cache, [1, 2])
        assert len(one) == 0
        assert whole(two)[1] == 2


def test_a_length_that_cannot_be_is_none() -> None:
    with make(20, 60, example=PICTURE, name="length") as cache:
        cache.put_many([1, 2], [LONG, picture(2)])
        cache._index.length[1] = (1 << 32) - 1  # a writer may be changing it just now
        one, two = copied(cache, [1, 2])
        assert len(one) == 0
        assert whole(two)[1] == 2


def test_what_lies_in_place_is_seen_without_a_copy_and_outlives_the_cache() -> None:
    cache = make(20, 60, example=PICTURE, name="in-place")
    cache.put_many([1, 2], [picture(1), LONG])
    views = cache.view_records([1, 2])
    assert views.parts[0][1].base is not None
    again = cache.view_records([1, 2])
    assert all(
        np.shares_memory(one, other)
        for parts, others in zip(views.parts, again.parts, strict=True)
        for one, other in zip(parts, others, strict=True)
        if one.size
    )
    assert sum(map(len, views.parts)) <= 4  # blocks side by side are one piece
    cache.close()
    assert whole(np.concatenate(views.parts[0]))[1] == 1
    assert whole(np.concatenate(views.parts[1])) == LONG
    assert views.unchanged().all()


def test_looking_at_records_in_place_counts_as_a_use_and_as_no_hit() -> None:
    with make(200, 20, example=PICTURE, name="used", policy="lru") as cache:
        cache.put_many(range(5), [picture(id) for id in range(5)])
        for id in range(5, 120):
            cache.view_records([0, 1])
            cache.put(id, picture(id))
        assert cache.resident(range(5)).tolist() == [True, True, False, False, False]
        assert (cache.stats().hits, cache.stats().misses) == (0, 0)
        assert cache.stats().evictions > 0


def test_a_record_that_needs_pickle_can_be_passed_on_unread() -> None:
    with make(20, 400, name="pickles") as cache, make(20, 400, name="none", allow_pickle=False) as other:
        cache.put(1, {1, 2, 3})
        (record,) = copied(cache, [1])
        structure, arrays = split_record(record)
        assert structure.pickled
        other.put_records([1], [(structure, arrays)])
        assert other.get(1) is MISS  # it is not loaded there
        with pytest.raises(CodecError):
            whole(record)


def test_a_named_tuple_whose_class_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error where the cache is trusted, and a miss where its records came over a network. It is kept."""
    with make(20, 400, name="trusted") as cache, make(20, 400, name="none", allow_pickle=False) as other:
        for each in (cache, other):
            each.put(1, Point(1, "text"))
        with monkeypatch.context() as patch:
            patch.delattr(sys.modules[__name__], "Point")
            assert other.get(1) is MISS
            with pytest.raises(CodecError, match=r"named tuple \S*test_records\.Point.*: import \S*test_records where"):
                cache.get(1)
        assert cache.get(1) == other.get(1) == Point(1, "text")
        assert cache.stats().damaged == other.stats().damaged == 0


def test_put_records_wants_one_for_each_id() -> None:
    with make(20, 60, name="few") as cache, pytest.raises(InputError, match="2 ids and 1 records"):
        cache.put_records([1, 2], [None])  # type: ignore[list-item]


def test_hits_of_others_count_and_are_told_apart() -> None:
    with make(20, 60, example=PICTURE, name="counted") as cache:
        cache.put(1, picture(1))
        cache.get_many([1, 2])
        cache.count_others(5, 3)
        stats = cache.stats()
        assert (stats.hits, stats.misses, cache.other_hits) == (6, 4, 5)


def test_a_closed_cache_says_so() -> None:
    cache: SampleCache = make(20, 60, name="closed")
    cache.close()
    with pytest.raises(InputError, match="closed"):
        copied(cache, [1])
