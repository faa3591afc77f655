"""Analysing jobs: what is measured, and what cannot be."""

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import stallfree as sf
from cached_data import Given, Numbers
from stallfree import InputError
from stallfree.analysis import analyze as analyzing
from stallfree.analysis.analyze import Analysis
from stallfree.analysis.jobs import CyclingSampler, Job, drop_pages, read_files, resident_share
from stallfree.analysis.render import progress_bar
from stallfree.cli import app


class Files(torch.utils.data.Dataset[Any]):
    """A plain data set that reads a file per sample."""

    def __init__(self, folder: Path, count: int = 48) -> None:
        self.paths = [folder / f"{id}.bin" for id in range(count)]
        for id, path in enumerate(self.paths):
            path.write_bytes(bytes([id]) * 20_000)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, id: int) -> Any:
        return torch.frombuffer(bytearray(self.paths[id].read_bytes()), dtype=torch.uint8), id


def quick(dataset: Any, step: Any = len, **arguments: Any) -> sf.Report:
    given = {"batch_size": 4, "num_workers": 1, "seconds": 0.1, "progress": False, **arguments}
    return sf.analyze(dataset, step, **given)


def values(data: dict[str, Any]) -> dict[str, Any]:
    """The rates by name."""
    return {name: rate["value"] for name, rate in data["rates"].items()}


def test_a_source_behind_slow_storage() -> None:
    def step(batch: Any) -> None:
        assert torch.equal(batch[0], batch[1][:, None].repeat(1, 1250))
        assert len(batch[0]) == 2

    with_limit = sf.testing.ThrottledSource(Numbers(24, size=1250), bandwidth="500KB/s")  # 50 samples/s
    data = quick(with_limit, step, seconds=0.2, batch_size=2, num_workers=0).data  # a busy machine delays workers
    rates = values(data)
    assert rates["S"] < 1.5 * 50 < min(rates["P"], rates["G"], rates["C"])
    assert rates["F"] == pytest.approx(rates["S"])
    assert (data["job"]["sample_bytes"], data["job"]["loader"]) == (10_000, "stallfree")
    assert data["shares"]["cold"]["fetch_stall"] > 0.5
    assert "no local files" in data["notes"][0]


def test_a_cached_data_set_is_analysed_with_its_cache() -> None:
    with sf.CachedDataset(Numbers(200, size=1250), capacity=1_000_000, form="fetched") as cached:
        before, report = cached.stats(), quick(cached)
        assert cached.stats() == before  # the user's cache was not touched
        assert report.data["job"]["cache_share"] * 200 == pytest.approx(95, abs=5)
        with pytest.raises(InputError, match="has a cache; leave `cache` out"):
            quick(cached, cache="50%")


def test_a_plain_data_set_runs_under_torchs_loader(tmp_path: Path) -> None:
    report = quick(Files(tmp_path), cache="50%")
    job, rates = report.data["job"], values(report.data)
    assert (job["loader"], job["sample_bytes"], job["cache_share"]) == ("torch", 20_000, 0.5)
    assert min(rates[name] for name in "GPSCF") > 0
    assert report.predict(storage="20MB/s").F == pytest.approx(1 / (0.5 / rates["C"] + 0.5 / 1000))


class Augmented(Files):
    """Reads a file, and changes it at random, which takes some time."""

    def __getitem__(self, id: int) -> Any:
        data = np.frombuffer(self.paths[id].read_bytes(), np.uint8)
        time.sleep(0.05)
        return data[:100] + np.uint8(random.randrange(3)), id


def negative(sample: Any) -> Any:
    return -sample[0].astype(np.int16), sample[1]


def test_a_cache_of_files_is_analysed_with_files_in_memory(tmp_path: Path) -> None:
    """P needs no storage, S is what files give, and a worker does one after the other."""

    def step(batch: Any) -> None:
        assert batch[0].max() <= 0

    with sf.CachedDataset(Augmented(tmp_path, 8), capacity="1MiB", form="files", transform=negative) as cached:
        before = cached.stats()
        report = quick(cached, step, batch_size=2)
        assert cached.stats() == before
    rates = values(report.data)
    assert rates["P"] == rates["P_hit"] < 20 < min(rates["S"], rates["C"])
    assert (report.data["job"]["sample_bytes"], report.data["job"]["cache_share"]) == (20_000, 1)
    slow = report.predict(storage="200KB/s", cache=0)
    assert slow.F == pytest.approx(10)
    # in turn, and not at once, which would give min(F, P); other limits, such as the CPUs, may be lower still
    assert slow.throughput <= 1.001 / (1 / 10 + 1 / slow.P)


def busy_for(seconds: float) -> Callable[[Any], Any]:
    """Work that takes so much CPU time, and changes nothing."""

    def work(record: Any) -> Any:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return record

    return work


@sf.mark_deterministic
class Busy(sf.testing.ThrottledSource):
    """Fetches that take 2 ms of CPU time each."""

    def fetch(self, id: int) -> Any:
        return busy_for(0.002)(super().fetch(id))


def test_a_miss_costs_the_prep_and_the_cpu_time_of_the_fetch() -> None:
    rates = values(quick(Busy(Numbers(24, [sf.mark_random(busy_for(0.004))])), seconds=0.3, num_workers=0).data)
    assert 1 / rates["P_miss"] - 1 / rates["P"] == pytest.approx(0.002, rel=0.2)


def test_a_plain_data_set_without_files_says_what_it_cannot_know() -> None:
    report = quick([{"x": torch.ones(5), "n": {"y": [id, id]}} for id in range(16)], num_workers=0)
    rates = values(report.data)
    assert (rates["G"] > 0, rates["S"]) == (True, None)
    assert any("no file was seen" in note for note in report.data["notes"])
    assert "not measured" in str(report)


UNREADABLE = Given([OSError("the disk is gone")] * 9)
NAMED = r"fetching sample \d+.* failed: OSError: the disk is gone"
BAD: list[tuple[Any, Any, dict[str, Any], str]] = [
    (range(3), len, {}, "batch_size=4: the data set has 3 samples"),
    (range(9), torch.inverse, {}, r"step\(batch\) failed: RuntimeError: .* with tensors of \(4,\) int64"),
    (range(9), len, {"batch_size": None}, "batch_size=None"),
    (range(9), len, {"workers": 3}, "making the loader failed: .*'workers'"),
    ([[1] * (1 + id) for id in range(9)], len, {}, "making a batch failed: RuntimeError: "),
    (UNREADABLE, len, {}, NAMED), (torch.utils.data.ConcatDataset([UNREADABLE]), len, {}, NAMED),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "step", "arguments", "message"), BAD)
def test_bad_jobs(dataset: Any, step: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quick(dataset, step, **{"num_workers": 0, **arguments})


JOB = """
import torch
build = lambda: (torch.arange(64).view(16, 4), {"batch_size": 4, "num_workers": 1}, lambda batch: batch.sum())
raises = lambda: {}["which"]
wrong = lambda: [1]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `my_job.py` and a file that is no Python."""
    (tmp_path / "my_job.py").write_text(JOB)
    (tmp_path / "broken.py").write_text("def build(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_job", raising=False)
    return tmp_path


def run(command: str) -> str:
    return CliRunner().invoke(app, command.split(), catch_exceptions=False).output


def test_the_commands_end_to_end(folder: Path) -> None:
    out = run("analyze my_job.py:build --seconds 0.1 --json r.json --html r.html")
    report = sf.Report.load(folder / "r.json")
    assert out.startswith(str(report).split("\n")[0])
    assert "stallfree predict r.json" in out
    assert (folder / "r.html").read_text().lower().startswith("<!doctype html>")
    told = run("predict r.json --cache 50% --cpus 24 --devices 8 --jobs 8")
    assert told.strip() == str(report.predict(cache="50%", cpus=24, devices=8, jobs=8))


@pytest.mark.parametrize(("command", "message"), [
    ("predict absent.json", "absent.json cannot be read as a report"),
    ("analyze my_job.py:raises", "my_job.py:raises failed: KeyError: 'which'"),
    ("analyze my_job.py:wrong", r"return \(dataset, loader_arguments, step\)"),
    ("analyze absent.py:build", "no function 'absent.py:build': give a file or a module"),
    ("analyze broken.py:build", "broken.py:build failed: SyntaxError"),
    ("analyze my_job.py:build --json no/folder/r.json", "no/folder/r.json cannot be written"),
    ("analyze my_job.py:build --cache 101%", "cache='101%'"),
])  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_the_command_refuses(command: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(command)


class Timed(Analysis):
    """An analysis of a real job whose rates are given."""

    def round(self) -> None:
        rates = {"G": 5000.0, "P": 400.0, "P_miss": 400.0, "P_hit": 400.0, "S": 3000.0, "C": 5e4, "cold": 400.0}
        self._measured, self._machine = [{**rates, "warm": 400.0, "copy": None}] * 3, [1.0]


@pytest.mark.parametrize("parted", [True, False])
def test_a_job_bound_by_prep_is_advised_the_automatic_cache_first(parted: bool) -> None:
    source = Numbers(64, [sf.mark_deterministic(busy_for(0.002))], size=50)
    data = source if parted else torch.utils.data.Subset(source, range(64))
    with closing(Timed(Job(data, len, 4, 1, None, {}), 1.0, progress_bar(False))) as analysis:
        analysis.round()
        report = analysis.report()
    first, *_, last = report.data["advice"]
    assert report.data["bottleneck"].startswith("Prep is the limit")
    assert first["do"].startswith("Use sf.DataLoader(dataset, 4, cache='auto', capacity=")
    assert first["gain"] > 3
    assert first["memory_bytes"] > 64 * 400
    assert any("cache='auto' keeps all 64 samples" in note for note in report.data["notes"])
    assert last["do"].startswith("Take twice as many CPUs")


def test_prep_that_can_run_in_two_places_is_measured_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is the CPU here."""
    monkeypatch.setattr(analyzing, "can_decode", lambda device: True)
    (tmp_path / "a").mkdir()
    for number in range(12):
        Image.new("RGB", (50, 40)).save(tmp_path / "a" / f"{number}.jpg")
    seen = set[Any]()

    def step(batch: Any) -> None:
        seen.add((type(batch[0].to("cpu")), tuple(batch[0].to("cpu").shape)))

    data = sf.ImageFolder(tmp_path, sf.DecodeRandomResizedCrop(8, on_device=True))
    placement = quick(data, step).data["placement"]
    assert placement["on_device"]
    assert placement["CPUs"] > 0 < placement["device"]
    assert seen == {(torch.Tensor, (4, 8, 8, 3))}


def test_files_are_dropped_from_memory_and_read_again(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.bin") for number in range(4)]
    for path in paths:
        Path(path).write_bytes(os.urandom(50_000))
    empty = tmp_path / "empty"
    empty.touch()
    assert resident_share(paths) == 1.0
    drop_pages([*paths, str(tmp_path / "missing")])
    if resident_share(paths) == 1.0:
        pytest.skip("temporary files lie in a file system in memory")
    assert resident_share(paths) == 0.0
    read_files([paths[0], str(tmp_path / "missing")])
    assert resident_share(paths) == pytest.approx(0.25)
    assert resident_share([str(tmp_path / "missing"), str(empty)]) is None
    sampler = CyclingSampler([0], lambda id: [paths[id]])
    assert next(iter(sampler)) == 0
    assert sampler.resident == [resident_share(paths)] == [0.0]
