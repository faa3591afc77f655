"""`DataLoader(cache="auto")`: it decides once, loses nothing, and every sample is what it is without it."""

import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import stallfree as sf
from cached_data import Given, Numbers, doubled
from children import until
from process_ranks import in_ranks
from stallfree.analysis import auto
from stallfree.cache import capacity as limits
from stallfree.errors import StorageError
from stallfree.ipc.folders import default_root
from stallfree.testing import ThrottledSource

COUNT = 40
ROOM = "4MiB"


@sf.mark_deterministic
def squared(sample: tuple[np.ndarray[Any, Any], int]) -> tuple[np.ndarray[Any, Any], int]:
    time.sleep(0.002)
    numbers, label = sample
    return np.repeat(numbers.astype(np.float64) ** 2, 4), label


@sf.mark_random
def shaken(sample: tuple[np.ndarray[Any, Any], int]) -> tuple[np.ndarray[Any, Any], int]:
    numbers, label = sample
    return numbers + random.random(), label


def epochs(loader: Any, count: int) -> list[dict[int, bytes]]:
    """The samples of each epoch by label; each is there once."""
    found = []
    for _ in range(count):
        samples: dict[int, bytes] = {}
        for numbers, labels in loader:
            for row, label in zip(numbers, labels, strict=True):
                assert int(label) not in samples
                samples[int(label)] = row.numpy().tobytes()
        found.append(samples)
    return found


class Slow:
    """Samples of 4 KB that take 2 ms each, from storage that counts its requests in a file."""

    def __init__(self, log: Any = None, transform: Any = None, seconds: float = 0.002, count: int = COUNT) -> None:
        self.log, self.transform, self.seconds, self.count = log, transform, seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> tuple[np.ndarray[Any, Any], int]:
        if self.log is not None:
            with open(f"{self.log}{os.environ.get('RANK', '')}", "a") as log:
                log.write(f"{id}\n")
        time.sleep(self.seconds)
        sample = np.full(1000, id, np.float32)
        return (sample if self.transform is None else self.transform(sample)), id


class Augmented(Slow):
    """Augments by itself."""

    def __getitem__(self, id: int) -> Any:
        return np.array([random.random()]), id


def noise(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return numbers + random.random()


@pytest.mark.parametrize(("data", "workers", "room"), [
    (Numbers(COUNT, [squared, shaken], size=256), 0, "120kB"), (Numbers(COUNT, [squared, shaken], size=256), 2, ROOM),
    (Slow(transform=noise), 1, ROOM),
])  # fmt: skip
def test_samples_are_those_without_a_cache(data: Any, workers: int, room: str) -> None:
    """Also after a resume in mid-epoch."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "seed": 3}
    with sf.DataLoader(data, 8, **options) as without:
        expected = epochs(without, 2)
    assert expected[0] != expected[1]
    with sf.DataLoader(data, 8, cache="auto", capacity=room, **options) as loader:
        assert (loader.decision, loader.cached) == ("", None)
        assert epochs(loader, 2) == expected
        assert ("cut at transform" in loader.decision) == isinstance(data, Slow)
        batches = iter(loader)
        next(batches)
        state, left = loader.state_dict(), [labels.tolist() for _, labels in batches]
    with sf.DataLoader(data, 8, cache="auto", capacity=room, **options) as loader:
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == left


class Offset(Slow):
    """As worker processes make them: `worker_init_fn` sets the offset, and the number of workers counts."""

    offset = 0

    def __getitem__(self, id: int) -> Any:
        info = torch.utils.data.get_worker_info()
        sample = super().__getitem__(id)[0] + self.offset + 10_000 * (0 if info is None else info.num_workers)
        return sample, id


def set_offset(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.offset = 1000  # type: ignore[union-attr]


@pytest.mark.parametrize("transform", [None, noise, np.negative])
def test_samples_of_the_decision_are_made_as_by_a_worker(transform: Any) -> None:
    options: dict[str, Any] = {"batch_size": 10, "num_workers": 2, "worker_init_fn": set_offset}
    data = [Offset(transform=transform) for _ in range(2)]
    expected = torch.cat([rows[:, 0] for rows, _ in torch.utils.data.DataLoader(data[0], **options)])
    with sf.DataLoader(data[1], cache="auto", **options) as loader:
        for _ in range(2):
            assert torch.allclose(torch.cat([rows[:, 0] for rows, _ in loader]), expected, atol=1)


def test_what_was_fetched_to_decide_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with sf.DataLoader(Slow(log), 8, num_workers=1, cache="auto", capacity=ROOM) as loader:
        batches = iter(loader)
        next(batches)
        looked = set(map(int, log.read_text().split()[:16]))
        list(batches), epochs(loader, 1)
        fetched = Counter(map(int, log.read_text().split()))
        assert loader.cached is not None
        assert loader.cached.form == "fetched"
        assert loader.cached.stats().resident_items == COUNT
    assert fetched.keys() == set(range(COUNT))
    assert max(fetched.values()) <= 2, "each sample is made twice while the cache is filled, and not again"
    assert all(fetched[id] == 2 for id in looked)


@pytest.mark.parametrize("data", [Numbers(COUNT, [squared, shaken]), Slow(transform=noise)])
def test_a_decision_leaves_no_trace_in_the_generators(data: Any) -> None:
    before, torch_states = (random.getstate(), np.random.get_state()[1].tolist()), list[list[int]]()
    with sf.DataLoader(data, 8, num_workers=0, cache="auto", capacity=ROOM) as loader:
        for _ in range(2):  # of which the first one decides
            torch.manual_seed(0)
            next(iter(loader))
            torch_states.append(torch.get_rng_state().tolist())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert torch_states[0] == torch_states[1], "each iteration draws its seed, as torch's do"


@pytest.mark.parametrize(("data", "form", "words"), [
    (Numbers(COUNT, [squared, shaken]), "prepared", "all 40 samples, as they are after the transforms that"),
    (ThrottledSource(Numbers(COUNT, [shaken], size=2000), bandwidth="1MB/s"), "fetched", "as they are read"),
    (Slow(), "fetched", "all 40 samples, as they are read"),
    (Slow(transform=noise), "fetched", "all 40 samples, as they are before the transform"),
    (torch.utils.data.Subset(Slow(transform=noise), range(COUNT)), "fetched", "as they are before the transform"),
    (Augmented(), None, "no samples in memory: its samples may be random, and no part of them can be kept"),
    (Numbers(COUNT), None, "no samples in memory: it would save less than a tenth"),
])  # fmt: skip
def test_what_is_chosen_and_said(data: Any, form: Any, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with sf.DataLoader(data, 8, num_workers=1, cache="auto", capacity=ROOM) as loader:
        epochs(loader, 1)
        (line,) = capfd.readouterr().err.splitlines()
        assert (loader.cached and loader.cached.form) == form
        assert line.startswith("stallfree: cache='auto' keeps ")
        assert words in line
        assert "; 1 worker process" in line
        assert line.removeprefix("stallfree: ") in loader.decision
        epochs(loader, 2)
        assert capfd.readouterr().err == "", "it decides once"


class Files(Slow):
    """Reads and augments in one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        for id in range(COUNT):
            (folder / str(id)).write_bytes(bytes([id]) * 1000)

    def __getitem__(self, id: int) -> Any:
        return np.frombuffer((self.folder / str(id)).read_bytes(), np.uint8)[:8] + random.random(), id


class Large(Files):
    """Makes more of a file than there is room for."""

    def __getitem__(self, id: int) -> Any:
        return np.full(15_000, float((self.folder / str(id)).read_bytes()[0])), id


@pytest.mark.parametrize("kind", [Files, Large])
def test_files_of_random_or_large_samples_are_kept(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a measurement by which these files lie in slow storage."""
    measure, slow = auto.measure_files, {"miss": 1.0, "hit": {"files": 1e-6}}
    monkeypatch.setattr(auto, "measure_files", lambda *args, **options: replace(measure(*args, **options), **slow))
    data = kind(tmp_path)
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 1}
    with sf.DataLoader(data, 8, **options) as without:
        expected = epochs(without, 2)
    with sf.DataLoader(data, 8, capacity=ROOM, cache="auto", transform=doubled, **options) as loader:
        found = epochs(loader, 1)
        for file in tmp_path.iterdir():
            file.unlink()
        found += epochs(loader, 1)
        assert loader.cached is not None
        assert "the files of all 40 samples" in loader.decision
        assert ("it drew random numbers" in loader.decision) == (kind is Files)
    for epoch, wanted in zip(found, expected, strict=True):
        assert epoch.keys() == wanted.keys()
        for id, sample in wanted.items():
            np.testing.assert_array_equal(np.frombuffer(epoch[id]), 2 * np.frombuffer(sample))


@pytest.mark.parametrize("data", [Slow(), Slow(transform=noise)], ids=["whole", "cut"])
def test_jobs_with_the_same_data_share_the_first_decision_and_the_cache(
    data: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shares = iter([4 << 20, 512 << 10])
    monkeypatch.setattr(auto, "granted", lambda capacity, root: next(shares))
    jobs: list[Any] = [sf.DataLoader(data, 8, num_workers=0, cache="auto") for _ in range(2)]
    with jobs[0] as one, jobs[1] as two:
        epochs(one, 1), epochs(two, 1)
        assert two.decision == one.decision
        assert capfd.readouterr().err.count("cache='auto'") == 1, "only who decides prints it"
        assert two.cached.cache.path == one.cached.cache.path
        assert one.cached.cache.capacity == pytest.approx(4 << 20, rel=0.1), "the share of the process that decides"
    assert not list(default_root().glob("auto-*"))


def test_the_number_of_workers_may_be_set() -> None:
    with sf.DataLoader(Slow(), 8, num_workers=2, cache="auto", capacity=ROOM) as loader:
        for workers in (1, 0):  # before the decision, and after it
            loader.num_workers = workers
            assert epochs(loader, 1)[0].keys() == set(range(COUNT))
            assert loader.stats().num_workers == workers


def test_memory_that_caches_may_still_fill_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1000 << 20
    monkeypatch.setattr(limits, "free_memory", lambda: free)
    monkeypatch.setattr(limits, "free_space", lambda folder: 2 * free)
    assert limits.granted(1.0, default_root()) == free
    with sf.CachedDataset(Numbers(COUNT, size=200_000), capacity="600MiB"):  # of which 64 MiB are allocated
        assert limits.granted(1.0, default_root()) == pytest.approx(464 << 20, rel=0.05)
    assert limits.granted(1.0, default_root()) == free


class Held(Slow):
    """Keeps its file open."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(b"".join(bytes([id]) * 100 for id in range(COUNT)))
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __getitem__(self, id: int) -> Any:
        self.file.seek(100 * id)
        return self.file.read(100)[50] + random.random(), id


def test_no_workers_for_a_data_set_that_holds_an_open_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = Held(tmp_path / "file")
    with data.file, sf.DataLoader(data, 8, cache="auto", capacity=ROOM, persistent_workers=True) as loader:
        for values, ids in loader:
            assert values.int().tolist() == ids.tolist()
        assert loader.num_workers == 0
        assert "; no worker processes" in capfd.readouterr().err


def test_without_room_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "cached_after", Mock(side_effect=StorageError("full")))
    with sf.DataLoader(Slow(), 8, cache="auto", capacity=ROOM, num_workers=0) as loader:
        assert sorted(epochs(loader, 1)[0]) == list(range(COUNT))
        assert loader.decision == "cache='auto' keeps no samples in memory: full; no worker processes"


@pytest.mark.parametrize(("workers", "used"), [(3, 3), (0, 0), (None, 0)])
def test_workers_are_not_fewer_than_the_user_gave_and_none_for_a_short_epoch(workers: int | None, used: int) -> None:
    with sf.DataLoader(Slow(seconds=0.0), 8, num_workers=workers, cache="auto", capacity=ROOM) as loader:
        epochs(loader, 1)
        assert loader.num_workers == used


@pytest.mark.parametrize(("options", "message"), [
    ({"cache": "memory", "capacity": "1GiB"}, "give cache='auto', or leave them out"),
    ({"transform": str}, "give cache='auto', or leave them out"),
    ({"cache": "auto", "transform": 3}, "transform=3 cannot be called"),
    ({"cache": "auto", "capacity": "0%"}, "share above 0%"),
    ({"cache": "auto", "capacity": "1GiB", "sampler": sf.ImportanceSampler(12)}, "give it a CachedDataset"),
])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.InputError, match=message):
        sf.DataLoader(Numbers(), 4, **options)
    with sf.CachedDataset(Numbers(), capacity=ROOM) as data, pytest.raises(sf.InputError, match="which has a cache"):
        sf.DataLoader(data, 4, cache="auto", capacity=ROOM)


def test_a_loader_that_is_not_closed_leaves_nothing_behind() -> None:
    loader = sf.DataLoader(Slow(), 8, num_workers=0, cache="auto", capacity=ROOM)
    epochs(loader, 1)
    assert list(default_root().glob("auto-*"))
    del loader
    assert not list(default_root().glob("auto-*"))


def test_an_error_of_the_data_set_is_raised_by_the_loop_and_not_by_the_decision() -> None:
    """All samples but the first fail."""
    data = Given([0, *[OSError("bad sector")] * 9])
    with sf.DataLoader(data, 1, cache="auto", capacity=ROOM, num_workers=0) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0]
        with pytest.raises(OSError, match="bad sector"):
            next(batches)


def test_one_rank_measures_for_all(tmp_path: Path) -> None:
    def train(rank: int) -> Any:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4733", "TORCHELASTIC_RUN_ID": "auto"}
        data, options = Slow(tmp_path / "log", count=600), {"shuffle": True, "seed": 1, "num_workers": 0}
        with sf.DataLoader(data, 8, cache="auto", capacity="8MiB", ranks=(rank, 3), **options) as loader:
            next(iter(loader))
            fetched = (tmp_path / f"log{rank}").read_text().count("\n")
            (tmp_path / f"{rank}.done").touch()
            until(lambda: len(list(tmp_path.glob("*.done"))) == 3)  # ranks of a job live at the same time
        return fetched, loader.decision.split(";")[0]

    fetched, decisions = zip(*in_ranks(3, tmp_path, train), strict=True)
    assert len({*decisions}) == 1
    assert sorted(fetched)[-2] <= 4 * 8, "all but one fetch no more than their first batches"
