"""`DataLoader(cache="auto")`: what it decides is kept, nothing is lost, and every sample is what it is without it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from cached_data import Given, Numbers
from stallfree.autotune import auto_cache as auto
from stallfree.autotune import subject
from stallfree.autotune.choice import Measured
from stallfree.autotune.measure import Probe, measure
from stallfree.cache import capacity as limits
from stallfree.datasets.split import is_prepared
from stallfree.errors import CapacityError, StorageError, text_of
from stallfree.ipc.folders import SharedFolder, default_root
from stallfree.testing import ThrottledSource

COUNT = 40
ROOM = "4MiB"


@sf.mark_deterministic
def squared(sample: tuple[np.ndarray[Any, Any], int]) -> tuple[np.ndarray[Any, Any], int]:
    numbers, label = sample
    return np.repeat(numbers.astype(np.float64) ** 2, 4), label


@sf.mark_random
def shaken(sample: tuple[np.ndarray[Any, Any], int]) -> tuple[np.ndarray[Any, Any], int]:
    numbers, label = sample
    return numbers + random.random(), label


def rates(**changes: Any) -> Measured:
    """Storage that is slow, prep that is not, all fit in both forms."""
    usual: dict[str, Any] = {
        "samples": COUNT,
        "storage": {8: 100.0, 16: 200.0},
        "fetching": 0.0,
        "whole": 0.002,
        "deterministic": 0.001,
        "random": 0.001,
        "reading": (0.0, 0.0),
        "sizes": (200.0, 600.0),
    }
    return Measured(**(usual | changes))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measured], list[int]]:
    """Sets what the next measurements find; the list grows by one with each of them."""
    found: list[Measured] = []
    calls: list[int] = []

    def stand_in(source: Any, steps: Any, first: Any, *, seed: int) -> Probe:
        calls.append(len(calls))
        return Probe(found[-1], {first.first.id: first.first.record})

    for module in (auto, subject):
        monkeypatch.setattr(module, "measure", stand_in)
    monkeypatch.setattr(auto, "call_in_child", lambda call, what: call())  # so that calls are counted here
    monkeypatch.setattr(auto, "_SHORT", 0.0)

    def set_to(new: Measured) -> list[int]:
        found.append(new)
        return calls

    return set_to


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


@pytest.mark.parametrize(("workers", "room"), [(0, "120kB"), (2, ROOM)])
def test_samples_are_those_without_a_cache(workers: int, room: str) -> None:
    source = Numbers(COUNT, [squared, shaken], size=256)
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "seed": 3}
    with sf.DataLoader(source, 8, **options) as without:
        expected = epochs(without, 3)
    with sf.DataLoader(source, 8, cache="auto", capacity=room, **options) as loader:
        assert (loader.decision, loader.cached) == ("", None)
        assert epochs(loader, 3) == expected
        assert loader.decision


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_the_samples_is_kept_prepared_and_all_are_what_they_are(share: float) -> None:
    source = ThrottledSource(Numbers(COUNT, [squared, shaken]))
    with sf.DataLoader(source, 8, shuffle=True, seed=1) as without:
        expected = epochs(without, 2)
    source.reset()
    with sf.CachedDataset(source, capacity=ROOM, form=share) as data:
        with sf.DataLoader(data, 8, shuffle=True, seed=1) as loader:
            assert epochs(loader, 2) == expected
        ids = np.arange(COUNT)
        prepared = is_prepared(ids, share) if share < 1 else np.ones(COUNT, bool)
        assert prepared.sum() == pytest.approx(share * COUNT, abs=8)
        for id, there, kept in zip(ids.tolist(), prepared, data.cache.get_many(ids), strict=True):
            record = (np.full(16, id, np.int64), id)
            wanted = squared(record) if there else record
            assert kept[1] == id
            np.testing.assert_array_equal(kept[0], wanted[0])
        assert source.requests == COUNT
    source.close()


def test_a_form_that_is_none_is_refused() -> None:
    for form in (-0.1, 1.1, "half", True, math.nan):
        with pytest.raises(sf.InputError, match="'fetched', 'prepared', 'files' or 'auto', or the share"):
            sf.CachedDataset(Numbers(), capacity=ROOM, form=form)


def test_nothing_is_fetched_twice_where_all_fits(measured: Callable[[Measured], list[int]]) -> None:
    measured(rates())
    source = ThrottledSource(Numbers(COUNT, [squared, shaken]))
    with sf.DataLoader(source, 8, shuffle=True, num_workers=2, cache="auto", capacity=ROOM) as loader:
        epochs(loader, 2)
        assert source.requests == COUNT + 8  # the samples of the first look are fetched twice
        assert loader.cached is not None
        assert loader.cached.stats().resident_items == COUNT
    source.close()


def test_a_real_measurement_reads_no_sample_twice() -> None:
    source = ThrottledSource(Numbers(400, [squared, shaken]))
    with sf.CachedDataset(source, capacity=ROOM) as data:
        first = data.reader
    look = auto.look(source, source.pipeline)
    source.reset()
    probe = measure(source, source.pipeline, look, seed=1)
    assert source.requests == len(probe.records)
    assert len(set(probe.records)) == len(probe.records) >= 4
    for id, (numbers, label) in probe.records.items():
        assert label == id
        assert (numbers == id).all()
    found = probe.measured
    assert found.samples == 400
    assert found.sizes[0] < found.sizes[1] < math.inf
    assert min(found.whole, found.deterministic, found.random) > 0
    assert first.split.share == 1.0
    source.close()


def test_a_measurement_leaves_no_trace_in_the_generators() -> None:
    source = Numbers(COUNT, [squared, shaken])
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with sf.DataLoader(source, 8, cache="auto", capacity=ROOM, generator=torch.Generator().manual_seed(1)) as loader:
        epochs(loader, 1)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("found", "form"),
    [
        (rates(), "prepared"),
        (rates(sizes=(200.0, math.inf)), "fetched"),
        (rates(sizes=(math.inf, math.inf)), None),
    ],
)
def test_the_cache_is_what_was_chosen(
    found: Measured, form: Any, measured: Callable[[Measured], list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    measured(found)
    with sf.DataLoader(Numbers(COUNT, [squared, shaken]), 8, num_workers=1, cache="auto", capacity=ROOM) as loader:
        epochs(loader, 1)
        assert (loader.cached and loader.cached.form) == form
        line = capfd.readouterr().err
        assert line.startswith("stallfree: ")
        assert line.count("\n") == 1
        assert line.removeprefix("stallfree: ").split(";")[0] == loader.decision.split(";")[0]
        epochs(loader, 1)
        assert capfd.readouterr().err.startswith("stallfree: the second epoch gave ")


def test_jobs_with_the_same_data_share_the_first_decision_and_the_cache(
    measured: Callable[[Measured], list[int]],
) -> None:
    calls = measured(rates())
    source = ThrottledSource(Numbers(COUNT, [squared, shaken]))

    def job() -> Any:
        return sf.DataLoader(source, 8, num_workers=0, cache="auto", capacity=ROOM)

    with job() as one:
        epochs(one, 1)
        measured(rates(sizes=(200.0, math.inf)))
        with job() as two:
            epochs(two, 1)
            assert two.decision == one.decision
            assert two.cached.cache.name == one.cached.cache.name
    assert len(calls) == 1
    assert not list(default_root().glob("auto-*"))
    source.close()


def test_workers_are_chosen_when_the_step_is_known(measured: Callable[[Measured], list[int]]) -> None:
    measured(rates(deterministic=0.0, whole=0.1, random=0.1))
    chosen = auto.AutoCache(Numbers(COUNT, [squared, shaken]), 1 << 22, None)
    chosen._cpus = 8
    chosen.begin(0)
    assert chosen.num_workers == 8  # 80/s; the step is not known
    reader = chosen._reader
    chosen.end(COUNT, 8.0, 0.0)
    chosen.begin(0)
    assert chosen.num_workers == 8  # what the first epoch says of the step is not taken: much begins in it
    chosen.end(COUNT, 2.0, 0.0)
    chosen.begin(0)
    assert chosen.num_workers == 4  # 20/s is what the step takes, twice that what is wanted
    assert chosen._reader is reader
    chosen.close()


def slow_epochs(chosen: auto.AutoCache) -> None:
    """Two in which the training waits for the loader, twice as long as was expected."""
    for _ in range(2):
        seconds = 2 * COUNT / chosen._expected
        chosen.end(COUNT, seconds, 0.9 * seconds)
        chosen.begin(0)


def test_another_decision_when_the_rates_have_changed(measured: Callable[[Measured], list[int]]) -> None:
    calls = measured(rates(storage={8: 1e5}, deterministic=0.0, whole=0.001))
    chosen = auto.AutoCache(Numbers(COUNT, [squared, shaken]), 1 << 22, 2)
    chosen.begin(0)
    assert chosen.cached is None  # storage is faster than prep
    measured(rates(storage={8: 20.0}, whole=0.001, deterministic=0.0))
    slow_epochs(chosen)
    assert len(calls) == 2
    assert chosen.cached is not None
    assert "the rates have changed" in chosen.decision
    slow = chosen.cached.cache.name
    chosen.end(COUNT, 2.0, 0.1)
    chosen.begin(0)
    assert len(calls) == 2  # as expected now
    assert chosen.cached.cache.name == slow
    chosen.close()


def test_what_the_second_epoch_gave_is_what_is_expected(measured: Callable[[Measured], list[int]]) -> None:
    calls = measured(rates(storage={8: 1e5}, deterministic=0.0, whole=0.001))
    chosen = auto.AutoCache(Numbers(COUNT, [squared, shaken]), 1 << 22, 2)
    chosen.begin(0)
    seconds = COUNT / chosen._expected
    for slower, wanted in ((1.0, 1), (1.4, 1), (2.0, 1), (2.2, 2)):  # of the model; 2.1 would be 1.5 times the second
        chosen.end(COUNT, slower * seconds, 0.9 * slower * seconds)
        chosen.begin(0)
        assert len(calls) == wanted
    chosen.close()


def test_short_epochs_are_not_worth_another_measurement(
    measured: Callable[[Measured], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_SHORT", 1.0)
    calls = measured(rates(storage={8: 1e5}, deterministic=0.0, whole=0.001))
    chosen = auto.AutoCache(Numbers(COUNT, [squared, shaken]), 1 << 22, 2)
    chosen.begin(0)
    for seconds, wanted in ((0.02, 1), (0.02, 1), (0.9, 1), (0.9, 1), (1.1, 2)):
        chosen.end(COUNT, seconds, 0.9 * seconds)
        chosen.begin(0)
        assert len(calls) == wanted
    chosen.close()


def test_a_decision_stays_while_another_process_goes_by_it(measured: Callable[[Measured], list[int]]) -> None:
    calls = measured(rates(storage={8: 1e5}, deterministic=0.0, whole=0.001))
    chosen = auto.AutoCache(Numbers(COUNT, [squared, shaken]), 1 << 22, 2)
    chosen.begin(0)
    assert chosen._folder is not None
    other = SharedFolder(chosen._folder.path.name, initialize=lambda folder: pytest.fail("it is there"))
    measured(rates(storage={8: 20.0}, whole=0.001, deterministic=0.0))
    slow_epochs(chosen)
    assert len(calls) == 1
    assert chosen.cached is None
    chosen.close()
    other.close()


def test_a_data_set_that_augments_by_itself_goes_on_without_a_cache() -> None:
    class Augmented:
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, id: int) -> tuple[float, int]:
            return random.random(), id

    with sf.DataLoader(Augmented(), 8, num_workers=0, cache="auto", capacity=ROOM) as loader:
        seen = Counter(int(label) for _ in range(2) for _, labels in loader for label in labels)
        assert seen == dict.fromkeys(range(COUNT), 2)
        assert loader.cached is None
        assert "drew random numbers" in loader.decision


class Files:
    """Reads and augments in one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for id in range(COUNT):
            (folder / str(id)).write_bytes(bytes([id]) * 1000)
        self.augment = shifted

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> tuple[np.ndarray[Any, Any], int]:
        return self.augment(np.frombuffer((self.folder / str(id)).read_bytes(), np.uint8)), id


def shifted(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return numbers[:8] + random.random()


def test_a_measurement_of_files_leaves_no_trace_in_the_generators(tmp_path: Path) -> None:
    before = random.getstate()
    chosen = auto.AutoCache(Files(tmp_path), 1 << 22, 0)
    chosen.begin(0)
    assert random.getstate() == before
    assert "drew random numbers" in chosen.decision or "names" in chosen.decision
    chosen.close()


def test_a_share_of_the_free_memory_is_that_of_the_process_that_decides(
    measured: Callable[[Measured], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(rates())
    free = iter([8 << 20, 1 << 20])
    monkeypatch.setattr(limits, "grantable_memory", lambda root: next(free))
    source = Numbers(COUNT, [squared, shaken])
    with (
        sf.DataLoader(source, 8, cache="auto", num_workers=0) as first,
        sf.DataLoader(source, 8, cache="auto", num_workers=0) as second,
    ):
        epochs(first, 1)
        epochs(second, 1)
        assert first.cached.cache.path == second.cached.cache.path
        assert first.cached.cache.capacity == pytest.approx(4 << 20, rel=0.1)


def test_memory_that_caches_may_still_fill_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1000 << 20
    monkeypatch.setattr(limits, "free_memory", lambda: free)
    monkeypatch.setattr(limits, "free_space", lambda folder: 2 * free)
    assert limits.grantable_memory(default_root()) == free
    with sf.CachedDataset(Numbers(COUNT, size=200_000), capacity="600MiB"):  # of which 64 MiB are allocated
        assert limits.grantable_memory(default_root()) == pytest.approx(464 << 20, rel=0.05)
    assert limits.grantable_memory(default_root()) == free


class Held:
    """Keeps its file open."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"".join(bytes([id]) * 100 for id in range(COUNT)))
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> tuple[float, int]:
        self.file.seek(100 * id)
        return self.file.read(100)[50] + random.random(), id


def test_workers_are_not_chosen_for_a_data_set_that_holds_an_open_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = Held(tmp_path / "file")
    with data.file, sf.DataLoader(data, 8, cache="auto", capacity=ROOM, persistent_workers=True) as loader:
        for values, ids in loader:
            assert values.int().tolist() == ids.tolist()
        assert loader.num_workers == 0
        assert "no workers, as they would share file of type _io.FileIO" in capfd.readouterr().err


@pytest.mark.parametrize("error", [CapacityError("no room"), StorageError("full")])
def test_without_room_there_is_no_cache(
    measured: Callable[[Measured], list[int]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    measured(rates())
    monkeypatch.setattr(auto, "CachedDataset", refuse)
    with sf.DataLoader(Numbers(COUNT, [squared]), 8, cache="auto", capacity=ROOM, num_workers=0) as loader:
        assert sorted(epochs(loader, 1)[0]) == list(range(COUNT))
        assert loader.decision == f"no cache; 0 workers; {text_of(error)}"


def test_a_resume_in_mid_epoch_gives_what_was_left() -> None:
    def make() -> Any:
        source = Numbers(COUNT, [squared, shaken])
        return sf.DataLoader(source, 8, shuffle=True, num_workers=0, cache="auto", capacity=ROOM, seed=5)

    with make() as loader:
        iterator = iter(loader)
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [labels.tolist() for _, labels in iterator]
    with make() as loader:
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": "1GiB"}, "give cache='auto', or leave them out"),
        ({"cache": "memory", "capacity": "1GiB"}, "give cache='auto', or leave them out"),
        ({"transform": str}, "give cache='auto', or leave them out"),
        ({"cache": "auto", "transform": 3}, "transform=3 cannot be called"),
        ({"cache": "auto", "capacity": "0%"}, "share above 0%"),
        ({"cache": "auto", "capacity": "120%"}, "a share is 0% to 100%"),
        ({"cache": "auto", "capacity": "much"}, "is no size"),
        ({"cache": "auto", "capacity": "1GiB", "sampler": sf.ImportanceSampler(12)}, "give it a CachedDataset"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.InputError, match=message):
        sf.DataLoader(Numbers(), 4, **options)


def test_a_data_set_with_a_cache_of_its_own_is_refused() -> None:
    with (
        sf.CachedDataset(Numbers(), capacity=ROOM) as data,
        pytest.raises(sf.InputError, match="which has a cache"),
    ):
        sf.DataLoader(data, 4, cache="auto", capacity=ROOM)


def test_an_importance_sampler_wants_one_form() -> None:
    with sf.CachedDataset(Numbers(12, [squared, shaken]), capacity=ROOM, form=0.5, policy="importance") as data:
        sampler = sf.ImportanceSampler(12, cache=data.cache)
        with pytest.raises(sf.InputError, match="one form"):
            sf.DataLoader(data, 4, sampler=sampler)


def test_a_loader_that_is_not_closed_leaves_nothing_behind() -> None:
    loader = sf.DataLoader(Numbers(COUNT, [squared, shaken]), 8, num_workers=0, cache="auto", capacity=ROOM)
    epochs(loader, 1)
    assert list(default_root().glob("auto-*"))
    del loader
    assert not list(default_root().glob("auto-*"))


def test_a_measurement_that_fails_later_leaves_the_cache_as_it_is(measured: Callable[[Measured], list[int]]) -> None:
    measured(rates())
    source = Given([np.full(8, id) for id in range(COUNT)], [shaken])
    chosen = auto.AutoCache(source, 1 << 22, 2)
    reader = chosen.begin(0)
    source.records[:] = [OSError("gone")] * COUNT
    slow_epochs(chosen)
    assert chosen.begin(0) is reader
    chosen.close()


class Raw:
    """A source of the user's own, whose fetches raise what they raise."""

    pipeline = sf.Compose([])

    def __len__(self) -> int:
        return COUNT

    def fetch(self, id: int) -> int:
        if id > 0:
            raise OSError("bad sector")
        return id

    def __getitem__(self, id: int) -> int:
        return self.fetch(id)

    def where(self, id: int) -> str:
        return f"sector {id}"

    def fingerprint(self) -> str:
        return "Raw"


def test_a_source_of_the_user_that_fails_is_heard_of_with_the_sample() -> None:
    with (
        sf.DataLoader(Raw(), 8, cache="auto", capacity=ROOM, num_workers=0) as loader,
        pytest.raises(OSError, match=r"bad sector\n.*sample \d+ \(sector \d+\)"),
    ):
        list(loader)
