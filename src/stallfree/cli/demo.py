"""`stallfree demo`: the same training with PyTorch's loader and with stallfree, on slow storage."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stallfree.errors import InputError
from stallfree.platform import cpu_count
from stallfree.units import format_size, parse_rate, parse_size

if TYPE_CHECKING:
    import torch

    from stallfree.cli._demo_rates import Rates
    from stallfree.cli._demo_train import Epoch, Job
    from stallfree.sources import FileDataset


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        data: a folder of pictures, or None to make one.
        pictures: how many to make, or the most to take out of `data`.
        bandwidth: of the storage, in bytes/s.
        capacity: of the cache, in bytes.
        epochs: for each loader.
        workers: processes of each loader.
        batch_size: samples per batch.
    """

    data: Path | None
    pictures: int
    bandwidth: float
    capacity: int
    epochs: int
    workers: int
    batch_size: int


def demo(
    data: Annotated[
        Path | None, typer.Option(help="A folder of pictures, one folder per class. Made if not given.", metavar="PATH")
    ] = None,
    pictures: Annotated[int, typer.Option(min=1, help="How many to make, or the most to take from --data.")] = 2000,
    bandwidth: Annotated[str, typer.Option(help="Speed of the storage.", metavar="RATE")] = "60MB/s",
    capacity: Annotated[str, typer.Option(help="Memory for the cache.", metavar="SIZE")] = "256MiB",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs for each loader.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes for each loader.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.")] = 64,
) -> None:
    """Train a small network on pictures behind slow storage, with PyTorch's loader and with stallfree, and compare."""
    settings = Settings(
        data=data,
        pictures=pictures,
        bandwidth=parse_rate(bandwidth, "bandwidth"),
        capacity=parse_size(capacity, "capacity"),
        epochs=epochs,
        workers=workers,
        batch_size=batch_size,
    )
    console = Console()
    with _folder(settings, console) as folder:
        seen, rates = run(settings, folder, console)
    from stallfree.cli._demo_report import report

    console.print()
    console.print(report(seen, rates))


def run(settings: Settings, folder: Path, console: Console) -> tuple[list[Epoch], Rates]:
    """Measure, train with both loaders on the pictures in `folder`, and return the epochs and the rates."""
    import torch

    from stallfree.cli._demo_loaders import StallfreeJob, TorchJob
    from stallfree.cli._demo_rates import Measurements, cores_available
    from stallfree.sources import ThrottledSource

    files, classes = _pictures(folder, settings.pictures)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cores = cores_available() if device.type == "cpu" else None
    if cores is not None:
        torch.set_num_threads(max(1, cores // 2))  # the others are for the workers
    console.print(
        f"{len(files):,} pictures in {classes} classes behind storage of {settings.bandwidth / 1e6:,.0f} MB/s; "
        f"{settings.workers} workers, batches of {settings.batch_size}, a cache of {format_size(settings.capacity)}, "
        f"training on {f'the CPU ({cores} cores)' if cores is not None else torch.cuda.get_device_name()}."
    )
    options = {"batch_size": settings.batch_size, "workers": settings.workers}
    seen: list[Epoch] = []
    with _Progress(console) as progress:
        measured = Measurements(files, classes, device, cores, **options)
        with progress.task("measuring", 3) as advance:
            for measure in (measured.prep, lambda: measured.storage(settings.bandwidth), measured.compute):
                measure()
                advance(1)
        with (
            contextlib.closing(ThrottledSource(files, settings.bandwidth)) as source,
            TorchJob(source, **options) as job,
        ):
            seen += _train(job, settings.epochs, len(files), classes, device, progress)
        with (
            contextlib.closing(ThrottledSource(files, settings.bandwidth)) as source,
            StallfreeJob(source, capacity=settings.capacity, **options) as cached_job,
        ):
            seen += _train(cached_job, settings.epochs, len(files), classes, device, progress)
            measured.cache(cached_job)
    return seen, measured.rates()


def _train(job: Job, epochs: int, samples: int, classes: int, device: torch.device, progress: _Progress) -> list[Epoch]:
    from stallfree.cli._demo_train import Trainer, run_epoch

    trainer = Trainer(classes, device)
    seen = []
    for number in range(1, epochs + 1):
        with progress.task(f"{job.name}, epoch {number}", samples) as advance:
            seen.append(run_epoch(job, number, trainer, advance))
    return seen


class _Progress:
    """Bars on a terminal, one line per finished task anywhere else."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> _Progress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    @contextlib.contextmanager
    def task(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a task; yields a function that takes what was done of `total`."""
        task = self._bars.add_task(name, total=total)
        start = time.perf_counter()
        yield lambda done: self._bars.advance(task, done)
        if not self._console.is_terminal:
            self._console.print(f"{name}: {time.perf_counter() - start:.1f} s")


def _pictures(folder: Path, most: int) -> tuple[FileDataset, int]:
    """The pictures in `folder`, `most` of them if there are more, evenly spread; and the number of classes."""
    from stallfree.cli._demo_train import transform
    from stallfree.sources import DecodeImage, FileDataset, ImageFolder

    images = ImageFolder(folder, transform())
    if len(images) <= most:
        return images, len(images.classes)
    chosen = [images.samples[number * len(images) // most] for number in range(most)]
    paths, labels = zip(*chosen, strict=True)
    return FileDataset(paths, labels, transform(), decode=DecodeImage()), len(images.classes)


@contextlib.contextmanager
def _folder(settings: Settings, console: Console) -> Iterator[Path]:
    """The user's folder, or a temporary one with pictures that are made now."""
    if settings.data is not None:
        if not settings.data.is_dir():
            raise InputError(
                f"--data {settings.data} is no folder: give one that holds one folder of pictures per class"
            )
        yield settings.data
        return
    from stallfree.cli._demo_data import make_pictures

    with tempfile.TemporaryDirectory(prefix="stallfree-demo-") as name:
        folder = Path(name)
        with _Progress(console) as progress, progress.task("making pictures", settings.pictures) as advance:
            make_pictures(folder, settings.pictures, processes=cpu_count(), progress=advance)
        yield folder
