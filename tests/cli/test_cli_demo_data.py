"""The pictures of the demo: like photographs in size, the same each time, and with classes to tell apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stallfree.cli._demo_data import CLASSES, HEIGHT, WIDTH, make_pictures, picture


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))}


def test_files(tmp_path: Path) -> None:
    done: list[int] = []
    size = make_pictures(tmp_path, 130, progress=done.append)
    files = contents(tmp_path)
    assert len(files) == sum(done) == 130
    assert size == sum(map(len, files.values()))
    assert 80_000 < size / 130 < 120_000, "about 100 KB each"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(CLASSES)
    per_class = [len(list((tmp_path / name).iterdir())) for name in CLASSES]
    assert max(per_class) - min(per_class) <= 1


def test_the_same_whatever_the_number_of_processes(tmp_path: Path) -> None:
    make_pictures(tmp_path / "one", 12, processes=1)
    make_pictures(tmp_path / "three", 12, processes=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_another_seed_makes_other_pictures() -> None:
    assert (picture(3, seed=1) != picture(3, seed=2)).any()


def test_no_two_are_alike() -> None:
    assert len({picture(index).tobytes() for index in range(40)}) == 40


def test_shape_and_type() -> None:
    pixels = picture(0)
    assert (pixels.shape, pixels.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)


def test_energy_falls_with_frequency_as_in_photographs() -> None:
    grey = np.mean([picture(index).mean(axis=2) for index in range(8)], axis=0)
    power = np.abs(np.fft.fft2(grey - grey.mean())) ** 2
    radius = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.fftfreq(WIDTH)[None, :])
    bands = [power[(radius >= low) & (radius < 2 * low)].mean() for low in (0.02, 0.04, 0.08, 0.16)]
    slopes = np.diff(np.log2(bands))
    assert slopes == pytest.approx(-2, abs=1), "power falls about as the square of the frequency"


def test_files_are_whole_jpegs(tmp_path: Path) -> None:
    make_pictures(tmp_path, 4, processes=1)
    for path in tmp_path.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.size) == ("JPEG", (WIDTH, HEIGHT))
