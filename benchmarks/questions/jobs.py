"""What do several jobs gain from one preparation?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import stallfree as sf
from benchmarks.consumers import run_consumers
from benchmarks.data import Pairs
from benchmarks.harness import Case, Condition, Contender, Figure, Options
from benchmarks.photos import photos
from benchmarks.processes import Meet, Team, prep_rate
from benchmarks.questions.prep import CropAndFlip, Files, ResizedCrop, timed
from benchmarks.questions.prepared import loader_options, pictures
from benchmarks.timing import find_photos, load_noise_pictures, prepared_rates

Figures = dict[str, Any]
BATCH, SIDE = 32, 224


@sf.mark_random
class CountedCrop(ResizedCrop):
    """A random resized crop that counts the pictures in a file."""

    def __init__(self, ledger: str) -> None:
        super().__init__()
        self.ledger = ledger

    def __call__(self, pixels: Any) -> torch.Tensor:
        with open(self.ledger, "ab", buffering=0) as ledger:
            ledger.write(b".")
        return super().__call__(pixels)


def jobs(
    photos: str, folder: str, prep: float, shared: bool, jobs: int, load: float, epochs: int, bandwidth: float = 0,
    capacity: float = 1.5, policy: str = "minio",
) -> Figures:  # fmt: skip
    """Samples/s of each of several jobs that train on the same photographs; the device of each is a wait.

    Args:
        photos: folder of the pictures.
        folder: for a file that counts what is decoded.
        prep: samples/s that two processes prepare.
        shared: whether the jobs share one `SharedLoader`, or each has torch's loader.
        jobs: how many.
        load: samples/s of each device over `prep`; 0 for a device that is never waited for.
        epochs: that are timed, after one that is not.
        bandwidth: bytes/s of the storage that all jobs share; 0: files in memory.
        capacity: of the cache of the host, over the bytes of all files.
        policy: of the cache.
    """
    ledger = Path(folder) / "decoded"
    ledger.touch()
    source: Any = sf.ImageFolder(photos, CountedCrop(str(ledger)))
    count = len(source) // BATCH * BATCH
    size = sum(path.stat().st_size for path in find_photos(photos))
    if bandwidth:
        source = sf.testing.ThrottledSource(source, bandwidth=bandwidth)
    options: Figures = {"capacity": int(size * capacity), "policy": policy, "form": "fetched", "name": "jobs"}
    pause = BATCH / (prep * load) if load else 0.0
    with Team(jobs, _job, source, photos, str(ledger), options, shared, jobs, epochs, pause) as team:
        team.meet()
        team.meet()
        decoded, read = ledger.stat().st_size, getattr(source, "bytes", 0)
        team.meet()
        team.meet()
        decoded, read = ledger.stat().st_size - decoded, getattr(source, "bytes", 0) - read
        results = team.results()
    rate = sum(rate for rate, _ in results) / jobs
    return {
        "rate": rate,
        "waiting": sum(waiting for _, waiting in results) / jobs,
        "decodes": decoded / epochs / count,
        "read": read / epochs / size,
    }


def _job(
    number: int, meet: Meet, source: Any, photos: str, ledger: str, cache: Figures, shared: bool, jobs: int,
    epochs: int, pause: float,
) -> tuple[float, float]:  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(number)  # jobs that share nothing have different orders
    options: Figures = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    data: Any = Files(find_photos(photos), CountedCrop(ledger))
    if shared or hasattr(source, "bytes"):
        data = sf.CachedDataset(source, **cache)
    if shared:
        loader: Any = sf.SharedLoader(data, group="jobs", num_workers=2, **options)
    else:
        workers = max(1, 2 // jobs)
        loader = torch.utils.data.DataLoader(data, num_workers=workers, persistent_workers=True, **options)
    batches, first = len(loader), iter(loader)
    meet()  # all are in the group before anyone takes a batch
    for _batch in first:
        pass
    meet()
    meet()  # the counters have been read
    begun, waited, taken = time.perf_counter(), 0.0, 0
    for _ in range(epochs):
        before = time.perf_counter()
        for _batch in loader:
            waited += time.perf_counter() - before
            time.sleep(pause)
            taken += 1
            before = time.perf_counter()
        waited += time.perf_counter() - before
    seconds = time.perf_counter() - begun
    if taken != epochs * batches:
        raise AssertionError(f"{taken} batches instead of {epochs * batches}")
    meet()
    if shared:
        loader.close()
    return taken * BATCH / seconds, waited / seconds


def photos_and_prep(scratch: Path, options: Options) -> Figures:
    """Photographs, and the samples/s that two processes prepare out of memory."""
    made: Figures = photos(480)(scratch, options)
    folder = sf.ImageFolder(made["photos"], CountedCrop(str(scratch / "measured")))
    records = [folder.fetch(id) for id in range(0, len(folder), 2)]
    prep = prep_rate(folder.pipeline, records, 2, seconds=options.seconds / 2)
    return made | {"prep": prep, "about": f"{made['about']} P: {prep:,.0f} samples/s."}


# -- one job ----------------------------------------------------------------------------------------------------------


def single(loader: str, data: str, photos: str, folder: str, batch: int, workers: int, seconds: float) -> Figures:
    """One job over JPEG or prepared pictures that are all in the cache, through `DataLoader` or `SharedLoader`."""
    options = loader_options(batch, workers)
    if loader == "shared":
        options.pop("persistent_workers")
        options["group"] = "single"
    make: Any = sf.SharedLoader if loader == "shared" else sf.DataLoader
    if data == "jpeg":
        source: Any = sf.ImageFolder(photos, CropAndFlip())
        size = sum(path.stat().st_size for path in find_photos(photos))
        capacity = 2 * size + (64 << 20)
        with sf.CachedDataset(source, capacity=capacity, form="fetched") as cached, make(cached, **options) as made:
            return timed(made, len(source) // batch * batch, seconds)
    pairs = Pairs(folder, SIDE)
    with sf.CachedDataset(pairs, capacity=pairs.capacity) as cached, make(cached, **options) as made:
        for _batch in made:  # fills the cache
            pass
        return {"rate": prepared_rates(lambda: made, load_noise_pictures(folder, SIDE), batch, seconds)}


# -- batches for several processes ------------------------------------------------------------------------------------


def shared_batches(folder: str, batch: int, consumers: int, seconds: float) -> Figures:
    """Batches/s of each consumer of a `SharedLoader` over a cache that holds all."""
    planes = Pairs(folder, SIDE, planes=True)

    def cached() -> Any:
        return sf.CachedDataset(planes, capacity=planes.capacity, name="planes")

    @contextmanager
    def consume(number: int) -> Iterator[Any]:
        options: Figures = {"batch_size": batch, "shuffle": True, "num_workers": 2}
        with cached() as data, sf.SharedLoader(data, group="batches", **options) as loader:
            yield lambda: loader

    with cached() as data:
        for start in range(0, len(planes), batch):
            data.__getitems__(list(range(start, min(start + batch, len(planes)))))  # fills the cache
        return run_consumers(consume, consumers, len(planes) // batch, seconds)


# -- cases ------------------------------------------------------------------------------------------------------------

HERE = "benchmarks.questions.jobs"
SETUP = (
    "Decode, random resized crop of 224, flip; batches of 32. P: pictures that two processes prepare out of memory "
    "in a second. The device of each job is a wait. `SharedLoader` has 2 workers for all jobs; torch's loaders have "
    "a worker each. One epoch is not timed."
)
OWN, SHARED = "own torch DataLoader", "stallfree, one SharedLoader"
JOB_FIGURES = {
    "rate": Figure("samples/s per job"),
    "waiting": Figure("fraction of the time spent waiting", ".2f", less=True),
}

CASES = {
    "shared_jobs": Case(
        question="2, 4 and 8 jobs on 2 cores decode and augment the same photographs, which are in memory: what does "
        "each of them get from one `SharedLoader`, and what from a torch DataLoader of its own?",
        setup=SETUP,
        contenders=[
            Contender("own", OWN, f"{HERE}:jobs", {"shared": False}),
            Contender("shared", SHARED, f"{HERE}:jobs", {"shared": True}),
        ],
        figures=JOB_FIGURES | {"decodes": Figure("decodes per epoch / N", ".3f", less=True)},
        conditions=[
            Condition(f"{count} {load}", f"{count} jobs, device of {load:g} P", {"jobs": count, "load": load})
            for count, load in ((2, 0.25), (4, 0.25), (8, 0.25), (8, 1.0))
        ],
        ours="shared",
        subject="SharedLoader",
        params={"epochs": 4},
        quick={"epochs": 1},
        rounds=3,
        prepare=photos_and_prep,
    ),
    "shared_storage": Case(
        question="The same jobs behind storage of 60 MB/s for all of them, with a cache for 35% of the data: how "
        "fast is each, and how much do they read?",
        setup=f"{SETUP} All jobs of the host use one cache of pictures as fetched.",
        contenders=[
            Contender("own", f"{OWN}, cache of 35%", f"{HERE}:jobs", {"shared": False}),
            Contender(
                "random",
                f"{OWN}, random replacement",
                f"{HERE}:jobs",
                {"shared": False, "policy": "random"},
                only=("8",),
            ),
            Contender("shared", f"{SHARED}, cache of 35%", f"{HERE}:jobs", {"shared": True}),
        ],
        figures={"rate": Figure("samples/s per job"), "read": Figure("read per epoch / data", ".3f", less=True)},
        conditions=[Condition(str(count), f"{count} jobs", {"jobs": count}) for count in (2, 4, 8)],
        ours="shared",
        subject="SharedLoader",
        params={"load": 0, "bandwidth": 60e6, "capacity": 0.35, "epochs": 3},
        quick={"epochs": 1},
        rounds=3,
        prepare=photos_and_prep,
    ),
    "shared_single": Case(
        question="What does `SharedLoader` cost a job that is alone in its group, against `DataLoader`?",
        setup="Batches of 64, another random order in each epoch, 2 workers; whole epochs after the first are timed.",
        contenders=[
            Contender("alone", "stallfree DataLoader", f"{HERE}:single", {"loader": "alone"}),
            Contender("shared", "stallfree SharedLoader", f"{HERE}:single", {"loader": "shared"}),
        ],
        figures={"rate": Figure("samples/s")},
        conditions=[
            Condition("jpeg", "JPEG in the cache, decoded, cropped and flipped by 2 workers", {"data": "jpeg"}),
            Condition("prepared", "prepared 224x224x3 in the cache, gathered", {"data": "prepared"}),
        ],
        ours="shared",
        subject="SharedLoader",
        params={"batch": 64, "workers": 2},
        prepare=photos(640, pictures=(SIDE, 3200)),
    ),
    "shared_batches": Case(
        question="How many batches of 64x3x224x224 bytes pass on to 1 and to 3 processes that take every batch?",
        setup="Prepared and in memory, another random order in each epoch. View: a consumer touches nothing in a "
        "batch; read: it copies the batch into a buffer. TensorSocket, which is not made for CPUs, gets each batch "
        "gathered into a standing buffer; of its own accord it pickles what is in main memory into its socket, the "
        "other row hands tensors over by name.",
        contenders=[
            Contender("stallfree", "stallfree SharedLoader", f"{HERE}:shared_batches"),
            Contender(
                "own", "TensorSocket", "benchmarks.peers.tensorsocket:batches", {"by_name": False}, venv="tensorsocket"
            ),
            Contender(
                "named",
                "TensorSocket, tensors by name through shared memory",
                "benchmarks.peers.tensorsocket:batches",
                {"by_name": True},
                venv="tensorsocket",
                only=("1",),
            ),
        ],
        figures={"view": Figure("batches/s, view"), "read": Figure("batches/s, read")},
        conditions=[Condition("1", "1 consumer", {"consumers": 1}), Condition("3", "3 consumers", {"consumers": 3})],
        params={"batch": 64, "side": 224},
        rounds=3,
        prepare=pictures(SIDE, 3200),
    ),
}
