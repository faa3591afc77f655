"""The Smart Cache under every loader: right windows, fresh augmentation, one count of epochs, states."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from loader_data import Made
from smart_data import Rows, ids_of, noisy, until
from unseen import unseen_ids

NOISY = sf.mark_random(noisy)
LOADERS: dict[str, Callable[..., Any]] = {"stallfree": sf.DataLoader, "torch": torch.utils.data.DataLoader}
LOOKED = {*range(20)} - {*unseen_ids(20)}


def smart(samples: int = 20, size: int = 10, rate: float = 0.2, **more: Any) -> sf.SmartCacheDataset:
    """A window that waits for its samples, so that no test depends on time."""
    return sf.SmartCacheDataset(Rows(samples), NOISY, cache_num=size, replace_rate=rate, on_late="wait", **more)


def windows(data: sf.SmartCacheDataset, *epochs: int) -> list[list[int]]:
    """The samples of each epoch, when nothing is ever late."""
    return [sorted(data.window.plan.window(epoch * data.replace_num).tolist()) for epoch in epochs]


def samples_of(loader: Any) -> dict[int, float]:
    """What was drawn for each sample of an epoch."""
    batches = list(loader)
    return dict(zip(ids_of(batches), torch.cat([batch[2] for batch in batches]).tolist(), strict=True))


SETTINGS = [
    ("stallfree", None, 0, False), ("stallfree", "fork", 2, True), ("torch", "forkserver", 2, True),
    pytest.param("torch", "fork", 2, False, marks=pytest.mark.slow),
    *(pytest.param(kind, "spawn", 2, True, marks=pytest.mark.slow) for kind in LOADERS),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method", "workers", "persistent"), SETTINGS)
def test_the_window_moves_under_every_loader(kind: str, method: str | None, workers: int, persistent: bool) -> None:
    with smart(multiprocessing_context=method) as data:
        assert len(data) == 10
        options = {"persistent_workers": persistent, "multiprocessing_context": method if workers else None}
        loader = LOADERS[kind](data, 3, shuffle=True, num_workers=workers, **options)
        epochs = [samples_of(loader) for _ in range(10)]
        assert [sorted(epoch) for epoch in epochs] == windows(data, *range(10))
        assert {*Counter(id for epoch in epochs for id in epoch).values()} == {5}
        assert len({drawn for epoch in epochs for drawn in epoch.values()}) == 100  # never the same twice
        del loader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_loader_per_epoch_continues(workers: int) -> None:
    with smart(rate=0.5) as data:
        kinds = ["torch", "torch", "stallfree", "stallfree", "torch"]
        epochs = [samples_of(LOADERS[kind](data, 3, shuffle=True, num_workers=workers)) for kind in kinds]
        assert [sorted(epoch) for epoch in epochs] == windows(data, *range(5))
    assert len({drawn for epoch in epochs for drawn in epoch.values()}) == 50


def test_two_loaders_at_the_same_time_have_epochs_of_their_own() -> None:
    with smart() as data:
        pairs = [*zip(sf.DataLoader(data, 3), sf.DataLoader(data, 3), strict=True)]
        assert [sorted(ids_of(batches)) for batches in zip(*pairs, strict=True)] == windows(data, 0, 1)
        assert sorted(samples_of(sf.DataLoader(data, 3))) == windows(data, 2)[0]


def test_an_epoch_that_is_set_decides() -> None:
    with smart() as data:
        ids_of(sf.DataLoader(data, 3))
        data.set_epoch(5)
        assert [sorted(ids_of(sf.DataLoader(data, 3))) for _ in range(2)] == windows(data, 5, 6)
        loader = sf.DataLoader(data, 3)
        loader.set_epoch(2)
        assert [sorted(ids_of(loader)), sorted(ids_of(sf.DataLoader(data, 3)))] == windows(data, 2, 3)


def test_samplers_that_leave_out_or_repeat_positions() -> None:
    with smart(40, 20, 0.1) as data:
        loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True, drop_last=True)
        assert all(len({*ids_of(loader)}) == 18 for _ in range(9))
        assert data.stats().epoch == 8
        sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=20)
        loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler)
        for epoch, window in enumerate(windows(data, *range(6))):
            data.set_epoch(epoch)
            assert {*ids_of([next(iter(loader))])} <= {*window}
        del loader


def test_each_sample_is_fetched_once_per_stay(tmp_path: Path) -> None:
    log = tmp_path / "fetches"
    with sf.SmartCacheDataset(Rows(20, log=log), cache_num=10, replace_rate=0.2, on_late="wait", seed=3) as data:
        until(data.window.is_filled)  # before that, the process that waits prepares as well
        with sf.DataLoader(data, batch_size=5, num_workers=2) as loader:
            for _ in range(11):  # a round, and one more
                ids_of(loader)
        data.shutdown()
        order = data.window.plan.sequence(0, 32).tolist()  # the last two may have been prepared already
    fetched = Counter(map(int, log.read_text().split()))
    assert fetched - Counter(order) - Counter(LOOKED) <= Counter(order[:2])
    assert not Counter(order[:30]) - fetched


def test_validation_mode_caches_everything_once(tmp_path: Path) -> None:
    log = tmp_path / "fetches"
    with sf.SmartCacheDataset(Rows(20, log=log), cache_num=8, replace_rate=0, shuffle=False) as data:
        assert (data.replace_num, data.is_started()) == (0, True)
        with sf.DataLoader(data, batch_size=4, num_workers=1) as loader:
            assert all(ids_of(loader) == list(range(8)) for _ in range(3))
        assert data.stats().resident_items == 8
    assert Counter(map(int, log.read_text().split())) == Counter({*range(8), *LOOKED})


@pytest.mark.parametrize(
    "make", [lambda id: np.full(10_000, id % 251, np.uint8), lambda id: bytes(10_000 + 97 * (id % 100))]
)
def test_the_cache_has_room_for_window_and_replacements_and_little_more(make: Any) -> None:
    with sf.SmartCacheDataset(Made(500, make), cache_num=100, on_late="wait") as data:
        with sf.DataLoader(data, batch_size=10, collate_fn=len) as loader:
            assert [sum(loader) for _ in range(4)] == [100] * 4
        stats = data.stats()
        assert 100 <= stats.resident_items <= 110
        assert stats.rejected == 0
        assert stats.used_bytes <= stats.capacity_bytes <= 2 * 110 * 15_000 + (1 << 18)


def test_start_update_and_shutdown_may_be_called_twice() -> None:
    with smart() as data:
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        for epoch, expected in enumerate(windows(data, *range(6))):
            data.start(), data.start()
            assert data.is_started()
            assert sorted(ids_of(loader)) == expected
            data.update_cache(), data.update_cache()
            if epoch > 2:
                data.shutdown(), data.shutdown()
                assert not data.is_started()
        del loader


def test_resume_at_every_step() -> None:
    def steps_of(loader: Any) -> Any:
        while True:
            yield from ([batch.ids.tolist(), batch.data[2].tolist()] for batch in loader)

    options: Any = {"batch_size": 4, "shuffle": True, "with_ids": True}
    with smart(15, 6, 0.3, seed=2) as data, sf.DataLoader(data, **options) as loader:
        iterator, states, steps = steps_of(loader), [], []
        for _ in range(8):
            states.append(json.dumps(loader.state_dict()))
            steps.append(next(iterator))
        iterator.close()
    for step in range(8):
        with smart(15, 6, 0.3, seed=2) as data, sf.DataLoader(data, **options) as loader:
            loader.load_state_dict(json.loads(states[step]))
            iterator = steps_of(loader)
            assert [next(iterator) for _ in steps[step:]] == steps[step:]
            iterator.close()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_of_the_data_set_decides(kind: str) -> None:
    """Without a seed, which follows from another state of torch's generator in the process that goes on."""
    torch.manual_seed(1)
    with smart() as data:
        for _ in range(2):
            ids_of(LOADERS[kind](data, 3))
        state = json.loads(json.dumps(data.state_dict()))
        left = [ids_of(LOADERS[kind](data, 3)) for _ in range(3)]
        assert [sorted(ids) for ids in left] == windows(data, 2, 3, 4)
    torch.manual_seed(2)
    with smart() as data:
        ids_of(LOADERS[kind](data, 3))
        data.load_state_dict(state)
        assert [ids_of(LOADERS[kind](data, 3)) for _ in range(3)] == left


def test_torchs_generator_decides_and_is_not_moved() -> None:
    def order(seed: int) -> tuple[int, ...]:
        torch.manual_seed(seed)
        with smart() as data:
            assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
            return tuple(data.begin_epoch(0).tolist())

    assert order(0) == order(0) != order(1)


def test_hosts_have_parts_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for host in range(2):
        monkeypatch.setenv("GROUP_RANK", str(host)), monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        with smart(21, 5, 0.4) as data, sf.DataLoader(data, batch_size=5) as loader:
            seen.append({id for _ in range(5) for id in ids_of(loader)})
    assert seen[0] | seen[1] == set(range(21))
    assert not seen[0] & seen[1]
    with pytest.raises(sf.InputError, match=r"hosts=\(2, 3\): give fewer hosts than samples, which are 2"):
        smart(2, hosts=(2, 3))


def test_a_window_larger_than_the_memory() -> None:
    needed = r"cache_num=900000 and 90000 replacements of about .* each take .* free.* give cache_num=\d+ or less"
    with pytest.raises(sf.CapacityError, match=needed):
        sf.SmartCacheDataset(Made(1_000_000, lambda id: bytes(5_000_000)), cache_num=900_000)


def test_a_state_within_an_epoch_of_torchs_loader() -> None:
    with smart(seed=1) as data:
        data.__getitems__(range(10))
        data.__getitems__(range(6))
        state = data.state_dict()
        rest = [sample[1] for sample in data.__getitems__(range(6, 10))]
    with smart(seed=1) as data:
        data.load_state_dict(json.loads(json.dumps(state)))
        assert [sample[1] for sample in data.__getitems__(range(6, 10))] == rest
        assert data.stats().epoch == 1


def test_half_of_the_positions_makes_an_epoch_under_another_loader() -> None:
    with sf.SmartCacheDataset(list(range(20)), cache_num=10, replace_rate=0.2, seed=0) as window:
        loader = torch.utils.data.DataLoader(window, batch_size=5, sampler=range(5))
        for epoch in range(3):
            list(loader)
            assert window.stats().epoch == epoch


def test_a_state_within_an_epoch_of_another_loader_has_that_epoch() -> None:
    options: dict[str, Any] = {"cache_num": 10, "replace_rate": 0.5, "seed": 0, "on_late": "wait"}
    with sf.SmartCacheDataset(list(range(40)), **options) as window:
        loader = torch.utils.data.DataLoader(window, batch_size=2, sampler=range(10))
        list(loader), list(islice(loader, 2))
        state, expected = window.state_dict(), window.window.plan.window(window.window.start(1)).tolist()
    with sf.SmartCacheDataset(list(range(40)), **options) as resumed:
        resumed.load_state_dict(state)
        assert sorted(torch.cat(list(sf.DataLoader(resumed, 5))).tolist()) == sorted(expected)
