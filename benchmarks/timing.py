"""The clock and the checks of all contenders. Needs NumPy only, because it also runs in the environments of the peers.

An epoch is timed from the request for its first batch until the loader ends it. The loop receives each batch and
touches nothing in it. The first epoch is checked instead: every sample once, under its own label.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Epoch = Callable[[], Iterable[Any]]
"""Starts an epoch: returns an iterable of batches."""

MIN_EPOCHS = 3
CROP_SIDE, CROP_AREA, CROP_RATIO = 224, (0.08, 1.0), (3 / 4, 4 / 3)
"""Size, area and aspect ratio of the random crops in `fast_prep`."""

_NOISE = 1 << 16
_WARM_BATCHES = 4


def epoch_rates(epoch: Epoch, samples: int, seconds: float, pause: float = 0.0) -> list[float]:
    """Return samples/s of each epoch: at least three, and for at least `seconds`.

    Args:
        epoch: starts an epoch.
        samples: of an epoch.
        seconds: how long to time.
        pause: seconds that the device takes for a batch.
    """
    rates: list[float] = []
    batches, spent = 0, 0.0
    while len(rates) < MIN_EPOCHS or spent < seconds:
        count, start = 0, time.perf_counter()
        for _batch in epoch():
            count += 1
            if pause:
                time.sleep(pause)
        taken = time.perf_counter() - start
        if count != (batches or count):
            raise AssertionError(f"{count} batches, {batches} in the epoch before")
        batches = count
        rates.append(samples / taken)
        spent += taken
    return rates


def check_labels(labels: Iterable[Any], samples: int) -> None:
    """Raise `AssertionError` unless each of `samples` labels occurs once in the batches of `labels`."""
    seen = np.zeros(samples, np.int64)
    for batch in labels:
        np.add.at(seen, np.asarray(batch).reshape(-1), 1)
    if not (seen == 1).all():
        raise AssertionError(f"{(seen == 0).sum()} samples are missing, {(seen > 1).sum()} came more than once")


def best_of(settings: dict[str, Callable[[], Epoch]], setting: str, measure: Callable[[Epoch], Any]) -> dict[str, Any]:
    """Measure `setting`; without one, measure each and name the fastest, as `{"setting": name, "tried": number}`."""
    if setting:
        return {"rate": measure(settings[setting]())}
    tried: dict[str, float] = {}
    for name, make in settings.items():
        try:
            tried[name] = float(np.median(measure(make())))
        except Exception as error:
            print(f"setting {name}: {error!r}", file=sys.stderr)
            tried[name] = 0.0
    return {"setting": max(tried, key=lambda name: tried[name]), "tried": len(tried)}


# -- prepared pictures ------------------------------------------------------------------------------------------------


def make_noise_pictures(folder: Path, side: int, samples: int) -> str:
    """Write noise pictures with a fixed seed, (samples, side, side, 3), and return what they are."""
    shape = (samples, side, side, 3)
    pictures = np.lib.format.open_memmap(folder / f"pictures-{side}.npy", mode="w+", dtype=np.uint8, shape=shape)
    generator = np.random.default_rng(side)
    for start in range(0, samples, 256):
        part = pictures[start : start + 256]
        part[:] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    pictures.flush()
    return f"{samples:,} pictures of {side}x{side}x3 bytes ({pictures.nbytes / 2**30:.2f} GiB) in memory."


def load_noise_pictures(folder: str, side: int) -> Bytes:
    """Return the pictures, mapped from their file in memory. The label of a picture is its index."""
    pictures: Bytes = np.load(Path(folder) / f"pictures-{side}.npy", mmap_mode="r")
    return pictures


def prepared_rates(epoch: Epoch, pictures: Bytes, batch: int, seconds: float) -> list[float]:
    """Check the labels and pixels of one epoch of pairs, then return samples/s of others."""

    def checked() -> Iterable[Any]:
        for images, labels in epoch():
            numbers = np.asarray(labels).reshape(-1)
            images = np.asarray(images).reshape(len(numbers), *pictures.shape[1:])
            for position in (0, len(numbers) - 1):
                if not np.array_equal(images[position], pictures[numbers[position]]):
                    raise AssertionError(f"the picture with label {numbers[position]} is a different one")
            yield numbers.copy()

    check_labels(checked(), len(pictures))
    return epoch_rates(epoch, len(pictures) // batch * batch, seconds)


# -- photographs ------------------------------------------------------------------------------------------------------


def find_photos(photos: str) -> list[Path]:
    """Return all photographs `photos`/CLASS/NAME.jpg; the label of one is its position."""
    return sorted(Path(photos).glob("*/*.jpg"))


def crop_rates(epoch: Epoch, samples: int, batch: int, seconds: float) -> list[float]:
    """Check one epoch of 224x224 crops with labels, then return samples/s of others."""
    labels: list[int] = []
    for pictures, numbers in epoch():
        array = np.asarray(pictures)
        if array.dtype != np.uint8 or sorted(array.shape) != sorted((batch, CROP_SIDE, CROP_SIDE, 3)):
            raise AssertionError(f"a batch of {array.dtype}, shape {array.shape}")
        if not 20 < array.mean() < 235 or array.std() < 10:
            raise AssertionError(f"these are no photographs: mean {array.mean()}, standard deviation {array.std()}")
        labels += np.asarray(numbers).reshape(-1).tolist()
    if len(labels) != samples // batch * batch or len(set(labels)) != len(labels):
        raise AssertionError(f"{len(labels)} samples, {len(set(labels))} different ones, of {samples}")
    return epoch_rates(epoch, samples // batch * batch, seconds)


# -- records of a store -----------------------------------------------------------------------------------------------


def make_noise(size: int) -> Bytes:
    """Return what records of `size` bytes are cut out of."""
    return np.random.default_rng(size).integers(0, 256, size + _NOISE, dtype=np.uint8)


def make_record(noise: Bytes, id: int) -> Bytes:
    """Return the record `id`: its id in 8 bytes, then a piece of `noise`."""
    start = id * 64 % _NOISE
    record: Bytes = noise[start : start + len(noise) - _NOISE].copy()
    record[:8] = np.frombuffer(int(id).to_bytes(8, "little"), np.uint8)
    return record


def read_rate(read: Callable[[list[int]], Any], count: int, batch: int, seconds: float) -> float:
    """Return samples/s of `read(ids)` for random batches of `count` ids.

    The first batches are not counted. Each result is still held during the next call, as in a loop over batches.
    """
    generator = np.random.default_rng(batch)
    order: list[int] = []
    samples, warm, start = 0, False, time.perf_counter()
    while (now := time.perf_counter()) < start + seconds or not warm:
        if not warm and samples >= _WARM_BATCHES * batch and now > start + seconds / 10:
            start, samples, warm = now, 0, True
        if len(order) < batch:
            order = generator.permutation(count).tolist()
        ids, order = order[:batch], order[batch:]
        held = read(ids)  # noqa: F841
        samples += batch
    return samples / (time.perf_counter() - start)


# -- processes --------------------------------------------------------------------------------------------------------


def family(pid: int | None = None) -> list[int]:
    """Return this process, or `pid`, and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            children.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(entry))
    pids, pending = [], [os.getpid() if pid is None else pid]
    while pending:
        pids.append(pending.pop())
        pending += children.get(pids[-1], [])
    return pids


def processor_seconds() -> float:
    """Return the processor time of this process and of all below it, ended ones included."""
    ticks = 0
    for pid in family():
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / float(os.sysconf("SC_CLK_TCK"))
