"""Wrong values of public arguments: one clear error of stallfree's, which names the value, and nothing left behind."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf


class Data:
    """A few samples that are always the same."""

    def __init__(self, count: int = 8, values: int = 4) -> None:
        self._count, self._values = count, values

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, id: int) -> torch.Tensor:
        if id >= self._count:
            raise IndexError(id)
        return torch.full((self._values,), id)


class Endless(torch.utils.data.IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def cached(**changed: Any) -> sf.CachedDataset:
    return sf.CachedDataset(**{"dataset": Data(), "capacity": "1MiB", **changed})


def windowed(**changed: Any) -> sf.SmartCacheDataset:
    return sf.SmartCacheDataset(**{"data": Data(), "cache_num": 4, **changed})


def loaded(**changed: Any) -> list[Any]:
    with sf.DataLoader(**{"dataset": Data(), **changed}) as loader:
        return list(loader)


def shared(**changed: Any) -> sf.SharedLoader:
    return sf.SharedLoader(**{"dataset": Data(), "group": "messages", "batch_size": 2, **changed})


def tiered(**changed: Any) -> sf.DiskTier:
    return sf.DiskTier(**{"folder": "messages", "capacity": "1MiB", **changed})


def sampler(**changed: Any) -> sf.ImportanceSampler:
    return sf.ImportanceSampler(**{"num_samples": 8, **changed})


def replayed(**changed: Any) -> sf.Replay:
    return sf.replay(**{"trace_or_plans": [0, 1, 0], "policy": "lru", "capacity": 1, **changed})


def servers(**changed: Any) -> sf.RedisStore:
    return sf.RedisStore(**{"hosts": [{"host": "localhost", "port": 1}], "capacity_per_node": "1MiB", **changed})


def analyzed(**changed: Any) -> sf.Report:
    given = {"dataset": Data(), "step": print, "batch_size": 2, "num_workers": 0, "progress": False}
    return sf.analyze(**{**given, **changed})


WRONG: list[tuple[Callable[..., object], str, tuple[Any, ...]]] = [
    (cached, "capacity", (None, "much", -1, 1.5, math.nan, True, [])),
    (cached, "policy", (None, "", 5, [], {})),
    (cached, "store", (None, "", 5, True, [], b"/tmp", "a\0b")),
    (cached, "form", (None, "raw", -1, 1.5, math.nan, True, [])),
    (cached, "name", ("", 5, True, [], "a/b", "a\0b")),
    (cached, "seed", ("1", 1.5, math.nan, True, [])),
    (windowed, "cache_num", ("4", 0, -1, 1.5, True, [])),
    (windowed, "replace_rate", (None, "0.1", -0.1, 1.1, math.nan, True)),
    (windowed, "seed", (1.5, "1")),
    (windowed, "hosts", (5, "ab", (0,), (2, 2), (0, 1, 2), (0.0, 2), (-1, 2))),
    (windowed, "on_late", (None, "never", 0, [])),
    (windowed, "multiprocessing_context", (5, "thread", [])),
    (loaded, "num_workers", ("2", -1, 1.5, math.nan, True, [], "")),
    (loaded, "batch_size", ("2", 0, -1, 1.5, math.nan, True, [])),
    (loaded, "timeout", (None, "1", -1, math.nan, math.inf, True)),
    (loaded, "sampler", (5, True, list, object())),
    (loaded, "batch_sampler", (5, 1.5, dict, object())),
    (loaded, "collate_fn", (5, "default", [], {})),
    (loaded, "worker_init_fn", (5, "f", [])),
    (loaded, "generator", (5, "g", [])),
    (loaded, "seed", ("1", 1.5, math.nan, True, [])),
    (loaded, "prefetch_factor", (0, -1, 1.5, "2", True)),
    (loaded, "on_error", (None, "ignore", 1)),
    (cached, "store", ("redis://localhost:6379", "rediss://cache:6379/0", Path("redis://a"), "localhost:6379")),
    (tiered, "folder", (None, "", 5, [], b"/tmp", "a\0b", "redis://localhost:6379")),
    (tiered, "capacity", (None, "much", -1, 1.5, True)),
    (sampler, "num_samples", (None, "8", 0, -1, 1.5, math.nan, True)),
    (sampler, "seed", ("1", 1.5, True)),
    (sampler, "plan", (None, "best", 5, [])),
    (sampler, "target_io", (None, "1", 0, -1, 2, math.nan, True)),
    (sampler, "max_age", (None, "1", 0, 1.5, True)),
    (sampler, "benefit", ("1", 0, -1, math.nan, math.inf, True)),
    (sampler, "cache", ("cache", 5, Data())),
    (replayed, "policy", (None, "", 5, [], {})),
    (replayed, "capacity", (None, "much", 0, -1, 1.5, "0%", "101%", True)),
    (replayed, "batch_size", (None, "2", 0, -1, 1.5, True)),
    (servers, "timeout", (None, "1", 0, -1, math.nan, math.inf, True)),
    (analyzed, "step", (None, 5, "f")),
    (analyzed, "device", (5.5, "gpu", [])),
    (analyzed, "seconds", (None, "1", 0, -1, math.nan, True)),
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        pytest.param(make, name, value, id=f"{make.__name__}-{name}-{value!r:.20}")
        for make, name, values in WRONG
        for value in values
    ],
)
def test_the_message_names_the_value(
    make: Callable[..., object], name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sf.StallfreeError) as caught:
        make(**{name: value})
    said = str(caught.value)
    assert str(value) in said or repr(value) in said or f"'{value!s}" in said, said
    assert len(said) < 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [cached, lambda dataset: windowed(data=dataset), shared, analyzed])
@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (None, "NoneType"),
        (5, "int"),
        (Data, "Data is a class"),
        (Data(0), "length 0"),
        ([], "length 0"),
        ("/data/train", r"'/data/train' is of type str: give a data set.*ImageFolder"),
        (Path("/data/train"), "is of type PosixPath: give a data set"),
        (b"abc", "is of type bytes: give a data set"),
        (iter([1]), "iterator"),
        (Endless(), "Endless is an IterableDataset"),
    ],
)
def test_what_is_no_data_set(make: Callable[..., object], dataset: Any, said: str) -> None:
    with pytest.raises(sf.InputError, match=said):
        make(dataset=dataset)


CALLS: list[tuple[str, Callable[[], object], str]] = [
    ("mark", lambda: sf.mark_random(None), r"None cannot be marked: give a transform"),
    ("prometheus", lambda: sf.PrometheusCollector({}), r"metrics=\{\}: give Metrics"),  # type: ignore[arg-type]
    ("tensorboard", lambda: sf.TensorBoardHook(""), r"TensorBoardHook\(''\): give the path of a folder"),
    ("report", lambda: sf.Report.load(5), r"path=5: give the path of a report"),  # type: ignore[arg-type]
    ("clara", lambda: sf.clara.load(None), r"config=None: give the path of a configuration"),  # type: ignore[arg-type]
    ("extensions", lambda: sf.ImageFolder(".", extensions=5), r"extensions=5: give endings"),  # type: ignore[arg-type]
    ("index", lambda: sf.TarDataset("a.tar", index=5), r"index=5: give the path of a folder"),  # type: ignore[arg-type]
    ("keys", lambda: sf.TarDataset("a.tar", keys=5), r"keys=5: give a tuple of extensions"),  # type: ignore[arg-type]
    ("paths", lambda: sf.FileDataset(["a", ""]), r"path '' names no file: give one"),
    ("ids", lambda: loaded(batch_sampler=[1, 2]), r"the sampler gave 1: ids of samples must be integers, in a list"),
    ("one loss", lambda: sampler().update([1], 0.5), r"losses of shape \(\).*one loss for each"),
    ("batches", lambda: sampler().batches(0, 0), r"batch_size=0: give a whole number, 1 or more"),
    ("expected", lambda: sampler().expected_samples(-1), r"epochs=-1: give a whole number, 0 or more"),
    ("epoch", lambda: sf.DataLoader(Data()).set_epoch(-1), r"epoch=-1: give a whole number, 0 or more"),
    ("state", lambda: sf.DataLoader(Data()).load_state_dict({}), r"version None, .*: give what state_dict\(\) of this"),
]


@pytest.mark.parametrize(("call", "said"), [pytest.param(call, said, id=name) for name, call, said in CALLS])
def test_calls_that_cannot_be_done(call: Callable[[], object], said: str) -> None:
    with pytest.raises(sf.InputError, match=said):
        call()


def test_closed_objects_say_so() -> None:
    dataset, window, values = cached(), windowed(), sf.CacheLoader(capacity="1MiB", name="messages")
    for thing in (dataset, window, values):
        thing.close()
    for use in (lambda: dataset[0], lambda: window[0], lambda: values.get("key", len)):
        with pytest.raises(sf.InputError, match=r"is closed: make a new one"):
            use()


def test_a_value_that_cannot_be_made_is_not_kept() -> None:
    with sf.CacheLoader(capacity="1MiB", name="messages") as values:
        with pytest.raises(sf.InputError, match=r"load=None cannot be called"):
            values.get("key", None)  # type: ignore[arg-type]
        assert "key" not in values
        assert values.get("key", len) == 3


def test_a_name_in_use_by_other_data() -> None:
    with cached(name="messages") as first:
        with pytest.raises(sf.FingerprintError, match=r"'messages' .*: its data set differs from yours.*Give another"):
            cached(name="messages", dataset=Data(values=9))
        assert first[3].tolist() == [3, 3, 3, 3]


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for store in (taken, taken / "below"):
        with pytest.raises(sf.StorageError, match=rf"{re.escape(str(taken))}.*cannot be made: .*Give another folder"):
            cached(store=store)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("taken", "mine")]
