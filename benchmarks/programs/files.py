"""The files that the programs read, made up except for photographs and volumes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def annotate(root: Path) -> None:
    """A table of labels and one file of polygons for each of the photographs `root`/photos/CLASS/NAME.jpg."""
    photos = sorted((root / "photos").rglob("*.jpg"))
    classes = sorted({path.parent.name for path in photos})
    with open(root / "labels.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "label"])
        table.writerows([path.relative_to(root / "photos"), classes.index(path.parent.name)] for path in photos)
    (root / "polygons").mkdir()
    for number, path in enumerate(photos):
        points = np.random.default_rng(number).uniform(0, Image.open(path).size, (3, 5, 2)).round(1).tolist()
        shapes = [{"label": label, "points": polygon} for label, polygon in enumerate(points, 1)]
        found = {"image": str(path.relative_to(root)), "shapes": shapes}
        (root / "polygons" / f"{path.stem}.json").write_text(json.dumps(found))


def small_photos(root: Path, count: int) -> None:
    """Pictures of 220x180 pixels in two classes."""
    for number in range(count):
        folder = root / "photos" / ("odd" if number % 2 else "even")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (18, 22, 3), np.uint8)
        Image.fromarray(pixels).resize((220, 180)).save(folder / f"{number:05d}.jpg")


def words(root: Path, count: int) -> None:
    """Sounds of about a second."""
    from scipy.io import wavfile

    (root / "words").mkdir()
    for number in range(count):
        rng = np.random.default_rng(number)
        time = np.arange(rng.integers(5000, 9000)) / 8000
        wave = 9000 * np.sin(time * rng.uniform(600, 3000)) + rng.normal(0, 500, len(time))
        wavfile.write(root / "words" / f"{number % 10}_{number:05d}.wav", 8000, wave.astype(np.int16))


def features(root: Path, count: int) -> None:
    """Archives of about 100 frames of 128 numbers and a label."""
    (root / "features").mkdir()
    for number in range(count):
        rng = np.random.default_rng(number)
        frames = rng.random((rng.integers(80, 120), 128), np.float32)
        np.savez(root / "features" / f"{number:05d}.npz", features=frames, label=number % 10)


def clips(root: Path, count: int) -> None:
    """Tensors of 12 frames of 64x64 bytes, and a label."""
    (root / "clips").mkdir()
    for number in range(count):
        frames = torch.from_numpy(np.random.default_rng(number).integers(0, 256, (12, 1, 64, 64), np.uint8))
        torch.save({"frames": frames, "label": number % 10}, root / "clips" / f"{number:05d}.pt")


MAKERS = {"words": words, "features": features, "clips": clips}
