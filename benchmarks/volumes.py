"""Small 3D volumes with label volumes, the pipeline over them, and the clock of the Smart Cache.

Needs NumPy, torch and nibabel only, because it also runs in the environment of MONAI.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.timing import MIN_EPOCHS, processor_seconds

SIDE = 64
MARGIN = 4
CROP = 48
SEED = 11

Sample = dict[str, Any]
"""`id`, `image` and `label`: paths at first, then tensors (1, x, y, z)."""
Step = Callable[[Sample], Sample]


class Load:
    """Read both `.nii.gz` files of a sample."""

    def __call__(self, sample: Sample) -> Sample:
        import nibabel

        image, label = nibabel.load(sample["image"]), nibabel.load(sample["label"])
        return {
            "id": sample["id"],
            "image": torch.from_numpy(np.asarray(image.dataobj, np.float32))[None],
            "label": torch.from_numpy(np.asarray(label.dataobj, np.uint8))[None],
            "affine": np.asarray(image.affine, np.float32),
        }


class Scale:
    """Intensities to 0..1, from the lowest to the highest."""

    def __call__(self, sample: Sample) -> Sample:
        image = sample["image"]
        low, high = image.min(), image.max()
        return {**sample, "image": (image - low) / (high - low).clamp(min=1e-6)}


class Resample:
    """To `SIDE` voxels along each axis of the patient: the image linearly, the label by its nearest voxel."""

    def __call__(self, sample: Sample) -> Sample:
        turn = sample["affine"][:3, :3]
        turn = (turn / np.linalg.norm(turn, axis=0)).T[::-1, ::-1].copy()  # torch counts the axes from the last one
        theta = torch.cat((torch.from_numpy(turn), torch.zeros(3, 1)), dim=1)[None]
        grid = functional.affine_grid(theta, [1, 1, *[SIDE] * 3], align_corners=False)
        image, label = sample["image"][None], sample["label"][None].float()
        image = functional.grid_sample(image, grid, padding_mode="border", align_corners=False)
        label = functional.grid_sample(label, grid, mode="nearest", padding_mode="border", align_corners=False)
        return {"id": sample["id"], "image": image[0], "label": label[0].to(torch.uint8)}


class Pad:
    """Zeros on all sides."""

    def __call__(self, sample: Sample) -> Sample:
        around = [MARGIN] * 6
        return {
            **sample,
            "image": functional.pad(sample["image"], around),
            "label": functional.pad(sample["label"], around),
        }


class RandomCrop:
    """A random cube."""

    def __call__(self, sample: Sample) -> Sample:
        room = torch.tensor(sample["image"].shape[1:]) - CROP + 1
        corner = (torch.rand(3) * room).long().tolist()
        cube = (slice(None), *(slice(start, start + CROP) for start in corner))
        return {**sample, "image": sample["image"][cube], "label": sample["label"][cube]}


class RandomFlip:
    """Each axis, half the time."""

    def __call__(self, sample: Sample) -> Sample:
        axes = [axis for axis in (1, 2, 3) if torch.rand(()) < 0.5]
        return {**sample, "image": sample["image"].flip(axes), "label": sample["label"].flip(axes)}


class RandomNoise:
    """Normal noise on the image."""

    def __call__(self, sample: Sample) -> Sample:
        image = sample["image"]
        return {**sample, "image": torch.randn(image.shape).mul_(0.05).add_(image)}


def prepare() -> list[Step]:
    """The deterministic steps."""
    return [Load(), Scale(), Resample(), Pad()]


def augment() -> list[Step]:
    """The random steps. None of them changes its input."""
    return [RandomCrop(), RandomFlip(), RandomNoise()]


class Volumes(torch.utils.data.Dataset[Sample]):
    """All `steps` each time a sample is asked for: no cache."""

    def __init__(self, pairs: list[Sample], steps: list[Step]) -> None:
        self.pairs, self.steps = pairs, steps

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        sample = self.pairs[index]
        for step in self.steps:
            sample = step(sample)
        return sample


# -- data -------------------------------------------------------------------------------------------------------------


def find_pairs(folder: str | Path) -> list[Sample]:
    """Every `images/NAME.nii.gz` below `folder` with its `labels/NAME.nii.gz`, in order, numbered."""
    images = sorted(path for path in Path(folder).rglob("*.nii.gz") if path.parent.name == "images")
    labels = [path.parent.parent / "labels" / path.name for path in images]
    pairs = [(image, label) for image, label in zip(images, labels, strict=True) if label.exists()]
    return [{"id": id, "image": str(image), "label": str(label)} for id, (image, label) in enumerate(pairs)]


def make_volumes(folder: Path, data: Path | None, count: int = 260) -> tuple[Path, str]:
    """Return the folder of the volumes below `data`, or of `count` made-up ones, and what they are."""
    if data is not None and (pairs := find_pairs(data)):
        return data, f"{len(pairs)} volumes of the folder `--data`"
    generator = np.random.default_rng(SEED)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        _write_pair(folder, f"volume-{number:04d}.nii.gz", generator)
    return folder, f"{count} made-up volumes of about 35x50x36 voxels"


def _write_pair(folder: Path, name: str, generator: np.random.Generator) -> None:
    """A noisy volume with a bright body of two parts, of the shapes and wild intensities of real ones."""
    import nibabel

    shape = generator.integers((31, 40, 24), (44, 60, 48))
    axes = np.meshgrid(*(np.linspace(-1, 1, side) for side in shape), indexing="ij")
    middle, size = generator.uniform(-0.2, 0.2, 3), generator.uniform(0.35, 0.6, 3)
    inside = sum(((axis - m) / s) ** 2 for axis, m, s in zip(axes, middle, size, strict=True)) < 1
    label = (inside * np.where(axes[1] < middle[1], 1, 2)).astype(np.uint8)
    image = 40 + 30 * (label > 0) + 10 * (label == 2) + generator.normal(0, 12, shape)
    image = (image.clip(0) * 10 ** generator.uniform(0, 3.5)).round().astype(np.float32)
    nibabel.Nifti1Image(image, np.eye(4)).to_filename(str(folder / "images" / name))
    nibabel.Nifti1Image(label, np.eye(4)).to_filename(str(folder / "labels" / name))


# -- windows ----------------------------------------------------------------------------------------------------------


def time_windows(
    epoch: Callable[[int], Iterable[Any]], total: int, seconds: float, step: float, size: int = 0, rate: float = 0.0
) -> dict[str, Any]:
    """Return steps/s of whole epochs after the first, from before the window moves to after the last step.

    Raises `AssertionError` unless each epoch has exactly the samples that a window over `total` samples has then, or
    all without a window.

    Args:
        epoch: starts the epoch of a number.
        total: number of samples.
        seconds: how long to time.
        step: seconds that the device takes for a batch.
        size: samples of the window; 0 for no window.
        rate: fraction of the window that is replaced after each epoch.
    """
    figures: dict[str, list[float]] = {"rate": [], "of_device": [], "first": [], "processor": []}
    replaced, number, spent = math.ceil(round(size * rate, 9)), 0, 0.0
    while len(figures["rate"]) < MIN_EPOCHS or spent < seconds:
        ids: list[int] = []
        first = busy = 0.0
        steps, processor, start = 0, processor_seconds(), time.perf_counter()
        for batch in epoch(number):
            stepped = time.perf_counter()
            first = first or stepped - start
            time.sleep(step)
            busy += time.perf_counter() - stepped
            ids += np.asarray(batch["id"]).tolist()
            steps += 1
        taken = time.perf_counter() - start
        expected = (np.arange(size) + number * replaced) % total if size else np.arange(total)
        if sorted(ids) != sorted(expected.tolist()):
            raise AssertionError(f"epoch {number} trained on other samples than its window")
        if number:
            figures["rate"].append(steps / taken)
            figures["of_device"].append(busy / taken)
            figures["first"].append(1000 * first)
            figures["processor"].append(1000 * (processor_seconds() - processor) / steps)
            spent += taken
        number += 1
    return figures
