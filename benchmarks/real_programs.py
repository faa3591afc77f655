"""Programs of users with one line changed: are the batches the same, and what does slow or removed storage cost?"""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.contender import emit
from benchmarks.harness import BenchmarkError, Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.peers import venvs
from benchmarks.programs import NATIVE, PROGRAMS
from benchmarks.slow_disk import SlowDisk, forget_pages, join, slow_disk, why_not

NAME = "real_programs"
QUESTION = (
    "Twelve data sets as users of public libraries write them, with nothing changed but the line of the loader: are "
    "the batches those of torch's loader, how fast are later epochs if the storage gives 20 MB/s, and does training go "
    "on if it is removed?"
)
RATE = 20_000_000
SEED = 5
EPOCHS = 3
SHARE = 0.65
COUNTS = {"photos": 400, "volumes": 120, "words": 600, "features": 1000, "clips": 600, "spectra": 2000, "large": 300}
QUICK = {name: count // 10 for name, count in COUNTS.items()}
VENV = "programs"


def stallfree_loader(dataset: Any, *, native: bool = False, **options: Any) -> Any:
    """The line that is changed, in place of `torch.utils.data.DataLoader(dataset, **options)`.

    With `native`, the library of the data set opens files itself: nothing can be recorded.
    """
    import stallfree as sf

    return sf.DataLoader(dataset if native else sf.CachedDataset(dataset, capacity="1GiB", form="files"), **options)


# -- the whole --------------------------------------------------------------------------------------------------------


def run(options: Options) -> Report:
    missing = venvs.why_missing(VENV) or why_not()
    if missing:
        raise BenchmarkError(missing)
    counts = QUICK if options.quick else COUNTS
    with scratch_folder() as scratch, slow_disk(scratch, 300 if options.quick else 900, RATE) as disk:
        root = disk.folder / "data"
        what = _child("files", scratch, root=root, counts=counts, data=str(options.data or ""))["what"]
        equal = {name: _equality(name, scratch, root) for name in PROGRAMS}
        rates = _rates(options, scratch, disk, root)
        pages = _shares(scratch, disk)
    rows = [[name, *equal[name]["row"], *_rate_cells(rates.get(name))] for name in PROGRAMS]
    return Report(
        columns=[
            "program",
            "batches of 3 epochs equal torch's",
            "storage removed after the first",
            "torch, warm files: samples/s",
            "stallfree, 20 MB/s, later epochs: samples/s",
            "ratio",
            "MB read from storage, first and later epochs",
        ],
        rows=rows,
        checks=_checks(equal, rates, pages),
        notes=[
            f"{what}. 2 persistent workers. Both loaders seed the generators for each sample in the same way when "
            "batches are compared; torch's runs in a process of its own, in which nothing is replaced. Slow storage is "
            "a disk image whose reads the kernel throttles; the page cache is emptied before each epoch. Programs "
            "whose library opens files itself run without a cache, and their files stay where they are.",
            f"{pages['samples']} photographs of {pages['each'] / 1000:.0f} KB, cache of {SHARE:.0%}: "
            f"{pages['resident']} resident, misses {pages['misses']} in the epochs after the first, "
            f"{_percent(pages['shares'])} of the bytes from storage. If a process whose page cache is limited to as "
            f"many bytes reads the same files in random order, {_percent(pages['page_cache'])} come from storage.",
        ],
        versions=pages["versions"],
        raw={"equal": equal, "rates": rates, "pages": pages},
    )


def _child(mode: str, scratch: Path, **params: Any) -> Json:
    params = {key: str(value) if isinstance(value, Path) else value for key, value in params.items()}
    return run_child(
        "benchmarks.real_programs", {"mode": mode, **params}, scratch=scratch, python=venvs.python_of(VENV)
    )


def _equality(name: str, scratch: Path, root: Path) -> Json:
    expected = _child("torch_digests", scratch, program=name, root=root)["digests"]
    found = _child("digests", scratch, program=name, root=root)
    equal = [epoch == ours for epoch, ours in zip(expected, found["digests"], strict=True)]
    fresh = not set(expected[0]) & set(expected[1])
    say(f"  {name}: equal {equal}, fresh {fresh}, read from storage {found['storage_reads']} times")
    removed = "natively" if name in NATIVE else "yes" if all(equal) else "no"
    return {
        "equal": all(equal) and fresh,
        "storage_reads": found["storage_reads"],
        "row": ["yes" if all(equal) else "no", removed],
    }


def _rates(options: Options, scratch: Path, disk: SlowDisk, root: Path) -> dict[str, Json]:
    """Rates of each program whose files are served, torch and stallfree in turns."""
    found: dict[str, Json] = {name: {"torch": [], "ours": [], "bytes": []} for name in PROGRAMS if name not in NATIVE}
    for round_ in range(min(5, options.rounds)):
        for name, all_rounds in found.items():
            common = {"program": name, "root": root, "seconds": options.seconds, "device": disk.device}
            theirs = _child("torch_rates", scratch, **common)
            ours = _child("rates", scratch, **common, slow=disk.slow)
            all_rounds["torch"].append(statistics.median(theirs["rates"]))
            all_rounds["ours"].append(statistics.median(ours["rates"]))
            all_rounds["bytes"].append([ours["bytes"][0], max(ours["bytes"][1:])])
            ratio = all_rounds["ours"][-1] / all_rounds["torch"][-1]
            say(f"  round {round_ + 1}: {name}: {ratio:.2f} of torch's {all_rounds['torch'][-1]:,.0f} samples/s")
    return found


def _ratio(found: Json) -> Spread:
    return Spread.of([ours / theirs for ours, theirs in zip(found["ours"], found["torch"], strict=True)])


def _rate_cells(found: Json | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    first, later = (max(counts) for counts in zip(*found["bytes"], strict=True))
    rates = [Spread.of(found[who]).show() for who in ("torch", "ours")]
    return [*rates, _ratio(found).show(".2f"), f"{first / 1e6:.1f}, {later / 1e6:.1f}"]


def _percent(shares: list[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def _checks(equal: dict[str, Json], rates: dict[str, Json], pages: Json) -> list[Check]:
    slowest = min((_ratio(found) for found in rates.values()), key=lambda ratio: ratio.median)
    served = len(PROGRAMS) - len(NATIVE)
    removed = sum(found["equal"] for name, found in equal.items() if name not in NATIVE)
    off = max(abs(misses + pages["resident"] - pages["samples"]) for misses in pages["misses"])
    return [
        Check(
            f"programs of users: batches of 3 epochs equal to torch's, of {len(PROGRAMS)}",
            sum(found["equal"] for found in equal.values()),
            len(PROGRAMS),
            "==",
            ".0f",
        ),
        Check(
            f"programs of users: training goes on after storage was removed, of {served}", removed, served, "==", ".0f"
        ),
        Check(
            f"programs of users, storage of 20 MB/s: later epochs against torch on warm files, the lowest of {served}",
            slowest.median,
            0.97,
            spread=(slowest.low, slowest.high),
        ),
        Check(f"400 KB photographs, cache of {SHARE:.0%}: misses beyond the samples not resident", off, 0, "==", ".0f"),
    ]


def _shares(scratch: Path, disk: SlowDisk) -> Json:
    """Misses with a cache for a part of large photographs, and with a page cache of that size."""
    root = disk.folder / "data" / "large"
    ours = _child("misses", scratch, root=root, device=disk.device)
    theirs = _child("page_cache", scratch, root=root, device=disk.device)
    return ours | {"page_cache": theirs["shares"]}


# -- the children -----------------------------------------------------------------------------------------------------


def _dataset(given: Json) -> tuple[Any, Json]:
    program = importlib.import_module(f"benchmarks.programs.{given['program']}")
    return program.make(given["root"]), program.OPTIONS | {"num_workers": 2}


def files(given: Json) -> None:
    """Write all files. Those of the quick runs are few."""
    from benchmarks.photos import make_photos
    from benchmarks.programs import files
    from benchmarks.volumes import make_volumes

    root, counts, data = Path(given["root"]), given["counts"], Path(given["data"]) if given["data"] else None
    root.mkdir()
    what = make_photos(root / "photos", data, counts["photos"])
    files.annotate(root)
    made = make_volumes(root / "volumes", None, counts["volumes"])[1]
    for name, make in files.MAKERS.items():
        make(root, counts[name])
    files.enlarge(root / "photos", root / "large" / "photos", counts["large"])
    os.sync()  # the page cache forgets only what has been written
    emit({"what": f"{what}; {made}; sounds, arrays and tensors are made up"})


def torch_digests(given: Json) -> None:
    from benchmarks.programs.model import torch_epochs

    dataset, options = _dataset(given)
    emit({"digests": list(torch_epochs(dataset, EPOCHS, seed=SEED, **options))})


def digests(given: Json) -> None:
    """The digests with stallfree. After the first epoch, the files are not there any more."""
    from benchmarks.programs.model import digest

    dataset, options = _dataset(given)
    root, native = Path(given["root"]), given["program"] in NATIVE
    away = root if native else root.with_name("away")
    with stallfree_loader(dataset, native=native, shuffle=True, seed=SEED, **options) as loader:
        found = [list(map(digest, loader))]
        root.rename(away)
        try:
            found += [list(map(digest, loader)) for _ in range(EPOCHS - 1)]
        finally:
            away.rename(root)
        stats = getattr(loader.dataset, "stats", None)
        emit({"digests": found, "storage_reads": stats().storage_reads if stats else None})


def torch_rates(given: Json) -> None:
    import torch

    dataset, options = _dataset(given)
    loader = torch.utils.data.DataLoader(dataset, shuffle=True, persistent_workers=True, **options)
    _time(loader, len(dataset), given, lambda: None)


def rates(given: Json) -> None:
    dataset, options = _dataset(given)
    join(Path(given["slow"]))
    forget = lambda: forget_pages(Path(given["root"]))  # noqa: E731
    forget()
    with stallfree_loader(dataset, shuffle=True, persistent_workers=True, seed=SEED, **options) as loader:
        _time(loader, len(dataset), given, forget)


def _time(loader: Any, samples: int, given: Json, before: Callable[[], None]) -> None:
    """Samples/s of each epoch after the first, and the bytes that came from storage in each."""
    disk = SlowDisk(Path(), Path(), given["device"])
    found: list[float] = []
    transferred: list[int] = []
    end = 0.0
    while len(found) < 4 or time.perf_counter() < end:
        before()
        read, start = disk.bytes_read(), time.perf_counter()
        for _batch in loader:
            pass
        found.append(samples / (time.perf_counter() - start))
        transferred.append(disk.bytes_read() - read)
        end = end or time.perf_counter() + given["seconds"]
    emit({"rates": found[1:], "first": found[0], "bytes": transferred})


def misses(given: Json) -> None:
    """Misses per later epoch of a cache for a part of the photographs."""
    import numpy as np
    import torch

    import stallfree as sf

    dataset, options = _dataset(given | {"program": "torchvision_folder"})
    total = sum(path.stat().st_size for path in Path(given["root"]).rglob("*.jpg"))
    disk = SlowDisk(Path(), Path(), given["device"])
    with (
        sf.CachedDataset(dataset, capacity=int(total * SHARE), form="files") as cached,
        sf.DataLoader(cached, shuffle=True, seed=SEED, **options) as loader,
    ):
        for _ in loader:
            pass
        found, shares, samples = [], [], len(dataset)
        for _ in range(EPOCHS):
            resident = int(cached.cache.resident(np.arange(samples)).sum())
            forget_pages(Path(given["root"]))
            before, read = cached.stats().misses, disk.bytes_read()
            for _ in loader:
                pass
            found.append(cached.stats().misses - before)
            shares.append((disk.bytes_read() - read) / total)
    versions = {name: version(name) for name in ("stallfree", "torchvision", "timm", "monai", "nibabel", "datasets")}
    result = {"samples": samples, "resident": resident, "misses": found, "shares": shares, "each": total / samples}
    emit(result, torch=torch.__version__, **versions)


def page_cache(given: Json) -> None:
    """Shares of the bytes that come from storage in later epochs, if the page cache has room for a part of them.

    A process that does nothing else reads the files in random order, in a control group whose memory is limited.
    """
    paths = sorted(Path(given["root"]).rglob("*.jpg"))
    total = sum(path.stat().st_size for path in paths)
    disk = SlowDisk(Path(), Path(), given["device"])
    forget_pages(Path(given["root"]))
    parent = Path("/sys/fs/cgroup/memory")
    group, own = parent / f"bench-{os.getpid()}", _memory_group(parent)
    group.mkdir()
    try:
        join(group)
        for path in paths[:2]:
            path.read_bytes()
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + int(total * SHARE)))
        shares = []
        for _ in range(3 + EPOCHS):
            random.shuffle(paths)
            before = disk.bytes_read()
            for path in paths:
                path.read_bytes()
            shares.append((disk.bytes_read() - before) / total)
    finally:
        join(own)
        (group / "memory.force_empty").write_text("0")
        group.rmdir()
    emit({"shares": shares[3:]})


def _memory_group(parent: Path) -> Path:
    """The control group of this process, which bounds its memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controller, path = line.split(":", 2)
        if controller == "memory":
            return parent / path.lstrip("/")
    raise BenchmarkError("this process is in no control group of memory")


MODES = (files, torch_digests, digests, torch_rates, rates, misses, page_cache)

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    {mode.__name__: mode for mode in MODES}[task["mode"]](task)
