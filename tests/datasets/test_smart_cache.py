"""The Smart Cache under every loader: right windows, fresh augmentation, one cache."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from smart_data import Rows, ids_of, noisy, until
from unseen import unseen_ids

NOISY = sf.mark_random(noisy)
LOADERS = {"stallfree": sf.DataLoader, "torch": torch.utils.data.DataLoader}
LOOKED = {*range(20)} - {*unseen_ids(20)}


def windows(dataset: sf.SmartCacheDataset, epochs: int) -> list[set[int]]:
    """The windows of an epoch after the other, when nothing is ever late."""
    return [set(dataset.window.plan.window(epoch * dataset.replace_num).tolist()) for epoch in range(epochs)]


# -- every loader ------------------------------------------------------------------------------------------------------

SETTINGS = [
    ("stallfree", None, 0, False),
    ("stallfree", "fork", 2, True),
    ("torch", "fork", 2, False),
    ("torch", "forkserver", 2, True),
    *(pytest.param(kind, "spawn", 2, True, marks=pytest.mark.slow) for kind in LOADERS),
]


@pytest.mark.parametrize(("kind", "method", "workers", "persistent"), SETTINGS)
def test_the_window_moves_under_every_loader(kind: str, method: str | None, workers: int, persistent: bool) -> None:
    with sf.SmartCacheDataset(
        Rows(20), NOISY, cache_num=10, replace_rate=0.2, on_late="wait", multiprocessing_context=method
    ) as data:
        assert len(data) == 10
        loader = LOADERS[kind](
            data,
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent,
            multiprocessing_context=method if workers else None,
        )
        noise: dict[int, set[float]] = {id: set() for id in range(20)}
        counts: Counter[int] = Counter()
        for expected in windows(data, 10):
            batches = list(loader)
            ids = ids_of(batches)
            assert len(ids) == 10
            assert set(ids) == expected
            counts.update(ids)
            for _, labels, drawn in batches:
                for id, number in zip(labels.tolist(), drawn.tolist(), strict=True):
                    noise[id].add(number)
            del batches
        assert set(counts.values()) == {5}
        assert all(len(drawn) == 5 for drawn in noise.values())  # never the same twice
        assert len(set().union(*noise.values())) == 100
        del loader


def test_augmentation_is_a_function_of_seed_epoch_and_sample() -> None:
    seen = []
    for kind, workers in (("torch", 0), ("stallfree", 2)):
        with sf.SmartCacheDataset(Rows(12), NOISY, cache_num=6, replace_rate=0.5, seed=7, on_late="wait") as data:
            loader = LOADERS[kind](data, batch_size=2, num_workers=workers)
            seen.append([dict(zip(b[1].tolist(), b[2].tolist(), strict=True)) for _ in range(4) for b in loader])
            del loader
    assert sorted(item for batch in seen[0] for item in batch.items()) == sorted(
        item for batch in seen[1] for item in batch.items()
    )


def test_each_sample_is_fetched_once_per_stay(tmp_path: Path) -> None:
    log = tmp_path / "fetches"
    with sf.SmartCacheDataset(Rows(20, log=log), cache_num=10, replace_rate=0.2, on_late="wait", seed=3) as data:
        until(data.window.is_filled)  # before that, the process that waits prepares as well
        with sf.DataLoader(data, batch_size=5, num_workers=2) as loader:
            for _ in range(11):  # a round, and one more
                ids_of(loader)
        data.shutdown()
        entered = Counter(data.window.plan.sequence(0, 10 + 10 * 2).tolist())
        coming = Counter(data.window.plan.sequence(30, 32).tolist())  # may have been prepared already
    fetched = Counter(map(int, log.read_text().split()))
    first = data.window.plan.sequence(0, 1)
    extra = Counter({int(first[0]): 1, int(data.window.plan.sequence(1, 2)[0]): 1})
    assert fetched - entered - coming - Counter(LOOKED) <= extra
    assert not entered - fetched


def test_validation_mode_caches_everything_once(tmp_path: Path) -> None:
    log = tmp_path / "fetches"
    with sf.SmartCacheDataset(Rows(20, log=log), cache_num=8, replace_rate=0, shuffle=False) as data:
        assert data.replace_num == 0
        assert data.is_started()
        with sf.DataLoader(data, batch_size=4, num_workers=1) as loader:
            assert all(ids_of(loader) == list(range(8)) for _ in range(3))
        assert data.stats().resident_items == 8
    assert Counter(map(int, log.read_text().split())) == Counter({*range(8), *LOOKED})


def test_a_sampler_that_leaves_samples_out() -> None:
    with sf.SmartCacheDataset(Rows(40), cache_num=20, replace_rate=0.1, on_late="wait") as data:
        loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True, drop_last=True)
        for _ in range(9):
            assert len(set(ids_of(loader))) == 18
        assert data.stats().epoch == 8
        del loader


def test_a_sampler_that_repeats_positions() -> None:
    with sf.SmartCacheDataset(Rows(40), cache_num=20, replace_rate=0.1, on_late="wait") as data:
        sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=20)
        loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler)
        expected = windows(data, 6)
        for epoch in range(6):
            data.set_epoch(epoch)
            first = next(iter(loader))
            assert set(first[1].tolist()) <= expected[epoch]
        del loader


def test_reading_by_hand() -> None:
    with sf.SmartCacheDataset(Rows(20), cache_num=10, replace_rate=0.2, on_late="wait") as data:
        expected = windows(data, 4)
        for window in expected:
            assert {data[position][1] for position in range(-10, 0)} == window
        with pytest.raises(IndexError, match="10"):
            data[10]


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_a_window_of_all_samples() -> None:
    with sf.SmartCacheDataset(Rows(5), cache_num=50) as data:
        assert (len(data), data.replace_num) == (5, 0)
        with sf.DataLoader(data, batch_size=5) as loader:
            assert sorted(ids_of(loader)) == [0, 1, 2, 3, 4]


class Blocks:
    """`samples` samples of `size` bytes, made as they are asked for."""

    def __init__(self, samples: int, size: int) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, id: int) -> Any:
        return np.full(self.size, id % 251, np.uint8)


class Uneven(Blocks):
    def __getitem__(self, id: int) -> Any:
        return bytes(self.size + 97 * (id % 100))


@pytest.mark.parametrize(("kind", "size"), [(Blocks, 10_000), (Uneven, 10_000)])
def test_a_budget_of_bytes(kind: type[Blocks], size: int) -> None:
    with sf.SmartCacheDataset(kind(500, size), capacity="2MiB", replace_rate=0.1, on_late="wait") as data:
        assert 90 < len(data) < 200
        with sf.DataLoader(data, batch_size=10, collate_fn=len) as loader:
            for _ in range(4):
                assert sum(loader) == len(data)
        stats = data.stats()
        assert stats.used_bytes <= stats.capacity_bytes <= 2 << 20
        assert stats.resident_items >= len(data)


def test_a_window_larger_than_the_memory() -> None:
    with pytest.raises(
        sf.CapacityError, match=r"cache_num=900000 and 90000 replacements of about .* each take .* free"
    ):
        sf.SmartCacheDataset(Blocks(1_000_000, 50_000_000), cache_num=900_000)
    with pytest.raises(sf.CapacityError, match="holds no record"):
        sf.SmartCacheDataset(Blocks(100, 10_000_000), capacity="4MiB")
    with pytest.raises(sf.CapacityError, match=r"holds no window: a sample takes 9\.5 MiB"):
        sf.SmartCacheDataset(Blocks(100, 10_000_000), capacity="12MiB")


# -- a whole epoch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "workers"), [("stallfree", 2), ("torch", 0)])
def test_a_full_epoch_begins_with_the_window(kind: str, workers: int) -> None:
    with sf.SmartCacheDataset(Rows(20), cache_num=8, replace_rate=0.25, full_epoch=True, on_late="wait") as data:
        assert len(data) == 20
        loader = LOADERS[kind](data, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
        orders = []
        for window in windows(data, 4):
            ids = ids_of(loader)
            assert sorted(ids) == list(range(20))
            assert set(ids[:8]) == window
            orders.append(ids)
        assert len({tuple(order) for order in orders}) == 4
        del loader


def test_a_full_epoch_is_not_shuffled_into_one() -> None:
    data = sf.SmartCacheDataset(Rows(20), cache_num=8, full_epoch=True)
    with data, sf.DataLoader(data, batch_size=4, shuffle=True) as loader:
        assert set(ids_of(loader)[:8]) == windows(data, 1)[0]


# -- by hand, resume, statistics ---------------------------------------------------------------------------------------


def test_start_update_and_shutdown_may_be_called_twice() -> None:
    with sf.SmartCacheDataset(Rows(20), cache_num=10, replace_rate=0.2, on_late="wait") as data:
        expected = windows(data, 6)
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        for epoch in range(6):
            data.start()
            data.start()
            assert data.is_started()
            assert set(ids_of(loader)) == expected[epoch]
            data.update_cache()
            data.update_cache()
            if epoch > 2:
                data.shutdown()
                data.shutdown()
                assert not data.is_started()
        del loader


def test_resume_at_every_epoch() -> None:
    def make() -> sf.SmartCacheDataset:
        return sf.SmartCacheDataset(Rows(15), NOISY, cache_num=6, replace_rate=0.3, seed=2, on_late="wait")

    with make() as data, sf.DataLoader(data, batch_size=4, shuffle=True, with_ids=True, num_workers=1) as loader:
        states, steps = [], []
        for _ in range(4):
            iterator = iter(loader)
            states.append(json.dumps(loader.state_dict()))
            for batch in iterator:
                steps.append([batch.ids.tolist(), batch.data[2].tolist()])
                states.append(json.dumps(loader.state_dict()))
            states.pop()  # of the end: the next epoch's first state says the same
    for step in range(0, len(steps), 3):
        with make() as data, sf.DataLoader(data, batch_size=4, shuffle=True, with_ids=True) as loader:
            loader.load_state_dict(json.loads(states[step]))
            rest = []
            while len(rest) < min(6, len(steps) - step):
                rest += [[batch.ids.tolist(), batch.data[2].tolist()] for batch in loader]
            wanted = min(6, len(steps) - step)
            assert rest[:wanted] == steps[step : step + wanted]


@pytest.mark.parametrize("kind", LOADERS)
def test_resume_of_the_data_set_alone(kind: str) -> None:
    with sf.SmartCacheDataset(Rows(15), cache_num=6, replace_rate=0.3, on_late="wait") as data:
        loader = LOADERS[kind](data, batch_size=3)
        states, seen = [], []
        for _ in range(4):
            states.append(json.dumps(data.state_dict()))
            seen.append(ids_of(loader))
        del loader
    for epoch, state in enumerate(states):
        with sf.SmartCacheDataset(Rows(15), cache_num=6, replace_rate=0.3, on_late="wait") as data:
            data.load_state_dict(json.loads(state))
            loader = LOADERS[kind](data, batch_size=3)
            assert [ids_of(loader) for _ in range(4 - epoch)] == seen[epoch:]
            del loader


def test_states_that_are_refused() -> None:
    with sf.SmartCacheDataset(Rows(15), cache_num=6, seed=1) as data:
        state = data.state_dict()
        with pytest.raises(sf.InputError, match="version None"):
            data.load_state_dict({})
        with pytest.raises(sf.InputError, match=r"another window: \[15, 7, 1, 1\]"):
            data.load_state_dict({**state, "window": [15, 7, 1, 1]})
        with sf.DataLoader(data, batch_size=3) as loader:
            plain = {key: value for key, value in loader.state_dict().items() if key != "window"}
            with pytest.raises(sf.InputError, match="has no window"):
                loader.load_state_dict(plain)


def test_hosts_have_parts_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for host in range(2):
        monkeypatch.setenv("GROUP_RANK", str(host))
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        data = sf.SmartCacheDataset(Rows(21), cache_num=5, replace_rate=0.4, on_late="wait")
        with data, sf.DataLoader(data, batch_size=5) as loader:
            seen.append({id for _ in range(5) for id in ids_of(loader)})
    assert seen[0] | seen[1] == set(range(21))
    assert not seen[0] & seen[1]


BAD = [
    ({}, "either cache_num"),
    ({"cache_num": 5, "capacity": "1MiB"}, "either cache_num"),
    ({"cache_num": 0}, "cache_num=0"),
    ({"cache_num": True}, "cache_num=True"),
    ({"cache_num": 2.5}, r"cache_num=2\.5"),
    ({"cache_num": 5, "replace_rate": 1.5}, r"replace_rate=1\.5"),
    ({"cache_num": 5, "replace_rate": "0.1"}, "replace_rate='0.1'"),
    ({"cache_num": 5, "num_fill_workers": 0}, "num_fill_workers=0"),
    ({"cache_num": 5, "on_late": "never"}, "on_late='never'"),
    ({"cache_num": 5, "on_error": "never"}, "on_error='never'"),
    ({"cache_num": 5, "hosts": (2, 2)}, r"hosts=\(2, 2\)"),
    ({"capacity": "8 apples"}, "apples"),
    ({"cache_num": 5, "name": "a/b"}, "name="),
    ({"cache_num": 5, "multiprocessing_context": "thread"}, "multiprocessing_context='thread'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.InputError, match=message):
        sf.SmartCacheDataset(Rows(10), **arguments)


def test_after_close() -> None:
    data = sf.SmartCacheDataset(Rows(10), cache_num=5)
    data.close()
    data.close()
    with pytest.raises(sf.InputError, match="is closed"):
        data[0]
    assert data.stats().capacity_bytes > 0
