"""Wrong values of public arguments: one clear error of stallfree's, which names the value, and nothing left behind."""

import math
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from cached_data import Plain
from stream_data import Drawn

GIVEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "cached": (sf.CachedDataset, {"dataset": Plain(8), "capacity": "1MiB"}),
    "windowed": (sf.SmartCacheDataset, {"data": Plain(8), "cache_num": 4}),
    "loaded": (lambda **given: [*iter(sf.DataLoader(**given))], {"dataset": Plain(8)}),
    "shared": (sf.SharedLoader, {"dataset": Plain(8), "group": "messages", "batch_size": 2}),
    "tiered": (sf.DiskTier, {"folder": "messages", "capacity": "1MiB"}),
    "sampler": (sf.ImportanceSampler, {"num_samples": 8}),
    "replayed": (sf.replay, {"trace_or_plans": [0, 1, 0], "policy": "lru", "capacity": 1}),
    "servers": (sf.RedisStore, {"hosts": [{"host": "localhost", "port": 1}], "capacity_per_node": "1MiB"}),
    "analyzed": (partial(sf.analyze, step=print, batch_size=2, num_workers=0, progress=False), {"dataset": Plain(8)}),
    "prefetched": (sf.DevicePrefetcher, {"loader": [], "device": "cpu"}),
    "produced": (sf.ProcessPrefetcher, {"make_loader": list, "device": "cpu"}),
    "throttled": (sf.testing.ThrottledSource, {"source": [b"x"]}), "cropped": (sf.DecodeRandomResizedCrop, {"size": 8}),
    "normalized": (sf.vision.Normalize, {}),
}  # fmt: skip
"""What is made, and with which arguments, of which the tests change one."""


def make(kind: str, **changed: Any) -> Any:
    function, given = GIVEN[kind]
    return function(**given | changed)


WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("cached.capacity tiered.capacity shared.staging", ("much", -1, 1.5, math.nan, True, [])),
    ("replayed.capacity", (None, "much", 0, -1, 1.5, "0%", "101%", True)),
    ("cached.policy replayed.policy", (None, "", 5, [], {})),
    ("cached.store tiered.folder", (None, "", 5, True, [], b"/tmp", "a\0b", "redis://a:6379", "rediss://a:6379/0")),
    ("cached.store", (Path("redis://a"), "localhost:6379")),
    ("cached.form", (None, "raw", -1, 1.5, math.nan, True, [])),
    ("cached.name shared.group", ("", 5, True, [], "a/b", "a\0b")),
    ("cached.seed windowed.seed loaded.seed sampler.seed", ("1", 1.5, math.nan, True, [])),
    ("windowed.cache_num loaded.batch_size shared.batch_size", ("2", 0, -1, 1.5, math.nan, True, [])),
    ("sampler.num_samples sampler.max_age replayed.batch_size", ("2", 0, -1, 1.5, math.nan, True)),
    ("loaded.prefetch_factor prefetched.depth", ("2", 0, -1, 1.5, True)),
    ("loaded.num_workers shared.num_workers", ("2", -1, 1.5, math.nan, True, [], "")),
    ("shared.num_workers sampler.target_io", (0,)),
    ("windowed.replace_rate sampler.target_io", ("1", -1, -0.1, 1.1, 2, math.nan, True)),
    ("servers.timeout analyzed.seconds sampler.benefit", ("1", 0, -1, math.nan, math.inf, True)),
    ("throttled.bandwidth throttled.iops", ("1", "60MB", 0, math.inf)),
    ("loaded.timeout throttled.latency", ("1", -1, math.nan, math.inf, True)),
    ("produced.timeout", ("1", 0, -1, math.nan, True)),
    ("windowed.hosts", (5, "ab", (0,), (2, 2), (0, 1, 2), (0.0, 2), (-1, 2))),
    ("windowed.on_late sampler.plan loaded.on_error shared.on_error", (None, "best", "ignore", "never", 0, 1, 5, [])),
    ("windowed.multiprocessing_context shared.multiprocessing_context", (5, "thread", [])),
    ("loaded.sampler loaded.batch_sampler", (5, 1.5, True, list, dict, object())),
    ("loaded.collate_fn loaded.worker_init_fn loaded.generator", (5, "f", "default", [], {})),
    ("prefetched.transform_on_device shared.job_transform analyzed.step", (3, 5, "f", [])),
    ("produced.make_loader analyzed.step", (None, [1])), ("sampler.cache", ("cache", 5, Plain(8))),
    ("analyzed.device prefetched.device", (5.5, "gpu", [])), ("produced.device", ("gpu", "meta")),
    ("cropped.size", (None, 2.5, 0, (1, 2, 3))), ("cropped.scale cropped.ratio", ((1.0, 0.5), (0.5, math.inf))),
    ("cropped.flip", (1.5, -0.1, "1")), ("normalized.mean", ((1, 1),)), ("normalized.std", ((1, 1, 0),)),
    ("normalized.dtype normalized.layout", ("uint8", "NHWC")),
    ("cached.capacity tiered.capacity windowed.replace_rate loaded.timeout shared.group shared.batch_size", (None,)),
    ("sampler.num_samples sampler.target_io sampler.max_age replayed.batch_size prefetched.depth", (None,)),
    ("servers.timeout analyzed.seconds produced.timeout", (None,)),
]  # fmt: skip
"""The places, each an object and its argument, and the values that are wrong there."""

PLACES = [(place, value) for places, values in WRONG for place in places.split() for value in values]


@pytest.mark.parametrize(("place", "value"), PLACES)
def test_the_message_names_the_value(place: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, name = place.split(".")
    with pytest.raises(sf.StallfreeError) as caught:
        make(kind, **{name: value})
    said = str(caught.value)
    assert str(value) in said or repr(value) in said or f"'{value!s}" in said, said
    assert len(said) < 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["cached", "windowed", "shared", "analyzed"])
@pytest.mark.parametrize(("dataset", "said"), [
    (None, "NoneType"), (5, "int"), (Plain, "Plain is a class"), (Plain(0), "length 0"), ([], "length 0"),
    ("/data/train", r"'/data/train' is of type str: give a data set.*ImageFolder"),
    (Path("/data/train"), "is of type PosixPath: give a data set"), (b"abc", "is of type bytes: give a data set"),
    (iter([1]), "iterator"), (Drawn(), "Drawn is an IterableDataset"),
])  # fmt: skip
def test_what_is_no_data_set(kind: str, dataset: Any, said: str) -> None:
    with pytest.raises(sf.InputError, match=said):
        make(kind, **{"data" if kind == "windowed" else "dataset": dataset})


def closed() -> Any:
    with sf.CachedDataset(DATA, capacity="1MiB") as cached:
        return cached


DATA: Any = [1, 2, 3]
CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: sf.mark_random(None), r"None cannot be marked: give a transform"),
    (lambda: sf.PrometheusCollector({}), r"metrics=\{\}: give Metrics"),  # type: ignore[arg-type]
    (lambda: sf.DevicePrefetcher(3, "cpu"), r"the loader is a int, which cannot be iterated: give"),  # type: ignore
    (lambda: sf.ProcessPrefetcher(lambda: [1], "cpu"), r"cannot be sent.*Define it at the top level of a module"),
    (lambda: sf.vision.DecodeResizeCenterCrop(8, 7), r"resize=.*give at least the longer side of size"),
    (lambda: sf.TensorBoardHook(""), r"TensorBoardHook\(''\): give the path of a folder"),
    (lambda: sf.Report.load(5), r"5 cannot be read as a report"),  # type: ignore[arg-type]
    (lambda: sf.clara.load(None), r"config=None: give the path of a configuration"),  # type: ignore[arg-type]
    (lambda: sf.ImageFolder(".", extensions=5), r"extensions=5: give endings"),  # type: ignore[arg-type]
    (lambda: sf.TarDataset("a.tar", index=5), r"index=5: give the path of a folder"),  # type: ignore[arg-type]
    (lambda: sf.TarDataset("a.tar", keys=5), r"keys=5: give a tuple of extensions"),  # type: ignore[arg-type]
    (lambda: sf.FileDataset(["a", ""]), r"path '' names no file: give one"),
    (lambda: make("loaded", batch_sampler=[1, 2]), r"the sampler gave 1: ids of samples must be integers, in a list"),
    (lambda: make("sampler").update([1], 0.5), r"losses of shape \(\).*one loss for each"),
    (lambda: make("sampler").batches(0, 0), r"batch_size=0: give a whole number, 1 or more"),
    (lambda: make("sampler").expected_samples(-1), r"epochs=-1: give a whole number, 0 or more"),
    (lambda: sf.DataLoader(Plain(8)).set_epoch(-1), r"epoch=-1: give a whole number, 0 or more"),
    (partial(sf.DataLoader(DATA).load_state_dict, {}), r"version None, .*: give what state_dict\(\) of this"),
    (lambda: list(sf.DataLoader(closed(), 2)), "is closed"),
    (lambda: [*sf.DataLoader(DATA, num_workers=1, collate_fn=lambda x: x, multiprocessing_context="spawn")], "sent"),
    (lambda: sf.DataLoader(DATA, cache="auto", capacity="no size"), "'no size' is no size"),
    (lambda: sf.CachedDataset(DATA, capacity="900TiB"), "900"),
    (lambda: sf.CachedDataset(DATA, capacity="1MiB", store=sf.DiskTier("/proc/none", capacity="1MiB")), "/proc/none"),
    (lambda: sf.TarDataset("/proc/version"), "/proc/version"),
    (lambda: sf.cut(DATA, "transform"), "transform"),
]


@pytest.mark.parametrize(("call", "said"), CALLS)
def test_calls_that_cannot_be_done_and_their_short_tracebacks(call: Callable[[], object], said: str) -> None:
    with pytest.raises(sf.StallfreeError, match=said) as caught:
        call()
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 6


def test_closed_objects_say_so_and_a_value_that_cannot_be_made_is_not_kept() -> None:
    dataset, window, values = make("cached"), make("windowed"), sf.CacheLoader(capacity="1MiB", name="messages")
    with pytest.raises(sf.InputError, match=r"load=None cannot be called"):
        values.get("key", None)  # type: ignore[arg-type]
    assert "key" not in values
    dataset.close(), window.close(), values.close()
    for use in (dataset.__getitem__, window.__getitem__, partial(values.get, load=len)):
        with pytest.raises(sf.InputError, match=r"is closed: make a new one"):
            use(0)
