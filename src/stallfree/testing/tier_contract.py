"""`TierContract`: the test suite that every tier passes."""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stallfree.cache.records import MISS
from stallfree.cache.tier import Tier, TierStore
from stallfree.pipeline.codec import encode, record_size, write_record

COUNT = 32
_SECONDS = 60.0

KINDS: list[Any] = [
    *(None, False, True, 0, -(1 << 60), 3.5, "", "text", b"", b"bytes", (), [], {}),
    *((1, "a", None), [[1], []], {"a": [1, 2.0], "b": (None,)}, np.float32(2), np.bool_(True)),
    *(np.zeros((0, 3)), np.arange(12.0).reshape(3, 4), np.array(5), np.arange(20_000, dtype=np.int16)),
    *(torch.zeros(0), torch.tensor(7), torch.arange(10).view(2, 5), {"x": torch.ones(2, 3), "y": [np.arange(3), "z"]}),
]
"""Samples of all kinds that are stored without pickle."""

Array = np.ndarray[Any, np.dtype[Any]]


def sample(id: int) -> Any:
    """A sample that no other id has."""
    return np.full(200 + 7 * (id % 5), id, np.int32), id


def ids_of(*ids: int) -> Array:
    """Ids as a tier gets them."""
    return np.array(ids, np.int64)


def record_of(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The encoded `value`."""
    structure, arrays = encode(value)
    record = np.zeros(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, record)
    return record


def put(tier: Tier, ids: Sequence[int], make: Callable[[int], Any] = sample) -> Array:
    """Store samples, from memory that changes afterwards; returns which are stored."""
    records = [record_of(make(id)) for id in ids]
    stored = np.asarray(tier.put_many(ids_of(*ids), records))
    for record in records:
        record[:] = 255
    return stored


class TierContract:
    """The test suite that every `stallfree.cache.Tier` passes, for pytest.

    A subclass defines the fixture `store`, which returns an empty `stallfree.cache.TierStore` with room for 1 MiB of
    samples, and removes what it held.

    Example:
        ```python
        class TestMyTier(sf.testing.TierContract):
            @pytest.fixture
            def store(self, tmp_path):
                return CompressedFiles(tmp_path)
        ```
    """

    @pytest.fixture
    def tier(self, store: TierStore) -> Any:
        """The tier of one data set."""
        tier = self.attach(store)
        yield tier
        tier.close()

    def attach(self, store: TierStore, fingerprint: str = "a" * 40) -> Tier:
        """The tier of a data set of `COUNT` samples."""
        return store.attach(COUNT, fingerprint=fingerprint, name="contract", example=sample(0))

    def check(self, tier: Tier, present: Sequence[int]) -> None:
        """`tier` holds exactly the samples of `present`, with the right values."""
        for id, value in enumerate(tier.get_many(np.arange(COUNT))):
            if id in present:
                assert value is not MISS, f"sample {id} is stored and not returned"
                assert (value[0] == sample(id)[0]).all()
                assert (value[0].shape, value[1]) == (sample(id)[0].shape, id)
            else:
                assert value is MISS, f"sample {id} is not stored and a value is returned"

    def test_a_new_tier_is_empty(self, tier: Tier) -> None:
        self.check(tier, [])
        assert list(tier.get_many(ids_of())) == []
        assert len(tier.put_many(ids_of(), [])) == 0

    def test_what_is_put_is_returned(self, tier: Tier) -> None:
        assert put(tier, [5, 3, 31]).tolist() == [True] * 3
        self.check(tier, [3, 5, 31])
        assert [value[1] for value in tier.get_many(ids_of(31, 3))] == [31, 3], "in the order of the ids"

    def test_the_caller_owns_what_is_returned(self, tier: Tier) -> None:
        put(tier, [1, 2])
        for array, _ in tier.get_many(ids_of(1, 2)):
            array[:] = -1
        self.check(tier, [1, 2])

    @pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)
    def test_every_kind_of_sample(self, tier: Tier, value: Any) -> None:
        put(tier, [7], lambda id: (0, value))
        (answer,) = tier.get_many(ids_of(7))
        assert record_of(answer).tobytes() == record_of((0, value)).tobytes()

    def test_dropped_samples_are_gone_and_may_be_stored_again(self, tier: Tier) -> None:
        put(tier, range(COUNT))
        tier.drop(ids_of(*range(0, COUNT, 2)))
        tier.drop(ids_of())
        self.check(tier, range(1, COUNT, 2))
        tier.drop(ids_of(0, 1))
        assert put(tier, [0], lambda id: ("new", id)).all()
        assert tier.get_many(ids_of(0))[0] == ("new", 0)

    def test_other_data_has_other_samples(self, store: TierStore, tier: Tier) -> None:
        """Data sets of equal name and other fingerprint never get each other's samples."""
        put(tier, [1])
        try:
            other = self.attach(store, "b" * 40)
        except Exception:
            return  # a clear refusal is as good
        try:
            assert other.get_many(ids_of(1))[0] is MISS
        finally:
            other.close()

    def test_equal_data_shares_samples(self, store: TierStore, tier: Tier) -> None:
        put(tier, [1, 9])
        second = self.attach(store)
        self.check(second, [1, 9])
        put(second, [2])
        second.close()
        second.close()
        self.check(tier, [1, 2, 9])

    def test_threads(self, tier: Tier) -> None:
        errors: list[BaseException] = []

        def work(start: int) -> None:
            try:
                for _ in range(5):
                    put(tier, range(start, COUNT, 4))
                    for id, value in enumerate(tier.get_many(np.arange(COUNT))):
                        assert value is MISS or value[1] == id
                    tier.drop(ids_of(start))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
        assert errors == []

    @pytest.mark.parametrize("method", ["fork", "forkserver"])
    def test_another_process(self, tier: Tier, method: str) -> None:
        """Forked children inherit a tier; it is sent to other processes."""
        put(tier, [1])
        context: Any = multiprocessing.get_context(method)
        child = context.Process(target=self._in_child, args=(tier,))
        child.start()
        child.join(_SECONDS)
        assert child.exitcode == 0
        self.check(tier, [1, 4])

    @classmethod
    def _in_child(cls, tier: Tier) -> None:
        cls().check(tier, [1])
        put(tier, [4])
