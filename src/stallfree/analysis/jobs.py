"""The analysed job: its data set, loader and step, and the files that its samples come from."""

import contextlib
import ctypes
import importlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from stallfree import errors
from stallfree.analysis.model import Costs
from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.smart_cache import SmartCacheDataset
from stallfree.device.copies import find_device
from stallfree.loader.arguments import check_numbers
from stallfree.loader.dataloader import DataLoader
from stallfree.pipeline.compose import Compose
from stallfree.platform import shares_memory
from stallfree.pytree import take_apart
from stallfree.raising import described
from stallfree.sources.mapped import BaseSource, MapSource, as_source, samples_of

_OURS = ("sampler", "batch_sampler", "shuffle", "batch_size", "num_workers", "drop_last", "persistent_workers")
"""Loader arguments that the analysis sets for its runs."""


@contextlib.contextmanager
def users_code(doing: str, advice: str, value: object = None) -> Iterator[None]:
    """Within it, an error of the user's code is raised as an `InputError`: what failed, why, and the advice.

    "{}" in the advice stands for a description of `value`.
    """
    try:
        yield
    except errors.StallfreeError:
        raise
    except Exception as error:
        raise errors.job_failed(f"{doing} failed: {described(error)}. {advice.format(_shape(value))}") from error


class Job:
    """The analysed job. Raises `InputError` if an argument is invalid.

    Args:
        dataset: as passed by the user.
        step: trains on a batch.
        batch_size: samples per batch.
        num_workers: worker processes of the loader.
        device: device of `step`; the CPU if None.
        arguments: other arguments of the loader.

    Attributes:
        source: the fetch; fetch and prep if they are inseparable.
        steps: the prep; empty if they are inseparable.
        cached: whether the job has a sample cache.
        parted: whether fetch and prep can be separated.
        loader: library of the job's loader: "stallfree" for stallfree's sources and caches, else "torch".
    """

    def __init__(
        self,
        dataset: Any,
        step: Callable[[Any], Any],
        batch_size: int,
        num_workers: int,
        device: str | torch.device | None,
        arguments: Mapping[str, Any],
    ) -> None:
        check_numbers(num_workers, batch_size, 0, arguments.get("prefetch_factor"))
        if batch_size is None:
            raise errors.InputError("batch_size=None: the analysis counts batches, so give an int of 1 or more")
        if not callable(step):
            raise errors.InputError(f"step={step!r} cannot be called: give a function that trains on a batch")
        if isinstance(dataset, SmartCacheDataset):
            raise errors.argument_conflict("a SmartCacheDataset cannot be analysed: give the data set beneath it")
        self.device, _ = find_device("cpu" if device is None else device)
        self.dataset, self.step, self.batch_size, self.num_workers = dataset, step, batch_size, num_workers
        self.arguments = {key: value for key, value in arguments.items() if key not in _OURS}
        self.cached = isinstance(dataset, CachedDataset)
        if not self.cached:
            self.source: Any = as_source(dataset, divide=False)
        elif dataset.form == "files":  # one process makes a sample from files, wherever these come from
            self.source = as_source(dataset.dataset, divide=False)
        else:
            self.source = dataset.source
        self.steps = dataset.steps if self.cached else self.source.pipeline
        self.parted = not isinstance(self.source, MapSource)
        self.loader = "stallfree" if self.parted or self.cached else "torch"
        if len(self.source) < batch_size:
            raise errors.InputError(f"batch_size={batch_size}: the data set has {len(self.source)} samples; give less")

    def load(self, dataset: Any, ids: Iterable[int]) -> Any:
        """The job's loader over `ids` of `dataset`."""
        arguments = {**self.arguments, "sampler": ids, "batch_size": self.batch_size, "num_workers": self.num_workers}
        with users_code("making the loader", "Give arguments of its class"):
            kind: Any = DataLoader if self.loader == "stallfree" else torch.utils.data.DataLoader
            return kind(dataset, **arguments)

    def train(self, batch: Any) -> None:
        """Run one step and synchronize the device. Raises `InputError` if the step raises."""
        with users_code("step(batch)", "It gets what the loader yields, here {}", batch):
            self.step(batch)
            self.wait()

    def wait(self) -> None:
        """Synchronize the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def load_job(where: str) -> tuple[Any, dict[str, Any], Callable[[Any], Any]]:
    """The result of `build` in "my_job.py:build" or "package.module:build": data set, loader arguments, step.

    Raises `InputError` if there is no such function, if it raises, or if it returns something else.
    """
    module, _, name = where.rpartition(":")
    path = Path(module)
    is_file = path.suffix == ".py" or len(path.parts) > 1
    if not name.isidentifier() or (is_file and not path.is_file()):
        raise errors.job_function(f"no function {where!r}: give a file or a module and a function, as my_job.py:build")
    sys.path.insert(0, str(path.resolve().parent) if is_file else os.getcwd())  # worker processes import from it
    with users_code(where, "Correct it there"):
        built = getattr(importlib.import_module(path.stem if is_file else module), name)()
    if not (isinstance(built, tuple) and len(built) == 3 and isinstance(built[1], Mapping) and callable(built[2])):
        raise errors.job_function(f"{where} returned {_shape(built)}: return (dataset, loader_arguments, step)")
    dataset, arguments, step = built
    return dataset, {"batch_size": 1, "num_workers": 0, **arguments}, step


def _shape(value: Any) -> str:
    """A short description of a value and its tensors."""
    tensors = (leaf for leaf in take_apart(value)[0] if isinstance(leaf, torch.Tensor))
    shapes = ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
    return f"a value of type {type(value).__name__}" + (f" with tensors of {shapes}" if shapes else "")


# -- what the runs of an analysis read --------------------------------------------------------------------------------


class PartSource(BaseSource):
    """The source of a job with these steps, and without a cache."""

    def __init__(self, source: Any, steps: Compose) -> None:
        self._source, self.pipeline, self.threads = source, steps, bool(getattr(source, "threads", True))

    def __len__(self) -> int:
        return len(self._source)

    def _record(self, id: int) -> Any:
        return self._source.fetch(id)

    def _where(self, id: int) -> str:
        return str(self._source.where(id))

    def fingerprint(self) -> str:
        """A fingerprint unique to this object."""
        return f"part-{os.getpid()}-{id(self)}"


class CyclingSampler:
    """An infinite sampler: `ids` in a new random order per pass.

    Args:
        ids: ids to yield.
        paths: maps an id to its files, which are dropped from memory before the id is yielded; None: they stay.

    Attributes:
        resident: share of the pages of files that were still in memory after they were dropped.
    """

    _CHECKED = 200

    def __init__(self, ids: Any, paths: Callable[[int], list[str]] | None = None) -> None:
        self._ids, self._paths = np.asarray(ids), paths
        self.resident: list[float] = []

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            for id in rng.permutation(self._ids).tolist():
                if self._paths is not None:
                    drop_pages(paths := self._paths(id))
                    if len(self.resident) < self._CHECKED and (share := resident_share(paths)) is not None:
                        self.resident.append(share)
                yield id


def find_files(source: Any, ids: Sequence[int], seconds: float) -> dict[int, list[str]]:
    """Return the files that each of some samples is read from. Call it in a child process.

    Reads samples for so many seconds, but at least eight. Raises the error of the first one if none can be read.
    """
    files, opened, end = dict[int, list[str]](), list[str](), time.monotonic() + seconds

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
            path = os.path.abspath(os.fsdecode(arguments[0]))
            own = path.startswith((sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/shm/stallfree-"))
            if flags & os.O_ACCMODE == os.O_RDONLY and not own:
                opened.append(path)

    def read_from(id: int) -> list[str]:
        opened.clear()
        source.fetch(id)
        return list(filter(os.path.isfile, dict.fromkeys(opened)))

    sys.addaudithook(note)  # ends with this process
    for id, paths in samples_of(source, ids, read_from):
        files[id] = paths
        if len(files) >= 8 and time.monotonic() > end:
            break
    return files


def measure_reads(source: Any, files: Mapping[int, list[str]], *, seconds: float) -> Costs:
    """Read the files of samples, cold and from memory, and make these samples. Call it in a child process.

    For a data set that reads and prepares in one piece: the cost of a miss includes reading from memory.
    """
    end, times = time.monotonic() + seconds, list[list[float]]()
    for id, paths in files.items():
        drop_pages(paths)
        clock = [time.perf_counter()]
        parts: list[tuple[Callable[[Any], Any], Any]] = [(read_files, paths), (read_files, paths), (source.fetch, id)]
        for part, argument in parts:
            part(argument)
            clock.append(time.perf_counter())
        times.append(np.diff(clock).tolist())
        if len(times) > 5 and time.monotonic() > end:
            break
    cold, warm, making = map(fmean, zip(*(times[1:] or times), strict=True))  # the first one loads libraries
    hit = {"fetched": making, "prepared": making}
    size = fmean(sum(map(os.path.getsize, paths)) for paths in files.values())
    return Costs(len(source), 1 / max(cold, 1e-9), making, hit, {"fetched": warm}, fetched=size)


def resident_share(paths: Iterable[str]) -> float | None:
    """The share of the pages of these files in the page cache (`mincore`).

    None if all files are empty or none can be checked; always None on systems other than Linux.
    """
    resident = pages = 0
    for path in paths if shares_memory() else ():
        with (
            contextlib.suppress(OSError, ValueError),  # an empty file cannot be mapped
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory,
        ):
            vector = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
            start = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data)
            if not ctypes.CDLL(None).mincore(start, ctypes.c_size_t(len(memory)), vector):
                resident, pages = resident + sum(value & 1 for value in vector), pages + len(vector)
    return resident / pages if pages else None


def drop_pages(paths: Sequence[str]) -> None:
    """Advise the operating system to drop these files from the page cache (`posix_fadvise`, DONTNEED).

    Dirty pages are written back first. The call is only advisory: check `resident_share` before and after. Files that
    cannot be opened are skipped, and so are all files on systems without this call.
    """
    for path in paths if hasattr(os, "posix_fadvise") else ():
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            with contextlib.suppress(OSError):
                os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(paths: Sequence[str]) -> None:
    """Read these files."""
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
