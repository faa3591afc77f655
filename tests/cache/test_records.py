"""Records as they lie in a cache, for those who pass them on; and caches that are visited, not held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cache_tools import make

from stallfree.cache import MISS, SampleCache, visit
from stallfree.errors import CodecError, InputError, StorageError
from stallfree.pipeline.codec import read_record, split_record

PICTURE = (torch.zeros(3, 50, dtype=torch.uint8), 0)


def picture(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((3, 50), id, dtype=torch.uint8), id


def whole(parts: tuple[np.ndarray, ...]) -> Any:
    return read_record(np.concatenate(parts), copy=True)


def test_records_describe_themselves_in_whatever_form_they_lie() -> None:
    with make(20, 60, example=PICTURE, name="one") as cache:
        cache.put_many([1, 2], [picture(1), picture(2)])
        cache.put(3, {"text": "of another form" * 100})
        cache.put(4, None)
        found = cache.copy_records([2, 9, 3, 4, 2])
        assert found[1] == ()
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
        records = [split_record(np.concatenate(parts)) for parts in source.copy_records(list(values))]
        for cache in (target, uneven):
            assert cache.put_records(list(values), records).all()
            assert cache.put_records(list(values), records).all()
            for id, value in values.items():
                assert repr(cache.get(id)) == repr(value)
        assert target.stats().resident_bytes == source.stats().resident_bytes


def test_a_record_that_is_changed_while_it_is_copied_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(20, 60, example=PICTURE, name="changing") as cache:
        cache.put_many([1, 2], [picture(1), picture(2)])
        read = type(cache._arena).read

        def drop_first(self: Any, blocks: Any, out: Any) -> None:
            cache.drop([1])
            cache.put(3, picture(3))
            read(self, blocks, out)

        monkeypatch.setattr(type(cache._arena), "read", drop_first)
        one, two = cache.copy_records([1, 2])
        assert one == ()
        assert whole(two)[1] == 2


def test_a_record_that_needs_pickle_can_be_passed_on_unread() -> None:
    with make(20, 400, name="pickles") as cache, make(20, 400, name="none", allow_pickle=False) as other:
        cache.put(1, {1, 2, 3})
        (parts,) = cache.copy_records([1])
        structure, arrays = split_record(np.concatenate(parts))
        assert structure.pickled
        other.put_records([1], [(structure, arrays)])
        assert other.get(1) is MISS  # it is not loaded there
        with pytest.raises(CodecError):
            whole(parts)


def test_put_records_wants_one_for_each_id() -> None:
    with make(20, 60, name="few") as cache, pytest.raises(InputError, match="2 ids and 1 records"):
        cache.put_records([1, 2], [None])  # type: ignore[list-item]


def test_a_visitor_does_not_keep_a_cache() -> None:
    cache = make(20, 60, example=PICTURE, name="visited")
    cache.put(1, picture(1))
    visitor = visit(cache.path.parent, "visited", cache.policy, False)
    assert not visitor.gone
    visitor.put(2, picture(2))
    assert cache.get(2)[1] == 2
    folder = cache.path
    cache.close()
    assert not folder.exists()
    assert visitor.gone
    assert visitor.get(1)[1] == 1  # its memory stays as long as somebody looks at it
    again = make(20, 60, example=PICTURE, name="visited")
    assert visitor.gone
    visitor.close()
    assert again.get(1) is MISS
    again.close()
    with pytest.raises(StorageError, match="gone"):
        visit(folder.parent, "visited", again.policy, False)


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
        cache.copy_records([1])
