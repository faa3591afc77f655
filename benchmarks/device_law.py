"""A device that works while the host does: what the overlap gains, against the law, and what it costs the host."""

from __future__ import annotations

import contextlib
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.contender import emit
from benchmarks.harness import (
    Check,
    Contender,
    Json,
    Options,
    Report,
    Spread,
    alternate,
    check_ratio,
    ratios,
    run_child,
    scratch_folder,
)
from stallfree.device import prefetcher
from stallfree.device.copies import Cuda
from stallfree.device.prefetcher import DevicePrefetcher

NAME = "device_law"
QUESTION = (
    "`DevicePrefetcher` before a simulated device, in real time: is a step as long as the longest of loading, copying "
    "and training, where it is their sum without? And what does it cost the host?"
)
MODULE = "benchmarks.device_law"
GAIN, NEAR, HOST_US = 1.45, 0.02, 100.0
LEAVES, SHAPE = 20, (64, 8)


@dataclass(frozen=True)
class Case:
    """Loaders, and seconds for a batch: to load it by one of them, to copy it, to train with it."""

    what: str
    workers: int
    load: float
    copy: float
    step: float

    @property
    def law(self) -> tuple[float, float]:
        """Batches/s with a prefetcher, and without."""
        loaded = self.workers / self.load
        return min(loaded, 1 / max(self.copy, self.step)), min(loaded, 1 / (self.copy + self.step))


CASES = (
    Case("the article's case", 3, 0.080, 0.015, 0.030),
    Case("loading is the slowest", 2, 0.080, 0.010, 0.020),
    Case("copying is the slowest", 4, 0.040, 0.025, 0.015),
    Case("copying and training alike", 4, 0.040, 0.020, 0.020),
)


def run(options: Options) -> Report:
    rounds, count = (2, 36) if options.quick else (5, 72)
    with scratch_folder() as scratch:
        pairs = []
        for case in CASES:
            params = {"workers": case.workers, "load": case.load, "copy": case.copy, "step": case.step}
            pair = [Contender(f"{case.what}, {way}", MODULE, {"way": way}) for way in ("prefetched", "in turn")]
            alternate(pair, params | {"count": count}, rounds, scratch)
            pairs.append((case, *pair))
        batches = 300 if options.quick else 1000
        host = [run_child(MODULE, {"way": "host", "count": batches}, scratch=scratch) for _ in range(rounds)]
    return Report(
        columns=["case", "load by workers, copy, train", "DevicePrefetcher, batches/s", "its law", "in turn, batches/s",
                 "its law", "DevicePrefetcher over in turn"],
        rows=[_row(*pair) for pair in pairs],
        checks=[
            check_ratio("simulated device, the article's case: DevicePrefetcher over none", *pairs[0][1:], GAIN),
            *(check for pair in pairs for check in _against_the_law(*pair)),
            *_host_checks(host),
        ],
        notes=[_note(rounds, count, batches, host)],
        versions={name: version(name) for name in ("stallfree", "torch")},
        raw={contender.name: contender.results for _, *pair in pairs for contender in pair} | {"host": host},
    )  # fmt: skip


def _row(case: Case, ours: Contender, plain: Contender) -> list[str]:
    return [
        case.what,
        f"{case.load * 1e3:.0f} ms by {case.workers}, {case.copy * 1e3:.0f} ms, {case.step * 1e3:.0f} ms",
        Spread.of(ours.rates()).show(".2f"),
        f"{case.law[0]:.2f}",
        Spread.of(plain.rates()).show(".2f"),
        f"{case.law[1]:.2f}",
        ratios(ours, plain).show(".2f"),
    ]


def _against_the_law(case: Case, ours: Contender, plain: Contender) -> list[Check]:
    checks = []
    for who, contender, law in (("DevicePrefetcher", ours, case.law[0]), ("no prefetcher", plain, case.law[1])):
        found = Spread.of([rate / law for rate in contender.rates()])
        what = f"simulated device, {case.what}, {who}: batches/s off the law, share"
        checks.append(Check(what, abs(found.median - 1), NEAR, "<=", ".3f"))
    return checks


def _host_checks(host: list[Json]) -> list[Check]:
    checks = []
    for key, what in (
        ("asleep_us", "in `next()`, the loop asleep before"),
        ("busy_us", "in `next()`, the loop busy before"),
        ("processor_us", "processor time of both threads"),
    ):
        found = Spread.of([result[key] for result in host])
        checks.append(
            Check(
                f"a dict of {LEAVES} tensors, {what}, µs per batch", found.median, HOST_US, "<=", ".0f",
                (found.low, found.high),
            )
        )  # fmt: skip
    return checks


def _note(rounds: int, count: int, batches: int, host: list[Json]) -> str:
    plain = Spread.of([result["copies_us"] for result in host])
    return (
        "The device is simulated: it knows when what it is given ends, and what waits for that sleeps; so do the "
        "loaders, which are two batches ahead each. The loop waits for the end of each step. "
        f"{rounds} rounds in turns, each a fresh process, of {count} batches, of which the second half is timed; "
        "medians (lowest to highest), ratios within a round. In "
        "turn: load, then copy and train in one stream, wait. The law: batches/s are the least of workers / load and "
        "1 / max(copy, train) with a prefetcher, 1 / (copy + train) without. Time of the host: "
        f"{LEAVES} float32 tensors of {SHAPE[0]}x{SHAPE[1]} per batch, {batches:,} batches, of a device that does all "
        "at once and costs nothing but a memcpy: what the calls of a real one cost comes on top. The loop is asleep "
        "for 2 ms before each `next()`, or busy with small multiplications; processor time is that of a loop that does "
        f"nothing else. To copy the {LEAVES} tensors one by one into memory that stands takes {plain.show('.0f')} µs."
    )


# -- in a process of its own ------------------------------------------------------------------------------------------


def _sleep_until(end: float) -> None:
    """As a device and a disk are on time, whatever the kernel adds to a sleep."""
    while (left := end - time.monotonic()) > 0:
        time.sleep(max(0.0, left - 0.001))


class _Event:
    """A mark in a stream, that is reached at `time`."""

    time = 0.0

    def record(self, stream: _Stream) -> None:
        self.time = stream.over

    def synchronize(self) -> None:
        _sleep_until(self.time)

    def query(self) -> bool:
        return self.time <= time.monotonic()


class _Stream:
    """Work in order, of which the last ends at `over`."""

    over = 0.0

    def give(self, seconds: float) -> None:
        self.over = max(self.over, time.monotonic()) + seconds

    def wait_event(self, event: _Event) -> None:
        self.over = max(self.over, event.time)


class _Device(Cuda):
    """A device whose copies take `seconds`. It knows of all that it is given when that ends, and needs no thread."""

    def __init__(self, seconds: float) -> None:
        self.device = torch.device("cpu")
        self._seconds = seconds
        self._local = threading.local()
        self.main = self.new_stream()

    def bind(self) -> None:
        pass

    def new_stream(self) -> _Stream:
        return _Stream()

    def current_stream(self) -> _Stream:
        stream: _Stream = getattr(self._local, "stream", self.main)
        return stream

    @contextlib.contextmanager
    def using(self, stream: _Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        yield
        self._local.stream = before

    def new_event(self) -> _Event:
        return _Event()

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def empty_pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def pin(self, memory: object) -> Callable[[], object]:
        return bool

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        self.current_stream().give(self._seconds)

    def synchronize(self) -> None:
        """Wait until the current stream has done all."""
        _sleep_until(self.current_stream().over)


def _loaded(workers: int, seconds: float, count: int) -> Iterator[torch.Tensor]:
    """Batches of loaders that are two batches ahead, each, and take `seconds` for one."""
    ready: list[queue.Queue[torch.Tensor]] = [queue.Queue(2) for _ in range(workers)]

    def load(number: int) -> None:
        for at in range(number, count, workers):
            _sleep_until(time.monotonic() + seconds)
            ready[number].put(torch.tensor([at]))

    for number in range(workers):
        threading.Thread(target=load, args=(number,), daemon=True).start()
    for at in range(count):
        yield ready[at % workers].get()


def _train(params: Json) -> Json:
    """Steps that are waited for: batches per second in the second half, over whole rounds of the loaders."""
    device, workers = _Device(params["copy"]), params["workers"]
    patched: Any = prefetcher
    patched.find_device = lambda _: (device.device, device)
    batches: Any = _loaded(workers, params["load"], params["count"])
    prefetched = params["way"] == "prefetched"
    times = []
    for at, batch in enumerate(DevicePrefetcher(batches, "cuda") if prefetched else batches):
        if not prefetched:
            device.copy(torch.empty_like(batch), batch)
        device.main.give(params["step"])
        device.synchronize()
        times.append(time.monotonic())
        if int(batch[0]) != at:
            raise RuntimeError(f"batch {int(batch[0])} in the place of {at}")
    half = len(times) // (2 * workers) * workers
    return {"rates": [half / (times[-1] - times[-1 - half])]}


def _cost(count: int) -> Json:
    """Microseconds of the host per batch: of the training loop in `next()`, and of both threads together."""
    device = _Device(0.0)
    patched: Any = prefetcher
    patched.find_device = lambda _: (device.device, device)
    torch.set_num_threads(1)
    batch = {f"leaf {number}": torch.rand(SHAPE) for number in range(LEAVES)}
    begin = time.process_time()
    _in_next(batch, 4 * count, lambda: None)
    spent = time.process_time() - begin
    return {
        "asleep_us": _in_next(batch, count, lambda: time.sleep(0.002)),
        "busy_us": _in_next(batch, count, _be_busy),
        "processor_us": spent / (4 * count) * 1e6,
        "copies_us": _one_by_one(list(batch.values()), count),
    }


def _in_next(batch: Any, count: int, step: Callable[[], None]) -> float:
    iterator = iter(DevicePrefetcher((batch for _ in range(count)), "cuda"))
    taken = []
    for _ in range(count):
        step()
        before = time.perf_counter()
        found = next(iterator)
        taken.append(time.perf_counter() - before)
        del found
    return statistics.median(taken) * 1e6


def _be_busy() -> None:
    """As a loop is that gives work to a device."""
    small, end = torch.rand(50, 50), time.perf_counter() + 0.002
    while time.perf_counter() < end:
        small @ small


def _one_by_one(leaves: list[torch.Tensor], count: int) -> float:
    targets = [torch.empty_like(leaf) for leaf in leaves]
    taken = []
    for _ in range(count):
        before = time.perf_counter()
        for target, leaf in zip(targets, leaves, strict=True):
            target.copy_(leaf)
        taken.append(time.perf_counter() - before)
    return statistics.median(taken) * 1e6


def child() -> None:
    params = json.loads(sys.argv[1])
    emit(_cost(params["count"]) if params["way"] == "host" else _train(params))


if __name__ == "__main__":
    child()
