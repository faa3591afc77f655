"""Records that are lent where they lie, and those that are handed on encoded."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch

from cache_tools import make
from stallfree.cache.records import MISS
from stallfree.errors import CodecError

PICTURE = (torch.zeros(3, 50, dtype=torch.uint8), 0)
LONG = "of another form" * 200


class Point(NamedTuple):
    """A named tuple, beside whose text its record has no fixed size."""

    id: int
    text: str


def picture(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((3, 50), id, dtype=torch.uint8), id


def test_a_pickle_is_not_loaded_where_it_may_not_be() -> None:
    with make(20, 400, name="none") as cache, make(20, 400, name="none", allow_pickle=False) as other:
        cache.put_many([1], [{1, 2, 3}])
        assert other.get_many([1])[0] is MISS


@pytest.mark.parametrize("long", [False, True])
def test_a_record_that_is_changed_while_it_is_lent(long: bool) -> None:
    with make(20, 60, example=PICTURE, name="changing") as cache:
        cache.put_many([1, 2], [LONG if long else picture(1), picture(2)])
        lent = cache.borrow([1, 2, 1, 9])
        assert lent is not None
        assert lent.values[3] is MISS
        assert [lent.unchanged(at) for at in range(3)] == [True, True, True]
        cache.drop([1])
        cache.put_many([3, 4], [picture(3), LONG])  # in its place
        assert [lent.unchanged(at) for at in range(3)] == [False, True, False]
        assert lent.values[1][1] == 2
        cache.put_many([1], [picture(1)])
        assert [lent.unchanged(at) for at in range(3)] == [False, True, False]  # it is another one


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("method", ["get_many", "borrow"])
def test_a_record_that_goes_between_two_looks_is_none(long: bool, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is given to others after it was read in the index, and before its chain is."""
    with make(20, 60, example=PICTURE, name="going") as cache:
        cache.put_many([1, 2], [LONG if long else picture(1), picture(2)])
        real = type(cache._records).locate

        def locate(records: Any, ids: Any) -> Any:
            found = real(records, ids)
            cache.drop([1])
            cache.put_many([3, 4, 5], [picture(3), LONG, picture(5)])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(type(cache._records), "locate", locate)
            found: Any = getattr(cache, method)([1, 2])
        if method == "borrow":
            assert (found.unchanged(0), found.unchanged(1)) == (False, True)
        else:
            assert found[0] is MISS
            assert found[1][1] == 2


def test_a_length_that_cannot_be_is_none() -> None:
    with make(20, 60, example=PICTURE, name="length") as cache:
        cache.put_many([1, 2], [LONG, picture(2)])
        cache._index.length[1] = (1 << 32) - 1  # a writer may be changing it just now
        assert cache.get_many([1])[0] is MISS
        assert cache.get_many([2])[0][1] == 2


def test_what_is_lent_is_not_copied_and_outlives_the_cache() -> None:
    cache = make(20, 60, example=PICTURE, name="in-place")
    cache.put_many([1], [picture(1)])
    one, two = cache.borrow([1]), cache.borrow([1])
    assert one is not None
    assert two is not None
    assert one.values[0][0].data_ptr() == two.values[0][0].data_ptr()
    cache.close()
    assert torch.equal(one.values[0][0], picture(1)[0])
    assert one.unchanged(0)


def test_a_named_tuple_whose_class_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error where the cache is trusted, and a miss where its records came over a network. It is kept."""
    with make(20, 400, name="trusted") as cache, make(20, 400, name="none", allow_pickle=False) as other:
        for each in (cache, other):
            each.put_many([1], [Point(1, "text")])
        with monkeypatch.context() as patch:
            patch.delattr(sys.modules[__name__], "Point")
            assert other.get_many([1])[0] is MISS
            with pytest.raises(CodecError, match=r"named tuple \S*test_records\.Point.*: import \S*test_records where"):
                cache.get_many([1])[0]
        assert cache.get_many([1])[0] == other.get_many([1])[0] == Point(1, "text")
        assert cache.stats().damaged == other.stats().damaged == 0
