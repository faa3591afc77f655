"""What does a Smart Cache give for volumes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import stallfree as sf
from benchmarks.harness import Case, Condition, Contender, Figure, Options
from benchmarks.volumes import CROP, MARGIN, SIDE, Volumes, augment, find_pairs, make_volumes, prepare, time_windows

Figures = dict[str, Any]


def without_cache(volumes: str, batch: int, step: float, seconds: float) -> Figures:
    pairs = find_pairs(volumes)
    data = Volumes(pairs, prepare() + augment())
    loader: Any = torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=2, persistent_workers=True)
    return time_windows(lambda number: loader, len(pairs), seconds, step)


def stallfree(volumes: str, batch: int, size: int, rate: float, step: float, seconds: float) -> Figures:
    """A window in the order of the volumes, which waits for late replacements, as MONAI's does."""
    pairs = find_pairs(volumes)
    transform = sf.Compose([*prepare(), *map(sf.mark_random, augment())])
    options: Figures = {"replace_rate": rate, "shuffle": False, "on_late": "wait", "num_fill_workers": 1}
    with (
        sf.SmartCacheDataset(pairs, transform, cache_num=size, **options) as data,
        sf.DataLoader(data, batch_size=batch, shuffle=True, num_workers=1, persistent_workers=True) as loader,
    ):
        return time_windows(lambda number: loader, len(pairs), seconds, step, size, rate)


def volumes(scratch: Path, options: Options) -> Figures:
    folder, about = make_volumes(scratch / "volumes", options.data, 80 if options.quick else 260)
    return {"volumes": str(folder), "about": f"{about}, read with nibabel (.nii.gz)."}


CASES = {
    "smart_cache": Case(
        question="Volumes with labels: how many steps/s does a Smart Cache give? Batches of 3, a window of 50, a "
        "tenth of it replaced per epoch by 1 fill process or thread.",
        setup=f"Scaled to 0..1, resampled to {SIDE}x{SIDE}x{SIDE} along the patient's axes, padded by {MARGIN}; then "
        f"a random crop of {CROP}x{CROP}x{CROP}, random flips, noise, with the same code for all contenders. The "
        "device is a wait. Whole epochs after the first are timed, the move of the window included; without a cache "
        "an epoch is all volumes. The samples of every epoch are checked. Processor time is that of all processes, "
        "the filling included.",
        contenders=[
            Contender(
                "torch", "no cache: torch DataLoader, 2 workers", "benchmarks.questions.smart_cache:without_cache"
            ),
            Contender(
                "stallfree", "stallfree SmartCacheDataset, 1 worker", "benchmarks.questions.smart_cache:stallfree"
            ),
            Contender(
                "monai", "MONAI SmartCacheDataset", "benchmarks.peers.monai:smart_cache", venv="monai", tunes=True
            ),
        ],
        figures={
            "rate": Figure("steps/s", ".1f"),
            "of_device": Figure("fraction of the device's rate", ".3f"),
            "first": Figure("first batch of an epoch, ms", ".1f", less=True),
            "processor": Figure("processor time per step, ms", ".1f", less=True),
        },
        conditions=[
            Condition("20", "steps of 20 ms", {"step": 0.02}),
            Condition("5", "steps of 5 ms", {"step": 0.005}),
        ],
        params={"batch": 3, "size": 50, "rate": 0.1},
        prepare=volumes,
    )
}
