"""MONAI's SmartCacheDataset over the volumes, with each of the loaders that its guide names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import monai
import torch
from monai.data import DataLoader, SmartCacheDataset, ThreadDataLoader
from monai.transforms import Compose, RandomizableTransform, Transform

from benchmarks.contender import emit
from benchmarks.smart_steps import SmartTask, measure, measure_settings, read_task
from benchmarks.volumes import Step, augment, find_pairs, prepare


class Fixed(Transform):
    """A step that MONAI may cache."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self, data: Any) -> Any:
        return self.step(data)


class Random(RandomizableTransform):
    """A step that MONAI must not cache. It draws from torch's generator, as it does for everyone."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __call__(self, data: Any) -> Any:
        return self.step(data)


def run(
    task: SmartTask,
    workers: int,
    *,
    threads: str = "",
    fillers: int = 1,
    copy: bool = False,
    contiguous: bool = True,
    persistent: bool = False,
    ahead: int = 2,
    torch_threads: int = 0,
) -> dict[str, Any]:
    """One setting. `threads`: "buffer" for a thread that runs ahead, "workers" for workers that are threads."""
    if torch_threads:
        torch.set_num_threads(torch_threads)
    pairs = find_pairs(task.volumes)
    data = SmartCacheDataset(
        pairs,
        Compose([Fixed(step) for step in prepare()] + [Random(step) for step in augment()]),
        replace_rate=task.rate,
        cache_num=task.size,
        num_init_workers=2,
        num_replace_workers=fillers,
        progress=False,
        shuffle=False,
        copy_cache=copy,
        as_contiguous=contiguous,
    )
    common: dict[str, Any] = {"batch_size": task.batch, "shuffle": True, "num_workers": workers}
    if workers:
        common |= {"prefetch_factor": ahead, "persistent_workers": persistent}
    if threads:
        loader: Any = ThreadDataLoader(data, buffer_size=ahead, use_thread_workers=threads == "workers", **common)
    else:
        loader = DataLoader(data, **common)

    def epoch(number: int) -> Iterable[Any]:
        if number:
            data.update_cache()
        return loader

    data.start()
    try:
        return measure(epoch, task, len(pairs), windowed=True)
    finally:
        data.shutdown()


def settings(task: SmartTask) -> dict[str, Callable[[], dict[str, Any]]]:
    """The settings worth trying, by name. With persistent workers the window does not move, which the check refuses."""
    grid: dict[str, tuple[int, dict[str, Any]]] = {
        "DataLoader, num_workers=0": (0, {}),
        "DataLoader, num_workers=0, copy_cache=True": (0, {"copy": True}),
        "DataLoader, num_workers=1": (1, {}),
        "DataLoader, num_workers=2": (2, {}),
        "DataLoader, num_workers=2, copy_cache=True": (2, {"copy": True}),
        "DataLoader, num_workers=2, persistent_workers=True": (2, {"persistent": True}),
        "ThreadDataLoader, num_workers=0, buffer_size=1": (0, {"threads": "buffer", "ahead": 1}),
        "ThreadDataLoader, num_workers=0, buffer_size=4": (0, {"threads": "buffer", "ahead": 4}),
        "ThreadDataLoader, num_workers=0, buffer_size=4, as_contiguous=False": (
            0,
            {"threads": "buffer", "ahead": 4, "contiguous": False},
        ),
        "ThreadDataLoader, num_workers=0, buffer_size=4, num_replace_workers=2": (
            0,
            {"threads": "buffer", "ahead": 4, "fillers": 2},
        ),
        "ThreadDataLoader, num_workers=0, buffer_size=4, torch.set_num_threads(1)": (
            0,
            {"threads": "buffer", "ahead": 4, "torch_threads": 1},
        ),
        "ThreadDataLoader, num_workers=1, use_thread_workers=True": (1, {"threads": "workers"}),
        "ThreadDataLoader, num_workers=2, use_thread_workers=True": (2, {"threads": "workers"}),
    }
    before = torch.get_num_threads()

    def ready(workers: int, more: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        def go() -> dict[str, Any]:
            torch.set_num_threads(before)
            return run(task, workers, **more)

        return go

    return {name: ready(workers, more) for name, (workers, more) in grid.items()}


def main() -> None:
    task = read_task()
    result = measure_settings(settings(task), task)
    emit(result, monai=version("monai"), torch=torch.__version__)


if __name__ == "__main__":
    monai.data.set_track_meta(False)
    main()
