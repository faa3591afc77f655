"""The report of an analysis: the parts of an epoch's time, the bottleneck, and recommendations."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stallfree.analysis.job import Job
from stallfree.analysis.model import Loading, Rates
from stallfree.analysis.placement import Placement
from stallfree.analysis.prediction import Prediction, explain, limits
from stallfree.analysis.setting import WORTH, Setting, Sharing
from stallfree.analysis.stopwatch import ROUNDS_FOR_INTERVAL, Rate, next_half_width
from stallfree.autotune.choice import Choice, Measured, expect
from stallfree.cache.capacity import free_memory
from stallfree.errors import InputError, file_unreadable
from stallfree.ipc.folders import is_path
from stallfree.platform import cpu_count
from stallfree.report.figures import REPORT_KEYS, plural, speed
from stallfree.report.figures import expect as expect_format
from stallfree.report.page import report_page
from stallfree.report.terminal import render_report
from stallfree.units import format_size, parse_rate, parse_room, parse_whole

FORMAT, VERSION = "stallfree-report", 1


class Report:
    """The result of `analyze`.

    Attributes:
        data: the complete content, as written by `save`: plain dicts, lists, numbers and strings.

    Example:
        ```python
        report = sf.Report.load("report.json")  # of: stallfree analyze job.py:build --json report.json
        print(report)
        print(report.predict(storage="500MB/s"))
        ```
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @staticmethod
    def load(path: str | Path) -> Report:
        """Read a file written by `save`.

        Raises `InputError` for other files, and for a report of another version.

        Example:
            ```python
            report = sf.Report.load("report.json")
            assert report.predict().throughput > 0
            ```
        """
        if not is_path(path):
            raise InputError(f"path={path!r:.80}: give the path of a report")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise file_unreadable(
                f"{path} cannot be read as a report: {error}. Give what `stallfree analyze --json` wrote"
            ) from error
        expect_format(data, FORMAT, REPORT_KEYS, str(path))
        return Report(data)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")

    def html(self, path: str | Path) -> None:
        """Write the report as a self-contained HTML page. Raises `MissingExtraError` without the extra "report"."""
        Path(path).write_text(report_page(self.data), encoding="utf-8")

    def __str__(self) -> str:
        return render_report(self.data)

    def __repr__(self) -> str:
        return f"Report({self.data['bottleneck']!r})"

    def predict(
        self,
        *,
        cache: int | str | None = None,
        cpus: int | None = None,
        storage: float | str | None = None,
        devices: int = 1,
        jobs: int = 1,
    ) -> Prediction:
        """Predict the job's speed with another cache, CPUs, storage, devices or number of jobs.

        None: unchanged.

        Args:
            cache: bytes, "4GiB", or a share of the samples such as "50%".
            cpus: cores for prep, with one worker on each: P in proportion.
            storage: its bandwidth, bytes/s or "530MB/s".
            devices: number that share each batch, relative to the measured one: G in proportion.
            jobs: equal jobs on the host, each with its own devices, that share S, C, P and the cache.

        Raises `InputError` for invalid arguments.

        Example:
            ```python
            report = sf.Report.load("report.json")
            for cpus in (4, 8, 16):
                print(cpus, report.predict(cpus=cpus).throughput)
            ```
        """
        cpus = None if cpus is None else parse_whole(cpus, "cpus", 1)
        devices, jobs = parse_whole(devices, "devices", 1), parse_whole(jobs, "jobs", 1)
        bandwidth = None if storage is None else parse_rate(storage, "storage")
        hits = None if cache is None else self.hits_of(cache)
        before = self.setting()
        if bandwidth is not None and not before.sample_bytes:
            raise InputError(
                f"storage={storage!r}: the report does not know how many bytes a sample has, so it cannot say what "
                "another bandwidth gives; analyse a data set that separates fetch from prep, such as sf.FileDataset"
            )

        def changed(now: Setting) -> Setting:
            then = now if hits is None else now.with_hits(hits)
            then = then if cpus is None else then.with_cpus(cpus)
            then = then if bandwidth is None else then.with_storage(bandwidth)
            return then.with_devices(devices).with_jobs(jobs)

        after = changed(before)
        rounds = [changed(self.setting(number)).throughput for number in range(self._rounds())]
        half = next_half_width(rounds) if len(rounds) >= ROUNDS_FOR_INTERVAL else None
        return explain(before, after, devices=devices, storage=bandwidth, half=half)

    def _rounds(self) -> int:
        """The number of complete rounds."""
        measured = [*self.data["rates"].items(), *self.data["runs"].items()]
        counts = [len(found["rounds"]) for name, found in measured if name not in ("F", "copy") and found["value"]]
        return min(counts, default=0)

    def hits_of(self, cache: int | str) -> float:
        """The share of hits with a cache of this size.

        It is the share of the samples that fit. Raises `InputError` for an invalid size.
        """
        given = parse_room(cache, "cache")
        if isinstance(given, float):
            return given
        job = self.data["job"]
        if not job["record_bytes"]:
            raise InputError(f"cache={cache!r}: the size of a sample is not known; give a share such as '50%'")
        return min(1.0, given / (float(job["record_bytes"]) * int(job["samples"])))

    def setting(self, number: int | None = None) -> Setting:
        """The measured job, over all rounds or in round `number`."""
        job, machine = self.data["job"], self.data["machine"]

        def rate(name: str, group: str = "rates") -> float:
            found = self.data[group][name]
            if found["value"] is None:
                return math.inf
            return float(found["value"] if number is None else found["rounds"][number])

        cores = max(1, min(job["num_workers"] or 1, machine["cpus"]))
        missing = 1 / (1 / rate("P") + job["fetch_cpu_seconds"] / cores)
        found = Rates(rate("G"), missing, rate("P_hit"), rate("S"), rate("C"))
        if not job["parted"]:
            found = _apart(found)
        placed = self.data.get("placement")
        placement = None if placed is None else Placement(**placed)
        if placement is not None and placement.on_device:
            found = found.times(1 - placement.takes, "compute")
        overlap = job["loader"] == "stallfree"
        loading = Loading(job["batch_size"], job["num_workers"], job["ahead"], overlap)
        setting = Setting(
            found, loading, job["cache_share"], cores, None, job["sample_bytes"], job["record_bytes"], job["samples"]
        )
        setting = replace(setting, placement=placement)
        runs = [rate(name, "runs") for name in ("cold", "warm")]
        fastest = max((value for value in runs if math.isfinite(value)), default=math.inf)
        return replace(setting, sharing=_sharing(setting, fastest, own_cpu=machine["device"] == "cpu"))


@dataclass(frozen=True)
class Sizes:
    """Mean bytes of a sample as fetched, cached and prepared; None if unknown."""

    sample: float | None
    record: float | None
    prepared: float


@dataclass(frozen=True)
class Remedy:
    """The choice of `DataLoader(cache="auto")` with `room` bytes, and the measurements behind it."""

    measured: Measured
    choice: Choice
    room: int

    @property
    def memory(self) -> float:
        """Bytes of the cached records."""
        share = self.choice.share or 0.0
        parts = zip((1 - share, share), self.measured.sizes, strict=True)
        return self.choice.hits * self.measured.samples * sum(part * size for part, size in parts if part)


def make_report(
    job: Job,
    rates: dict[str, Rate],
    sizes: Sizes,
    fetch_seconds: float,
    cache: int | str | None,
    notes: Sequence[str],
    remedy: Remedy | None = None,
    placement: Placement | None = None,
) -> Report:
    """Create the report of the runs of an analysis; `fetch_seconds` are CPU seconds per fetch."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "stallfree": version("stallfree"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"cpus": cpu_count(), "memory_bytes": free_memory(), "device": str(job.device)},
        "job": _job(job, sizes, fetch_seconds),
        "rates": {name: rates[name].json() for name in ("G", "P", "P_hit", "S", "C", "copy")},
        "runs": {name: rates[name].json() for name in ("cold", "warm")},
        "placement": None if placement is None else placement.json(),
        "notes": [*notes, *(f"{name}: {rate.note}" for name, rate in rates.items() if rate.note and name != "copy")],
    }
    report = Report(data)
    if cache is not None:
        share = report.hits_of(cache)
        data["job"]["cache_share"] = share
        data["job"]["cache_bytes"] = round(share * len(job.source) * (sizes.record or 0))
    setting = report.setting()
    data["rates"]["F"] = _fetch_rate(setting, rates).json()
    data["shares"] = {name: _shares(float(rates[name]), rates, cold=name == "cold") for name in ("cold", "warm")}
    few = {name: rate.more for name, rate in rates.items() if rate.more and name != "copy"}
    data["advice"] = [] if few else _advice(setting, data, remedy)
    data["bottleneck"] = _bottleneck(setting, data)
    if few:
        data["bottleneck"] = (
            f"Too few batches to say what limits: {max(few.values())} more needed for {', '.join(few)}. Give more "
            "`seconds`, or a smaller `batch_size`."
        )
    data["notes"] += _slower_warm(rates["cold"], rates["warm"])
    data["curves"] = _curves(setting)
    if setting.sharing is not None:
        reached = max(float(rates[name]) for name in ("cold", "warm") if rates[name].value is not None)
        data["notes"].append(
            f"the job reaches {reached:,.0f} samples/s where min(P, G) is "
            f"{min(setting.rates.prep_hit, setting.rates.compute):,.0f}: prep, compute and the loader share the CPUs"
        )
    return report


def _job(job: Job, sizes: Sizes, fetch_seconds: float) -> dict[str, Any]:
    """The report's description of the job itself, without a cache."""
    return {
        "dataset": type(job.dataset).__name__,
        "samples": len(job.source),
        "batch_size": job.batch_size,
        "num_workers": job.num_workers,
        "ahead": job.ahead,
        "loader": job.loader,
        "parted": job.parted,
        "form": job.form,
        "device": str(job.device),
        "sample_bytes": sizes.sample,
        "record_bytes": sizes.record,
        "prepared_bytes": sizes.prepared,
        "fetch_cpu_seconds": fetch_seconds,
        "cache_share": 0.0,
        "cache_bytes": 0,
    }


def _apart(rates: Rates) -> Rates:
    """Rates of a data set whose prep includes reading: P from memory contains the read rate C."""
    seconds = max(1e-12, 1 / rates.prep - 1 / rates.cache)
    return Rates(rates.compute, 1 / seconds, 1 / seconds, rates.storage, rates.cache)


def _sharing(setting: Setting, fastest: float, *, own_cpu: bool) -> Sharing | None:
    """How prep, compute and the loader share the CPUs, if the job is slower than each of them alone.

    The CPU time of a sample is that of the job at its fastest. The part that is not prep is the step, if it runs on the
    CPUs instead of a separate device, and the loader.
    """
    alone = setting.with_hits(1.0)
    if not setting.loading.workers or fastest >= 0.99 * alone.limit:
        return None
    whole = 1 / fastest
    if not setting.loading.overlap:
        whole -= 1 / setting.rates.cache
    others = max(0.0, whole - 1 / setting.rates.prep_hit)
    step = min(others, 1 / setting.rates.compute) if own_cpu else 0.0
    return Sharing(step, others - step)


def _fetch_rate(setting: Setting, rates: dict[str, Rate]) -> Rate:
    value = setting.rates.fetch_at(setting.hits)
    storage = rates["S"]
    if not math.isfinite(value):
        return Rate(None, note="storage was not measured by itself")
    if not storage.value or storage.high is None:
        return Rate(value, repeats=storage.repeats, note=storage.note, more=storage.more)
    spread = storage.high / storage.value - 1
    return Rate(value, value * (1 - spread), value * (1 + spread), storage.repeats)


def _shares(rate: float, rates: dict[str, Rate], *, cold: bool) -> dict[str, float]:
    """The parts of a sample's time: what each part adds to the previous one."""
    step = 1 / float(rates["G"])
    copied = step + (1 / float(rates["copy"]) if rates["copy"].value else 0.0)
    warm = max(1 / float(rates["warm"]), step)
    whole = max(1 / rate, warm) if cold else warm
    copy = min(copied, warm) - step
    return {
        "compute": step / whole,
        "copy": copy / whole,
        "prep_stall": (warm - step - copy) / whole,
        "fetch_stall": (whole - warm) / whole,
    }


def _slower_warm(cold: Rate, warm: Rate) -> list[str]:
    """A note, if the job was slower with its data in memory."""
    if cold.value is None or warm.value is None or warm.value >= cold.value:
        return []
    apart = cold.low is not None and warm.high is not None and warm.high < cold.low
    why = (
        "other work on the machine or a change of its speed between the two is likely, so measure again"
        if apart
        else "their intervals overlap, so no fetch stall can be seen"
    )
    return [
        f"the job was slower with all data in memory ({warm.value:,.0f} samples/s) than with cold files "
        f"({cold.value:,.0f}): {why}"
    ]


def _advice(now: Setting, data: dict[str, Any], remedy: Remedy | None) -> list[dict[str, Any]]:
    """The recommendations that gain 2%: first those without other hardware, then the rest, each by gain."""
    found: list[tuple[bool, float, dict[str, Any]]] = []

    def offer(do: str, why: str, then: Setting, *, memory: float = 0.0, hardware: bool = False) -> None:
        gain = now.gain(then)
        if gain > WORTH:
            why += f"; takes {format_size(memory)} of memory" if memory else ""
            item = {"do": do, "why": why, "throughput": then.throughput, "gain": gain, "memory_bytes": round(memory)}
            found.append((hardware, -gain, item))

    if not now.loading.overlap:
        offer(
            "Use stallfree.DataLoader with a source that separates fetch from prep (sf.ImageFolder, sf.FileDataset)",
            "a worker then fetches the next batches while it prepares one: min(F, P, G) in place of their sum",
            replace(now, loading=replace(now.loading, overlap=True)),
        )
    whole = data["job"]["parted"] or remedy is not None  # a random data set of one's own: its files can be cached
    _offer_caches(offer, now, remedy, "" if whole else ", form='files'")
    if now.placement is not None:
        speeds = now.placement.speeds(now.rates.fetch_at(now.hits))
        mine, other = reversed(speeds) if now.placement.on_device else speeds
        place = "the CPUs" if now.placement.on_device else "the device"
        if other / mine > WORTH:
            do = f"Let {place} decode: on_device={not now.placement.on_device} in sf.DecodeRandomResizedCrop"
            why = f"min(F, P, G) is {other:,.0f} there, and {mine:,.0f} where it decodes now"
            item = {"do": do, "why": why, "throughput": other, "gain": other / mine, "memory_bytes": 0}
            found.append((False, -other / mine, item))
    cpus, workers, job = data["machine"]["cpus"], now.loading.workers, data["job"]
    if workers < cpus:
        ahead = now.loading.ahead / max(1, workers) * (cpus - workers)
        offer(
            f"Raise num_workers from {workers} to {cpus}, one for each CPU",
            "each worker prepares on a core of its own",
            now.with_workers(cpus),
            memory=ahead * job["batch_size"] * (job["prepared_bytes"] or 0),
        )
    twice = 2 * max(cpus, now.cpus)
    offer(f"Take twice as many CPUs ({twice})", "P doubles", now.with_cpus(twice), hardware=True)
    if now.sample_bytes and math.isfinite(now.rates.storage):
        bandwidth = now.rates.storage * now.sample_bytes
        offer(
            f"Put the data on storage twice as fast ({speed(2 * bandwidth)})",
            f"S doubles from {now.rates.storage:,.0f}",
            now.with_storage(2 * bandwidth),
            hardware=True,
        )
    why = f"G doubles from {now.rates.compute:,.0f}"
    offer("Use a device twice as fast", why, now.with_devices(2), hardware=True)
    return [item for *_, item in sorted(found, key=lambda one: one[:2])]


def _offer_caches(offer: Callable[..., None], now: Setting, remedy: Remedy | None, form: str) -> None:
    """Offer the choice of `cache="auto"`, and a cache of fetched samples unless it is larger and gains less."""
    auto, taken = now, math.inf
    if remedy is not None and remedy.choice.share is not None:
        choice, taken = remedy.choice, remedy.memory
        nothing = expect(remedy.measured, None, remedy.room, max(1, now.loading.workers))
        auto = now.with_choice(choice, nothing)
        room = format_size(min(remedy.room, 1.05 * taken))
        what = {0.0: "as fetched", 1.0: "prepared"}.get(choice.share or 0.0, "prepared, others as fetched")
        offer(
            f"Use sf.DataLoader(dataset, {now.loading.batch_size}, cache='auto', capacity='{room}')",
            f"{choice.hits:.0%} of the samples are cached {what}: P rises from {now.rates.prep_at(now.hits):,.0f} to "
            f"{auto.rates.prep_at(choice.hits):,.0f}, F from {_f(now)} to {_f(auto)}, with "
            f"{plural(choice.workers, 'worker')}",
            auto,
            memory=taken,
        )
    enough = now.whole_share()
    enough = 1.0 if enough is None else enough
    size = enough * now.samples * (now.record_bytes or 0.0)
    then = now.with_hits(enough)
    if enough > now.hits and not (taken <= size and now.gain(auto) >= now.gain(then)):
        capacity = f"'{format_size(1.05 * size)}'" if size else "..."
        offer(
            f"Cache {enough:.0%} of the samples: sf.CachedDataset(dataset, capacity={capacity}{form})",
            f"F rises from {_f(now)} to {_f(then)}, and P is {then.rates.prep_at(enough):,.0f}",
            then,
            memory=size,
        )


def _bottleneck(now: Setting, data: dict[str, Any]) -> str:
    cold, warm = data["shares"]["cold"], data["shares"]["warm"]
    rates = f"F {_f(now)}, P {data['rates']['P']['value']:,.0f}, G {now.rates.compute:,.0f} samples/s"
    fetch, prep, busy = f"{cold['fetch_stall']:.0%}", f"{warm['prep_stall']:.0%}", f"{cold['compute']:.0%}"
    if len(now.binding) > 1:
        what = limits(now)
        return f"{what[0].upper()}{what[1:]} limit alike: the job gains when both or all of them do ({rates})."
    return {
        "fetch": f"Storage is the limit: with cold files {fetch} of the time is a wait for it ({rates}).",
        "prep": f"Prep is the limit: {prep} of the time is a wait for it, even out of memory ({rates}).",
        "cpu": f"The CPUs are the limit, which prep, compute and the loader share: {prep} is wait ({rates}).",
        "compute": f"The device is the limit, and is fed: it computes {busy} of the time ({rates}).",
    }[now.binding[0]]


def _f(setting: Setting) -> str:
    value = setting.rates.fetch_at(setting.hits)
    return f"{value:,.0f}" if math.isfinite(value) else "not measured"


def _curves(now: Setting) -> dict[str, Any]:
    shares = [round(float(x), 3) for x in np.linspace(0, 1, 21)]
    there = [now.with_hits(x) for x in shares]
    cpus = sorted({1, 2, 4, 8, 16, 32, 64, now.cpus})
    curves: dict[str, Any] = {
        "cache": {
            "x": shares,
            "throughput": [one.throughput for one in there],
            "F": [_finite(one.rates.fetch_at(one.hits)) for one in there],
            "P": [_finite(one.rates.prep_at(one.hits)) for one in there],
            "G": [_finite(one.rates.compute) for one in there],
            "best": now.best_share(),
        },
        "cpus": {"x": cpus, "throughput": [now.with_cpus(count).throughput for count in cpus], "now": now.cpus},
        "storage": {"x": [], "throughput": [], "now": None},
    }
    if now.sample_bytes and math.isfinite(now.rates.storage):
        bandwidth = now.rates.storage * now.sample_bytes
        speeds = [bandwidth * 2 ** (step / 2) for step in range(-6, 13)]
        curves["storage"] = {
            "x": speeds,
            "throughput": [now.with_storage(speed).throughput for speed in speeds],
            "now": bandwidth,
        }
    return curves


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
