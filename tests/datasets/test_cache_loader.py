"""`CacheLoader`: any value by a key."""

import enum
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from stallfree.cache.sample_cache import SampleCache


@pytest.fixture
def cache() -> Iterator[sf.CacheLoader]:
    with sf.CacheLoader(capacity="1MiB", name="values") as cache:
        yield cache


class Load:
    def __init__(self) -> None:
        self.keys: list[Any] = []

    def __call__(self, key: Any) -> Any:
        self.keys.append(key)
        return f"value of {key!r}"


def unwanted(key: Any) -> Any:
    raise AssertionError(f"{key!r} was loaded")


def test_a_value_is_loaded_once(cache: sf.CacheLoader) -> None:
    load = Load()
    assert [cache.get("a", load) for _ in range(3)] == ["value of 'a'"] * 3
    assert load.keys == ["a"]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.storage_reads, stats.resident_items) == (2, 1, 1, 1)
    assert "a" in cache
    assert "b" not in cache


def test_values_that_are_loaded_at_once_are_stored_once(cache: sf.CacheLoader) -> None:
    values = [cache.get("key", lambda _: cache.get("key", lambda _: "first") and "second") for _ in range(2)]
    assert (*values, cache.stats().resident_items) == ("second", "first", 1)


def test_who_changes_a_value_changes_nobody_elses(cache: sf.CacheLoader) -> None:
    for _ in range(3):
        found = cache.get("key", lambda key: {"tensor": torch.arange(4), "array": np.arange(4)})
        assert found["tensor"].tolist() == found["array"].tolist() == [0, 1, 2, 3]
        found["tensor"].zero_()
        found["array"][...] = 0


class Colour(str, enum.Enum):  # noqa: UP042
    RED = "red"


def test_keys_that_are_equal_are_one(cache: sf.CacheLoader) -> None:
    cache.get(7, Load())
    cache.get("red", Load())
    for key in (np.int64(7), np.uint8(7), torch.tensor(7), Colour.RED, np.str_("red")):
        assert cache.get(key, unwanted) in ("value of 7", "value of 'red'")


def test_what_load_raises_is_passed_on_and_nothing_is_kept(cache: sf.CacheLoader) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="'a' was loaded"):
            cache.get("a", unwanted)
    assert cache.get("a", Load()) == "value of 'a'"
    assert cache.stats().storage_reads == 1


def test_a_value_larger_than_the_cache_is_loaded_each_time(cache: sf.CacheLoader) -> None:
    assert [len(cache.get("big", lambda key: bytes(2 << 20))) for _ in range(3)] == [2 << 20] * 3
    assert cache.stats().rejected == cache.stats().storage_reads == 3


@pytest.mark.parametrize("policy", ["minio", "lru"])
def test_keys_that_collide_are_never_mixed_up(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleCache, "ids_of_key", lambda self, key: range(40, 48))
    load = Load()
    with sf.CacheLoader(capacity="1MiB", name="values", policy=policy) as cache:
        for _ in range(2):
            for key in range(8):
                assert cache.get(key, load) == f"value of {key}"
        assert load.keys == list(range(8))
        for _ in range(2):
            assert cache.get("ninth", load) == "value of 'ninth'"
        assert load.keys[8:] == (["ninth", "ninth"] if policy == "minio" else ["ninth"])
        for key in range(8):
            assert cache.get(key, load) == f"value of {key}"
        assert cache.stats().resident_items == 8


class Model:
    """A cache of `size` keys that evicts by the textbook."""

    def __init__(self, policy: str, size: int) -> None:
        self.policy, self.size, self.loads = policy, size, 0
        self.order: dict[Any, int] = {}  # from the next victim on

    def get(self, key: Any) -> None:
        if key not in self.order:
            self.loads += 1
            if len(self.order) == self.size:
                del self.order[next(iter(self.order))]
        elif self.policy == "lru":
            del self.order[key]
        self.order.setdefault(key, 1)


BODY = bytes(300)


@pytest.mark.parametrize(
    ("policy", "used", "typical"), [("lru", 0.3, "4KiB"), ("lru", 0.9, "512B"), ("fifo", 0.7, "512B")]
)
def test_a_policy_evicts_what_its_name_says(policy: str, used: float, typical: str) -> None:
    """Some keys are used in every round, and in each there are new ones. Small values fill the whole cache, too."""
    with sf.CacheLoader(capacity="128KiB", name="values", policy=policy, typical=typical) as cache:
        for key in range(400):
            cache.get(f"fill{key}", lambda _: BODY)
        size = cache.stats().resident_items  # as many as fit
        assert 50 < size < 300
        cache.clear()
        model, load, before = Model(policy, size), Load(), cache.stats()
        hot, rounds = [f"hot{key}" for key in range(int(used * size))], 5
        for round in range(rounds):
            for key in [*hot, *(f"cold{round}-{number}" for number in range(size // 10))]:
                model.get(key)
                assert cache.get(key, lambda key: (load(key), BODY)[1]) == BODY
        stats = cache.stats()
        assert len(load.keys) == pytest.approx(model.loads, abs=0.02 * model.loads)
        assert stats.resident_items == pytest.approx(len(model.order), abs=0.02 * size)
        assert stats.evictions - before.evictions == len(load.keys) - stats.resident_items
        assert stats.misses - before.misses == len(load.keys)
        assert stats.hits - before.hits == rounds * (len(hot) + size // 10) - len(load.keys)


def test_one_name_is_one_cache(cache: sf.CacheLoader) -> None:
    cache.get("a", Load())
    with sf.CacheLoader(capacity="1MiB", name="values") as other:
        assert other.get("a", unwanted) == "value of 'a'"
    for options in ({"capacity": "2MiB"}, {"capacity": "1MiB", "policy": "lru"}):
        with pytest.raises(sf.FingerprintError, match="Give another name"):
            sf.CacheLoader(name="values", **options)
    with pytest.raises(sf.InputError, match="cannot name a cache"):
        sf.CacheLoader(capacity="1MiB", name="")


def work(cache: sf.CacheLoader, number: int) -> None:
    for key in range(number, number + 150):
        value = cache.get(key % 180, lambda key: np.full(50, key))
        assert (value == key % 180).all()


@pytest.mark.parametrize(("context", "policy"), [("fork", "lru"), ("forkserver", "minio")])
def test_several_processes_at_once(context: str, policy: str) -> None:
    chosen = multiprocessing.get_context(context)
    with sf.CacheLoader(capacity="200KiB", name="values", policy=policy) as cache:
        workers = [chosen.Process(target=work, args=(cache, 20 * number)) for number in range(3)]
        for worker in workers:
            worker.start()
        assert [(worker.join(), worker.exitcode) for worker in workers] == [(None, 0)] * 3
        work(cache, 7)
        stats = cache.stats()
        assert stats.hits > 0
        assert stats.resident_items < 180
        assert stats.used_bytes <= stats.capacity_bytes
