"""The analysed job: its data set, loader and step, and sample records read before the timed runs."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stallfree.analysis.residency import put_out, resident_share
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
from stallfree.loader.arguments import check_numbers
from stallfree.loader.dataloader import DataLoader
from stallfree.notes import described, note_sample
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.values import payload_bytes
from stallfree.sources.base import BaseSource
from stallfree.sources.mapped import MapSource, as_source
from stallfree.sources.reads.recorded import parts_of

OURS = ("sampler", "batch_sampler", "shuffle", "batch_size", "num_workers", "drop_last", "persistent_workers")
"""Loader arguments that the analysis sets for its runs."""

_PREFETCH = 2


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
        form: the form of samples in that cache, or in a potential one.
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
    form: str = "fetched"

    @property
    def parted(self) -> bool:
        """Whether fetch and prep can be separated."""
        return not isinstance(self.source, MapSource)

    @property
    def reads(self) -> bool:
        """Whether the cache holds what the data set reads from files."""
        return self.form == "reads"

    @property
    def uncached(self) -> Any:
        """The data set without its cache."""
        if self.parted:
            return Bare(self.source, self.steps)
        return Stepped(self.source.dataset, self.steps) if self.reads else self.dataset

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
        known = {
            key: value for key, value in arguments.items() if key not in ("seed", "with_ids", "on_error", "staging")
        }
        try:
            if self.loader == "stallfree":
                return DataLoader(dataset, **arguments)
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
    job.arguments = {key: value for key, value in arguments.items() if key not in OURS}
    if isinstance(dataset, CachedDataset):
        job.source, job.form, job.cached = dataset.source, dataset.form, True
        job.steps = Compose([dataset.reader.deterministic, dataset.reader.rest])
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
    module = _import(place)
    build = module.get(name)
    if not callable(build):
        there = ", ".join(sorted(key for key, value in module.items() if callable(value) and key[0] != "_")[:8])
        raise job_function(f"{place} has no function {name!r}: give one that it has ({there or 'it has none'})")
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


def _import(place: str) -> dict[str, Any]:
    try:
        if place.endswith(".py") or os.sep in place:
            path = Path(place)
            if not path.is_file():
                raise job_function(
                    f"there is no file {place}: give a file or a module and a function, such as my_job.py:build"
                )
            sys.path.insert(0, str(path.resolve().parent))
            return vars(importlib.import_module(path.stem))  # so that worker processes can import from it
        sys.path.insert(0, os.getcwd())
        return vars(importlib.import_module(place))
    except StallfreeError:
        raise
    except Exception as error:
        raise job_failed(
            f"{place} cannot be loaded: {type(error).__name__}: {text_of(error)}. Correct it there"
        ) from error


def _shape(value: Any, depth: int = 2) -> str:
    """A short description of a value."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)) and depth:
        return f"a {type(value).__name__} of {', '.join(_shape(item, depth - 1) for item in value[:4])}"
    if isinstance(value, Mapping) and depth:
        return "a dict of " + ", ".join(f"{key!r}: {_shape(item, depth - 1)}" for key, item in list(value.items())[:4])
    return f"a value of type {type(value).__name__}"


class Held(BaseSource):
    """Records in memory with a pipeline, to measure prep without the cost of storage.

    Args:
        records: as fetched.
        steps: the pipeline.
    """

    def __init__(self, records: Sequence[Any], steps: Compose) -> None:
        self.records = records
        self.pipeline = steps

    def __len__(self) -> int:
        return len(self.records)

    def _record(self, id: int) -> Any:
        return self.records[id]

    def _where(self, id: int) -> str:
        return ""

    def fingerprint(self) -> str:
        """A fingerprint unique to this object."""
        return f"held-{os.getpid()}-{id(self)}"


class Bare(BaseSource):
    """Fetches of another source, without its cache.

    Args:
        source: to fetch from.
        steps: the prep.
    """

    def __init__(self, source: Any, steps: Compose) -> None:
        self.source = source
        self.pipeline = steps
        self.threads = getattr(source, "threads", True)

    def __len__(self) -> int:
        return len(self.source)

    def _record(self, id: int) -> Any:
        return self.source.fetch(id)

    def _where(self, id: int) -> str:
        return str(self.source.where(id))

    def fingerprint(self) -> str:
        """The fingerprint of the source."""
        return str(self.source.fingerprint())


class Stepped(torch.utils.data.Dataset[Any]):
    """A plain data set with steps after its own.

    Args:
        dataset: plain.
        steps: applied to its samples.
    """

    def __init__(self, dataset: Any, steps: Compose) -> None:
        self.dataset, self.steps = dataset, steps

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, id: int) -> Any:
        return self.steps(self.dataset[id])


class Endless:
    """An infinite sampler: `ids` in a new random order per pass."""

    def __init__(self, ids: Sequence[int], seed: int = 0) -> None:
        self._ids = np.asarray(ids)
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self._seed)
        while True:
            yield from rng.permutation(self._ids).tolist()


class Cold:
    """An infinite sampler in random order, which drops the files of each id from memory before yielding it.

    Args:
        ids: ids to yield.
        paths: maps an id to its files.
        seed: of the orders.

    Attributes:
        looked: files checked after they were dropped, and the share of their pages still in memory.
    """

    _LOOKS = 200

    def __init__(self, ids: Sequence[int], paths: Callable[[int], list[str]], seed: int = 0) -> None:
        self._ids = Endless(ids, seed)
        self._paths = paths
        self.looked: list[float] = []

    def __iter__(self) -> Iterator[int]:
        for id in self._ids:
            paths = self._paths(id)
            put_out(paths)
            if len(self.looked) < self._LOOKS and (there := resident_share(paths)) is not None:
                self.looked.append(there)
            yield id


class Opened:
    """Records the files opened for reading in the block. Only one instance may be active."""

    _recorded: list[str] | None = None
    _hooked = False

    def __enter__(self) -> Opened:
        Opened._recorded = []
        if not Opened._hooked:  # an audit hook cannot be removed, so all instances share one
            Opened._hooked = True
            sys.addaudithook(_record_open)
        return self

    def take(self) -> list[str]:
        """Regular files opened since the last call, without those of Python itself."""
        inside = (sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/shm/stallfree-")
        paths, Opened._recorded = Opened._recorded or [], []
        return [path for path in dict.fromkeys(paths) if not path.startswith(inside) and os.path.isfile(path)]

    def __exit__(self, *_: object) -> None:
        Opened._recorded = None


def _record_open(event: str, arguments: tuple[Any, ...]) -> None:
    recorded = Opened._recorded
    if recorded is not None and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
        if flags & os.O_ACCMODE == os.O_RDONLY:
            recorded.append(os.path.abspath(os.fsdecode(arguments[0])))


@dataclass
class Records:
    """Some samples of the job, read once.

    Attributes:
        ids: their ids.
        values: their records, if fetch and prep can be separated; else empty.
        parts: what each was read from, if they cannot be separated: files of this host, each with start and stop.
        sample_bytes: mean bytes of a fetch; None if unknown.
    """

    ids: list[int]
    values: list[Any]
    parts: dict[int, list[tuple[str, int, int]]]
    sample_bytes: float | None

    def paths(self, id: int) -> list[str]:
        """The files that a sample was read from."""
        return list(dict.fromkeys(path for path, _, _ in self.parts[id]))

    @property
    def files(self) -> list[str]:
        """All files of the samples."""
        return list(dict.fromkeys(path for id in self.parts for path in self.paths(id)))


MOST_SAMPLES, MOST_BYTES, MOST_SECONDS = 2048, 1 << 28, 5.0


def read_some(job: Job) -> Records:
    """Read samples in random order: at most 2,048, 256 MiB, and 5 seconds, but at least two batches.

    They are read in a child process. Raises `InputError` for a sample that cannot be read.
    """
    return call_in_child(partial(_read_some, job), "the reading of samples")


def _read_some(job: Job) -> Records:
    order = np.random.default_rng(0).permutation(len(job.source)).tolist()
    started, size, found = time.monotonic(), 0, Records([], [], {}, None)
    with Opened() as opened:
        for id in order[:MOST_SAMPLES]:
            try:
                record = job.source.fetch(id)
            except Exception as error:
                note_sample(error, job.source, id, "fetching")
                raise job_failed(
                    f"the job cannot be analysed: {described(error)}. Leave this sample out, or correct it"
                ) from error
            if job.reads:
                found.parts[id] = [part for part in parts_of(record) if os.path.isabs(part[0])]  # of this machine
                size += sum(stop - start for _, start, stop in found.parts[id])
            else:
                size += payload_bytes(record)
                if job.parted:
                    found.values.append(record)
                else:
                    found.parts[id] = [(path, 0, os.path.getsize(path)) for path in opened.take()]
            found.ids.append(id)
            enough = size > MOST_BYTES or time.monotonic() - started > MOST_SECONDS
            if enough and len(found.ids) >= 2 * job.batch_size:
                break
    if not job.parted and not job.reads:
        size = sum(os.path.getsize(path) for path in found.files)
    found.sample_bytes = size / len(found.ids) or None
    return found
