"""Readers take no lock: whatever writers do meanwhile, a hit is whole and is the sample that was asked for."""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cache_tools import is_signed, make, problems, signed
from children import Child, run_threads
from stallfree.cache import sample_cache as module
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.errors import CodecError
from stallfree.ipc.locks import FileLock

NUM_IDS = 48
EXAMPLE = signed(0, 0)


def churn(cache: SampleCache, rounds: int, seed: int, sizes: tuple[int, ...] = (4064,)) -> None:
    rng = np.random.default_rng(seed)
    for nonce in range(rounds):
        ids = rng.permutation(NUM_IDS)[:6].tolist()
        cache.put_many(ids, [signed(id, seed * rounds + nonce, int(rng.choice(sizes))) for id in ids])


def read(cache: SampleCache, rounds: int, seed: int) -> None:
    """Check every hit."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        ids = rng.integers(0, NUM_IDS, 12).tolist()
        for id, value in zip(ids, cache.get_many(ids), strict=True):
            assert value is MISS or is_signed(id, value), f"id {id}"


def gather(cache: SampleCache, rounds: int) -> None:
    rng = np.random.default_rng(5)
    assert cache.structure is not None
    outs = [np.empty((16, leaf.nbytes), np.uint8) for leaf in cache.structure.leaves]
    for _ in range(rounds):
        ids = rng.integers(0, NUM_IDS, 16)
        for at in np.flatnonzero(cache.gather(ids, outs)).tolist():
            id, nonce = outs[0][at].view(np.int64)[0], outs[1][at].view(np.int64)[0]
            assert id == ids[at]
            assert (outs[2][at] == signed(int(id), int(nonce))[2].numpy()).all()


@pytest.mark.parametrize("on_disk", [False, True])
def test_every_hit_is_right_while_writers_churn(on_disk: bool, tmp_path: Path) -> None:
    sizes, example, blocks = ((4064, 100, 30_000), b"x" * 300, 300) if on_disk else ((4064,), EXAMPLE, 12)
    with make(NUM_IDS, blocks, policy="lru", example=example, store=tmp_path if on_disk else "memory") as cache:
        churn(cache, 3, 9, sizes)
        children = [Child(churn, cache, 60, seed, sizes) for seed in (1, 2)]
        children += [Child(read, cache, 80, 3), Child(read, cache, 80, 4) if on_disk else Child(gather, cache, 150)]
        run_threads(*(lambda seed=seed: read(cache, 20, seed) for seed in (5, 6)))
        assert [child.wait() for child in children] == [0] * 4
        stats = cache.stats()
        assert (problems(cache), stats.damaged, stats.evictions > 100, stats.hits > 0) == ([], 0, True, True)
        assert stats.hits + stats.misses == 12 * (2 * 80 + 2 * 20) if on_disk else 12 * (80 + 2 * 20) + 16 * 150


def stop_while_holding(cache: SampleCache) -> None:
    with FileLock(cache.path / "lock").hold(10, "the test"):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_writer_costs_puts_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with make(NUM_IDS, 12, policy="lru", example=EXAMPLE, name="stopped") as cache:
        assert cache.put_many([1, 2], [signed(1, 0), signed(2, 0)]).all()
        writer = Child(stop_while_holding, cache)
        writer.wait_until_stopped()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for id in range(3, 6):
                assert not cache.put_many([id], [signed(id, 0)]).any()
        (warning,) = caught
        assert "storing in the cache" in str(warning.message)
        assert "another process (stopped?) held" in str(warning.message)
        assert is_signed(1, cache.get_many([1])[0])

        def attach() -> None:
            with SampleCache(NUM_IDS, capacity=0, fingerprint="data", policy="lru", name="stopped") as other:
                read(other, 5, 1)

        assert Child(attach).wait() == 0, "another process still joins, reads and counts"
        stats = cache.stats()
        assert (stats.rejected, stats.hits > 1, stats.hits + stats.misses) == (3, True, 1 + 5 * 12)
        writer.signal(signal.SIGCONT)
        assert writer.wait() == 0
        assert cache.put_many([20], [signed(20, 0)]).all(), "samples are stored again at once"


# -- records that change while they are read --------------------------------------------------------------------------

PICTURE = (torch.zeros(3, 50, dtype=torch.uint8), 0)
LONG = "of another form" * 200
long = pytest.mark.parametrize("long", [False, True])


def picture(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((3, 50), id, dtype=torch.uint8), id


@long
def test_a_record_that_is_changed_while_it_is_lent(long: bool) -> None:
    with make(20, 60, example=PICTURE) as cache:
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


@pytest.mark.parametrize(
    ("method", "long"),
    [("get_many", False), ("get_many", True), ("borrow", False), ("borrow", True), ("find", True)],
)
def test_a_record_that_goes_between_two_looks_is_none(method: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is given to others after it was read in the index, and before its chain or its bytes are."""
    with make(20, 60, example=PICTURE) as cache:
        cache.put_many([1, 2], [LONG if long else picture(1), picture(2)])
        part, name = (cache._arena, "read") if method == "find" else (cache._records, "locate")
        real = getattr(part, name)

        def replace(*arguments: Any) -> Any:
            monkeypatch.undo()
            found = real(*arguments)
            cache.drop([1])
            cache.put_many([3, 4, 5], [picture(3), LONG, picture(5)])
            return found

        monkeypatch.setattr(part, name, replace)
        found: Any = cache.find([1], lambda value: True) if method == "find" else getattr(cache, method)([1, 2])
        if method == "find":
            assert found is MISS
        elif method == "borrow":
            assert (found.unchanged(0), found.unchanged(1)) == (False, True)
        else:
            assert (found[0], found[1][1]) == (MISS, 2)


def test_a_length_that_cannot_be_is_none() -> None:
    with make(20, 60, example=PICTURE) as cache:
        cache.put_many([1, 2], [LONG, picture(2)])
        cache._index.length[1] = (1 << 32) - 1  # a writer may be changing it just now
        assert cache.get_many([1]) == [MISS]
        assert cache.get_many([2])[0][1] == 2


def test_what_is_lent_is_not_copied_and_outlives_the_cache() -> None:
    cache = make(20, 60, example=PICTURE)
    cache.put_many([1], [picture(1)])
    one, two = cache.borrow([1]), cache.borrow([1])
    assert one is not None
    assert two is not None
    assert one.values[0][0].data_ptr() == two.values[0][0].data_ptr()
    cache.close()
    assert torch.equal(one.values[0][0], picture(1)[0])
    assert one.unchanged(0)


class Point(NamedTuple):
    """A named tuple, beside whose text its record has no fixed size."""

    id: int
    text: str


def test_what_is_pickled_or_of_a_class_that_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error where the cache is trusted, and a miss where its records came over a network. It is kept."""
    with make(20, 400, name="none") as cache, make(20, 400, name="none", allow_pickle=False) as other:
        cache.put_many([1, 2], [Point(1, "text"), {1, 2, 3}])
        assert (cache.get_many([2]), other.get_many([2])) == ([{1, 2, 3}], [MISS])
        with monkeypatch.context() as patch:
            patch.delattr(sys.modules[__name__], "Point")
            assert other.get_many([1]) == [MISS]
            with pytest.raises(CodecError, match=r"named tuple \S*test_readers\.Point.*: import \S*test_readers where"):
                cache.get_many([1])
        assert cache.get_many([1]) == other.get_many([1]) == [Point(1, "text")]
