"""The random transforms of configurations, with Clara's names and arguments.

They draw from the global generators of NumPy and torch, which the library seeds for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from stallfree.clara.fields import Array, FieldTransform, Sample, Sized, chance, crop, is_number
from stallfree.errors import InputError, clara_field
from stallfree.pipeline.compose import mark_random


@mark_random
class CropFixedSizeRandomCenter(Sized):
    """Crops `size` voxels around a random centre, the same in all fields. All positions are equally likely.

    Args:
        fields: fields to crop; volumes of one size.
        size: voxels per axis.
        max_displacement: largest distance, in voxels per axis, from the volume's centre; unlimited if None.
    """

    def __init__(self, fields: str | Sequence[str], size: Sequence[int], max_displacement: int | None = None) -> None:
        super().__init__(fields, size)
        if max_displacement is not None and (not is_number(max_displacement) or max_displacement < 0):
            raise InputError(f"max_displacement={max_displacement!r}: give voxels, 0 or more, or null")
        self.max_displacement = None if max_displacement is None else int(max_displacement)

    def __call__(self, sample: Sample) -> Sample:
        arrays = {field: self._large_enough(sample, field) for field in self.fields}
        sizes = {array.shape[1:] for array in arrays.values()}
        if len(sizes) > 1:
            found = ", ".join(f"{field!r} {list(array.shape[1:])}" for field, array in arrays.items())
            raise clara_field(f"{self!r}: the fields differ in size ({found}): resample or pad them alike before")
        room = np.subtract(sizes.pop(), self.size)
        first, last = np.zeros_like(room), room
        if self.max_displacement is not None:
            first = np.maximum(room // 2 - self.max_displacement, 0)
            last = np.minimum(room // 2 + self.max_displacement, room)
        starts = np.random.randint(first, last + 1)
        return {**sample, **{field: crop(array, starts, self.size) for field, array in arrays.items()}}


@mark_random
class RandomAxisFlip(FieldTransform):
    """Flips all fields along the same axis, which is chosen at random.

    Args:
        fields: fields to flip.
        probability: probability of a flip, 0 to 1.
    """

    def __init__(self, fields: str | Sequence[str], probability: float = 0.5) -> None:
        super().__init__(fields)
        self.probability = chance(probability)

    def __call__(self, sample: Sample) -> Sample:
        arrays = {field: self._spatial(sample, field) for field in self.fields}
        if np.random.random() >= self.probability:
            return dict(sample)
        axis = np.random.randint(1, min(array.ndim for array in arrays.values()))
        return {**sample, **{field: np.flip(array, axis) for field, array in arrays.items()}}


@mark_random
class AddGaussianNoise(FieldTransform):
    """Adds normal noise to every voxel; float32.

    Args:
        fields: fields that get noise, independent of each other.
        probability: probability of adding noise, 0 to 1.
        variance: variance of the noise.
    """

    def __init__(self, fields: str | Sequence[str], probability: float = 0.5, variance: float = 0.1) -> None:
        super().__init__(fields)
        if not is_number(variance) or variance < 0:
            raise InputError(f"variance={variance!r}: give a number of 0 or more")
        self.probability, self.variance = chance(probability), float(variance)

    def __call__(self, sample: Sample) -> Sample:
        if np.random.random() >= self.probability:
            return dict(sample)
        return super().__call__(sample)

    def _apply(self, array: Array) -> Array:
        noise: Array = torch.randn(array.shape).numpy()
        noise *= math.sqrt(self.variance)
        noise += array
        return noise
