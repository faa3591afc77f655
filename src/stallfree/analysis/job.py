"""The analysed job: its data set, loader and step, and sample records read before the timed runs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.smart_cache import SmartCacheDataset
from stallfree.errors import (
    InputError,
    StallfreeError,
    argument_conflict,
    device_unknown,
    job_failed,
    job_function,
    text_of,
)
from stallfree.ipc.forked import call_in_child
from stallfree.ipc.shared_array import SharedCounts
from stallfree.loader.arguments import check_numbers
from stallfree.loader.dataloader import DataLoader
from stallfree.notes import described, note_sample
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.values import payload_bytes
from stallfree.platform import OPEN, shares_memory
from stallfree.sources.base import BaseSource
from stallfree.sources.mapped import MapSource, as_source

_OURS = ("sampler", "batch_sampler", "shuffle", "batch_size", "num_workers", "drop_last", "persistent_workers")
"""Loader arguments that the analysis sets for its runs."""

_OF_STALLFREE = ("seed", "with_ids", "on_error", "staging")
"""Loader arguments that torch's loader does not have."""

_PREFETCH = 2
_MOST_SAMPLES, _MOST_BYTES, _MOST_SECONDS = 2048, 1 << 28, 5.0


@dataclass
class Job:
    """The analysed job.

    Attributes:
        dataset: as passed by the user.
        step: trains on a batch.
        batch_size: samples per batch.
        num_workers: worker processes of the loader.
        device: device of `step`.
        arguments: other arguments of the loader.
        source: the fetch; fetch and prep if they are inseparable.
        steps: the prep; empty if they are inseparable.
        cached: whether the job has a sample cache.
    """

    dataset: Any
    step: Callable[[Any], Any]
    batch_size: int
    num_workers: int
    device: torch.device
    arguments: dict[str, Any] = field(default_factory=dict)
    source: Any = None
    steps: Compose = field(default_factory=lambda: Compose([]))
    cached: bool = False

    @property
    def parted(self) -> bool:
        """Whether fetch and prep can be separated."""
        return not isinstance(self.source, MapSource)

    @property
    def loader(self) -> str:
        """The loader library of the job: "stallfree" for stallfree's sources and caches, else "torch"."""
        return "stallfree" if self.parted or self.cached else "torch"

    @property
    def ahead(self) -> int:
        """Batches in flight."""
        return int(self.arguments.get("prefetch_factor") or _PREFETCH) * max(1, self.num_workers)

    def load(self, dataset: Any, ids: Iterator[int] | Sequence[int], **changed: Any) -> Any:
        """The job's loader over `ids` of `dataset`."""
        arguments = {**self.arguments, "sampler": ids, **changed}
        arguments |= {"batch_size": self.batch_size, "num_workers": self.num_workers}
        try:
            if self.loader == "stallfree":
                return DataLoader(dataset, **arguments)
            known = {key: value for key, value in arguments.items() if key not in _OF_STALLFREE}
            return torch.utils.data.DataLoader(dataset, **known)
        except StallfreeError:
            raise
        except (TypeError, ValueError) as error:
            raise job_failed(
                f"the loader cannot be made with the arguments that were given: {error}. Give those of its class"
            ) from error

    def train(self, batch: Any) -> None:
        """Run one step and synchronize the device. Raises `InputError` if the step raises."""
        try:
            self.step(batch)
            self.wait()
        except StallfreeError:
            raise
        except Exception as error:
            raise job_failed(
                f"step(batch) raised {type(error).__name__}: {text_of(error)}. It gets what the loader yields, "
                f"here {_shape(batch)}"
            ) from error

    def wait(self) -> None:
        """Synchronize the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def make_job(
    dataset: Any,
    step: Callable[[Any], Any],
    batch_size: int,
    num_workers: int,
    device: str | torch.device | None,
    arguments: Mapping[str, Any],
) -> Job:
    """Create a job from the user's arguments. Raises `InputError` if they are invalid."""
    check_numbers(num_workers, batch_size, 0, arguments.get("prefetch_factor"), False)
    if batch_size is None:
        raise InputError("batch_size=None: the analysis counts batches, so give an int of 1 or more")
    if not callable(step):
        raise InputError(f"step={step!r} cannot be called: give a function that trains on a batch")
    if isinstance(dataset, SmartCacheDataset):
        raise argument_conflict("a SmartCacheDataset cannot be analysed: give the data set beneath it")
    try:
        where = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise device_unknown(f"device={device!r} is no device: give 'cpu', 'cuda' or such as 'cuda:1'") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise device_unknown(f"device={device!r}: there is no such accelerator here; give 'cpu', or leave it out")
    job = Job(dataset, step, batch_size, num_workers, where)
    job.arguments = {key: value for key, value in arguments.items() if key not in _OURS}
    if isinstance(dataset, CachedDataset):
        job.source, job.steps, job.cached = dataset.source, dataset.steps, True
        if dataset.form == "files":  # one process makes a sample from files, wherever these come from
            job.source = as_source(dataset.dataset, divide=False)
    else:
        job.source = as_source(dataset, divide=False)
        job.steps = job.source.pipeline
    if len(job.source) < batch_size:
        raise InputError(
            f"the data set has {len(job.source)} samples, less than a batch of {batch_size}: give a smaller batch_size"
        )
    return job


def load_job(where: str) -> tuple[Any, dict[str, Any], Callable[[Any], Any]]:
    """The result of `build` in "my_job.py:build" or "package.module:build": data set, loader arguments, step.

    Raises `InputError` if there is no such function, if it raises, or if it returns something else.
    """
    place, _, name = where.rpartition(":")
    if not place or not name.isidentifier():
        raise job_function(
            f"{where!r} names no function: give a file or a module and a function, such as my_job.py:build"
        )
    is_file = place.endswith(".py") or os.sep in place
    path = Path(place)
    if is_file and not path.is_file():
        raise job_function(f"there is no file {place}: give a file or a module and a function, such as my_job.py:build")
    sys.path.insert(0, str(path.resolve().parent) if is_file else os.getcwd())  # worker processes import from it
    try:
        module = vars(importlib.import_module(path.stem if is_file else place))
    except Exception as error:
        raise job_failed(
            f"{place} cannot be loaded: {type(error).__name__}: {text_of(error)}. Correct it there"
        ) from error
    build = module.get(name)
    if not callable(build):
        names = ", ".join(sorted(key for key, value in module.items() if callable(value) and key[0] != "_")[:8])
        raise job_function(f"{place} has no function {name!r}: give one that it has ({names or 'it has none'})")
    try:
        built = build()
    except StallfreeError:
        raise
    except Exception as error:
        raise job_failed(f"{where} raised {type(error).__name__}: {text_of(error)}. Correct it there") from error
    if not (isinstance(built, tuple) and len(built) == 3 and isinstance(built[1], Mapping) and callable(built[2])):
        raise job_function(
            f"{where} returned {_shape(built)}: return (dataset, loader_arguments, step), for instance "
            "(dataset, {'batch_size': 64, 'num_workers': 4}, step)"
        )
    dataset, arguments, step = built
    return dataset, {"batch_size": 1, "num_workers": 0, **arguments}, step


def _shape(value: Any, depth: int = 2) -> str:
    """A short description of a value."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)) and depth:
        return f"a {type(value).__name__} of {', '.join(_shape(item, depth - 1) for item in value[:4])}"
    if isinstance(value, Mapping) and depth:
        return "a dict of " + ", ".join(f"{key!r}: {_shape(item, depth - 1)}" for key, item in list(value.items())[:4])
    return f"a value of type {type(value).__name__}"


# -- parts of the job -------------------------------------------------------------------------------------------------


class PartSource(BaseSource):
    """A part of a job's work: some fetches, some steps, no cache.

    Args:
        fetch: returns the record of an id.
        length: number of samples.
        steps: the prep.
        threads: whether threads may fetch.
        clock: measures the CPU time of fetches and steps; None: nothing does.
    """

    def __init__(
        self, fetch: Callable[[int], Any], length: int, steps: Compose, threads: bool, clock: CpuClock | None = None
    ) -> None:
        self._fetch, self._length, self.threads = fetch, length, threads
        self.pipeline = steps
        if clock is not None:
            self._fetch, self.pipeline = partial(clock.time, 0, fetch), Compose([partial(clock.time, 1, steps)])

    def __len__(self) -> int:
        return self._length

    def _record(self, id: int) -> Any:
        return self._fetch(id)

    def _where(self, id: int) -> str:
        return ""

    def fingerprint(self) -> str:
        """A fingerprint unique to this object."""
        return f"part-{os.getpid()}-{id(self)}"


class CpuClock:
    """CPU seconds of fetches and of steps, interleaved, in all worker processes.

    Args:
        workers: their number.
    """

    def __init__(self, workers: int) -> None:
        self._counts = SharedCounts(4 * (workers + 1))  # of each process: microseconds and number, of both kinds

    def time(self, kind: int, call: Callable[[Any], Any], argument: Any) -> Any:
        """Return `call(argument)`, and count its time as that of fetches, 0, or of steps, 1."""
        began = time.thread_time_ns()
        try:
            return call(argument)
        finally:
            worker = get_worker_info()
            place = 4 * (0 if worker is None else worker.id + 1) + 2 * kind
            self._counts.array[place] += round((time.thread_time_ns() - began) / 1000)
            self._counts.array[place + 1] += 1

    @property
    def share(self) -> float:
        """CPU time of a fetch as a share of that of the steps; 0 if there are none."""
        fetching, fetches, preparing, samples = self._counts.array.reshape(-1, 4).sum(axis=0).tolist()
        return (fetching / fetches) / (preparing / samples) if fetches and preparing else 0.0


class CyclingSampler:
    """An infinite sampler: `ids` in a new random order per pass.

    Args:
        ids: ids to yield.
        paths: maps an id to its files, which are dropped from memory before the id is yielded; None: they stay.
        seed: of the orders.

    Attributes:
        resident: share of the pages of files that were still in memory after they were dropped.
    """

    _CHECKED = 200

    def __init__(self, ids: Sequence[int], paths: Callable[[int], list[str]] | None = None, seed: int = 0) -> None:
        self._ids, self._paths, self._seed = np.asarray(ids), paths, seed
        self.resident: list[float] = []

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self._seed)
        while True:
            for id in rng.permutation(self._ids).tolist():
                if self._paths is not None:
                    paths = self._paths(id)
                    drop_pages(paths)
                    if len(self.resident) < self._CHECKED and (share := resident_share(paths)) is not None:
                        self.resident.append(share)
                yield id


# -- samples read in advance ------------------------------------------------------------------------------------------


@dataclass
class Records:
    """Some samples of the job, read once.

    Attributes:
        ids: their ids.
        values: their records, if fetch and prep can be separated; else empty.
        files: the files that each was read from, if they cannot be separated.
        sample_bytes: mean bytes of a fetch; None if unknown.
    """

    ids: list[int]
    values: list[Any]
    files: dict[int, list[str]]
    sample_bytes: float | None = None

    @property
    def all_files(self) -> list[str]:
        """The files of all samples."""
        return list(dict.fromkeys(path for paths in self.files.values() for path in paths))


def read_some(job: Job) -> Records:
    """Read samples in random order: at most 2,048, 256 MiB, and 5 seconds, but at least two batches.

    They are read in a child process. Raises `InputError` for a sample that cannot be read.
    """
    return call_in_child(partial(_read_some, job), "the reading of samples")


def _read_some(job: Job) -> Records:
    order = np.random.default_rng(0).permutation(len(job.source)).tolist()
    started, size, some, opened = time.monotonic(), 0, Records([], [], {}), list[str]()
    sys.addaudithook(partial(_note_open, opened))  # ends with this process
    for id in order[:_MOST_SAMPLES]:
        opened.clear()
        try:
            record = job.source.fetch(id)
        except Exception as error:
            note_sample(error, job.source, id, "fetching")
            raise job_failed(
                f"the job cannot be analysed: {described(error)}. Leave this sample out, or correct it"
            ) from error
        some.ids.append(id)
        if job.parted:
            some.values.append(record)
            size += payload_bytes(record)
        else:
            some.files[id] = [path for path in dict.fromkeys(opened) if os.path.isfile(path)]
            size += payload_bytes(record)
        enough = size > _MOST_BYTES or time.monotonic() - started > _MOST_SECONDS
        if enough and len(some.ids) >= 2 * job.batch_size:
            break
    if not job.parted:
        size = sum(map(os.path.getsize, some.all_files))
    some.sample_bytes = size / len(some.ids) or None
    return some


def _note_open(opened: list[str], event: str, arguments: tuple[Any, ...]) -> None:
    """Add the path of a file that is opened for reading, unless it is one of Python or of stallfree."""
    if event == "open" and len(opened) < _MOST_SAMPLES and isinstance(arguments[0], (str, bytes, os.PathLike)):
        flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
        path = os.path.abspath(os.fsdecode(arguments[0]))
        own = path.startswith((sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/shm/stallfree-"))
        if flags & os.O_ACCMODE == os.O_RDONLY and not own:
            opened.append(path)


# -- files in memory --------------------------------------------------------------------------------------------------


def resident_share(paths: Iterable[str]) -> float | None:
    """The share of the pages of these files in the page cache (`mincore`).

    None if all files are empty or none can be checked; always None on systems other than Linux.
    """
    if not shares_memory():
        return None
    resident = pages = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            counts = _pages(file.fileno(), os.fstat(file.fileno()).st_size)
            resident, pages = resident + counts[0], pages + counts[1]
    return resident / pages if pages else None


def _pages(fd: int, size: int) -> tuple[int, int]:
    """The number of pages of a file in memory, and of all its pages."""
    if size == 0:
        return 0, 0
    count = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * count)()
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        start = ctypes.c_char.from_buffer(memory)
        try:
            failed = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), vector
            )
        finally:
            del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(value & 1 for value in vector), count


def drop_pages(paths: Sequence[str]) -> None:
    """Advise the operating system to drop these files from the page cache (`posix_fadvise`, DONTNEED).

    Dirty pages are written back first. The call is only advisory: check `resident_share` before and after. Files that
    cannot be opened are skipped, and so are all files on systems without this call.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | OPEN)
            try:
                with contextlib.suppress(OSError):
                    os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def read_file(path: str) -> None:
    """Read a file, if it is readable."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
