"""The report of an analysis: the parts of an epoch's time, the rates, the bottleneck, and recommendations."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

from stallfree import errors
from stallfree.analysis import predict as prediction
from stallfree.analysis import render
from stallfree.analysis.measure import ROUNDS_FOR_INTERVAL, Rate, next_half_width
from stallfree.analysis.model import Option, Rates, Setting
from stallfree.cache.capacity import free_memory
from stallfree.platform import cpu_count
from stallfree.units import parse_rate, parse_room, parse_whole

_FORMAT = {"format": "stallfree-report", "version": 1}

_RATES = {
    "G": "training on ready batches",
    "P": "prep of samples in memory",
    "S": "storage, cold files",
    "C": "cache",
    "F": "fetch, out of S and C",
}
_SHARES = {"compute": "compute", "copy": "copy", "prep_stall": "prep stall", "fetch_stall": "fetch stall"}
_RUNS = {"cold": "first epoch, cold files", "warm": "all data in memory"}

_DRIFT = 0.05
"""Change of the machine's own speed from which a report mentions it."""


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

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`.

        Raises `InputError` for other files, and for a report of another version.

        Example:
            ```python
            report = sf.Report.load("report.json")
            assert report.predict().throughput > 0
            ```
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            known = {key: data.get(key) for key in _FORMAT}
            if known != _FORMAT:
                raise ValueError(f"it has {known}, expected {_FORMAT}")
        except (OSError, TypeError, ValueError, AttributeError) as error:
            advice = "give what `stallfree analyze --json` wrote"
            raise errors.file_unreadable(f"{path} cannot be read as a report: {error}; {advice}") from None
        return cls(data)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")

    def html(self, path: str | Path) -> None:
        """Write the report as a self-contained HTML page. Raises `MissingExtraError` without the extra "report"."""
        Path(path).write_text(report_page(self.data), encoding="utf-8")

    def __str__(self) -> str:
        return render.as_text(_blocks(self.data))

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
    ) -> prediction.Prediction:
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
            advice = "analyse a data set that separates fetch from prep, such as sf.FileDataset"
            raise errors.InputError(f"storage={storage!r}: the size of a sample is not known; {advice}")

        def changed(now: Setting) -> Setting:
            then = now if hits is None else now.with_hits(hits)
            then = then if cpus is None else then.with_cpus(cpus)
            then = then if bandwidth is None else then.with_storage(bandwidth)
            return then.with_devices(devices).with_jobs(jobs)

        measured = [*self.data["rates"].items(), *self.data["runs"].items()]
        complete = [len(rate["rounds"]) for name, rate in measured if name not in ("F", "copy") and rate["value"]]
        rounds = [changed(self.setting(number)).throughput for number in range(min(complete, default=0))]
        half = next_half_width(rounds) if len(rounds) >= ROUNDS_FOR_INTERVAL else None
        return prediction.explain(before, changed(before), half, self.data["machine"].get("drift", 0.0))

    def hits_of(self, cache: int | str) -> float:
        """The share of hits with a cache of this size.

        It is the share of the samples that fit. Raises `InputError` for an invalid size.
        """
        size, job = parse_room(cache, "cache"), self.data["job"]
        if isinstance(size, float):
            return size
        if not job["record_bytes"]:
            raise errors.InputError(f"cache={cache!r}: the size of a sample is not known; give a share such as '50%'")
        return min(1.0, size / (float(job["record_bytes"]) * int(job["samples"])))

    def setting(self, number: int | None = None) -> Setting:
        """The measured job, over all rounds or in round `number`."""
        job, machine = self.data["job"], self.data["machine"]
        measured = self.data["rates"] | self.data["runs"]

        def rate(name: str) -> float:
            if measured[name]["value"] is None:
                return math.inf
            return float(measured[name]["value"] if number is None else measured[name]["rounds"][number])

        rates = Rates(*map(rate, ("G", "P_miss", "P_hit", "S", "C")))
        if not job["parted"]:  # P includes reading, at the rate C
            prep = 1 / max(1e-12, 1 / rates.prep - 1 / rates.cache)
            rates = replace(rates, prep=prep, prep_hit=prep)
        workers, overlap = job["num_workers"], job["loader"] == "stallfree" and job["parted"]
        cores = max(1, min(workers, machine["cpus"]))
        sizes = job["sample_bytes"], job["record_bytes"], job["samples"]
        setting = Setting(rates, job["cache_share"], cores, workers, overlap, *sizes)
        fastest = max((value for value in map(rate, _RUNS) if math.isfinite(value)), default=math.inf)
        return setting.reaching(fastest, own_cpu=machine["device"] == "cpu")


def make_report(
    job: Mapping[str, Any],
    device: torch.device,
    rates: dict[str, Rate],
    cache: int | str | None,
    notes: Sequence[str],
    *,
    drift: float = 0.0,
    remedy: Option | None = None,
    placement: dict[str, Any] | None = None,
) -> Report:
    """Create the report of the runs of an analysis.

    Args:
        job: its description: data set, samples, loader, sizes.
        device: of the steps.
        rates: G; P from memory, of misses and of hits; S, C, copy; those of the job itself, cold and warm.
        cache: size of the job's cache.
        notes: remarks on the measurement.
        drift: share by which the machine's own speed changed during the measurement.
        remedy: the choice of `cache="auto"`.
        placement: whether a step decodes on the device, and the rates of the job with this step on "CPUs" and "device".
    """
    unmeasured = [f"{name}: {rate.note}" for name, rate in rates.items() if rate.note and name != "copy"]
    data: dict[str, Any] = {
        **_FORMAT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("stallfree", "torch")} | {"python": platform.python_version()},
        "machine": {"cpus": cpu_count(), "memory_bytes": free_memory(), "device": str(device), "drift": drift},
        "job": {**job, "cache_share": 0.0},
        "rates": {name: asdict(rate) for name, rate in rates.items() if name not in _RUNS},
        "runs": {name: asdict(rates[name]) for name in _RUNS},
        "placement": placement,
        "notes": [*notes, *unmeasured],
    }
    report = Report(data)
    if cache is not None:
        data["job"]["cache_share"] = report.hits_of(cache)
    now = report.setting()
    fetch = now.rates.fetch_at(now.hits)
    data["rates"]["F"] = asdict(Rate(fetch if math.isfinite(fetch) else None))
    data["shares"] = {name: _shares(float(rates[name]), rates, cold=name == "cold") for name in _RUNS}
    data["curve"] = prediction.cache_curve(now)
    if uncertain := _uncertain(data):
        data["bottleneck"] = f"Too few rounds to say what limits: {uncertain} vary too much. Give more `seconds`."
        data["advice"] = []
    else:
        data["bottleneck"], data["advice"] = prediction.bottleneck(now, data), prediction.advise(now, data, remedy)
    if drift > _DRIFT:
        data["notes"].append(f"the machine's own speed drifted by {drift:.0%} between the rounds: so do the figures")
    if now.shares:
        data["notes"].append("prep, compute and the loader share the CPUs, so the job is slower than min(P, G)")
    return report


def _uncertain(data: Mapping[str, Any]) -> str:
    """The names of measured rates that have no interval."""
    measured = {name: rate for name, rate in (data["rates"] | data["runs"]).items() if name not in ("F", "copy")}
    return ", ".join(name for name, rate in measured.items() if rate["value"] is not None and rate["low"] is None)


def _shares(rate: float, rates: dict[str, Rate], *, cold: bool) -> dict[str, float]:
    """The parts of a sample's time: what each part adds to the previous one."""
    step = 1 / float(rates["G"])
    copied = step + (1 / float(rates["copy"]) if rates["copy"].value else 0.0)
    warm = max(1 / float(rates["warm"]), step)
    seconds = max(1 / rate, warm) if cold else warm
    copy = min(copied, warm) - step
    parts = {"compute": step, "copy": copy, "prep_stall": warm - step - copy, "fetch_stall": seconds - warm}
    return {name: part / seconds for name, part in parts.items()}


# -- the report as text and page --------------------------------------------------------------------------------------


def report_page(data: Mapping[str, Any]) -> str:
    """The report `data`, the JSON of `stallfree analyze`, as a page with text, tables and charts.

    Raises `MissingExtraError` if `plotly` is not installed.
    """
    return render.as_page("report", "report", str(data["job"]["dataset"]), _blocks(data), data)


def _blocks(data: Mapping[str, Any]) -> list[render.Block]:
    runs, shares, curve = data["runs"], data["shares"], data["curve"]
    advice = [
        (f"{item['do']}  ({item['gain']:.2f} times, {render.number(item['throughput'])} samples/s)", item["why"])
        for item in data["advice"]
    ]
    nothing = render.Text("Nothing: no change that was looked at makes this job faster.")
    to_do = render.Items(advice, numbered=True) if advice else nothing
    heading = render.Heading("What to do: first without other hardware, each in order of gain")
    epoch = [
        ["samples/s", *(_figure(runs[run]) for run in _RUNS)],
        *([name, *(render.percent(shares[run][part]) for run in _RUNS)] for part, name in _SHARES.items()),
    ]
    rates = [
        [f"{name}: {meaning}", _figure(rate), render.interval(rate["low"], rate["high"])]
        for name, meaning in _RATES.items()
        for rate in [data["rates"][name]]
    ]
    best = "" if curve["best"] is None else f"best: {render.percent(curve['best'])}"
    return [
        render.Text(data["bottleneck"], "verdict"),
        render.Text(_job_line(data), "job"),
        *([] if _uncertain(data) else [heading, to_do]),
        render.Heading("Where the time goes"),
        render.Chart("epoch", "A prep stall is a wait for the CPUs, a fetch stall one for storage."),
        render.Table("Shares of an epoch's time", ["", *_RUNS.values()], epoch),
        render.Heading("What each part delivers alone, in samples/s"),
        render.Table("Throughput is at most the least of F, P and G", ["rate", "samples/s", "interval of 95%"], rates),
        render.Chart("cache", "Throughput against the share of the samples cached.", best),
        render.Heading("Notes"),
        render.Items([(note, "") for note in [*data["notes"], _machine_line(data)]]),
    ]


def _figure(measured: Mapping[str, Any]) -> str:
    return "not measured" if measured["value"] is None else render.number(measured["value"])


def _job_line(data: Mapping[str, Any]) -> str:
    job = data["job"]
    cached = f", {render.percent(job['cache_share'])} of the samples cached" if job["cache_share"] else ""
    return (
        f"{job['dataset']}, {render.plural(job['samples'], 'sample')}, batches of {job['batch_size']:,}, "
        f"{job['loader']} loader with {render.plural(job['num_workers'], 'worker')}, "
        f"{data['machine']['device']}{cached}"
    )


def _machine_line(data: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    machine = data["machine"]
    memory = machine["memory_bytes"] / 2**30
    return f"{render.plural(machine['cpus'], 'CPU')}, {memory:.1f} GiB; {versions}; {data['made']}"
