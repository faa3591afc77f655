"""Common base classes of the transforms: fields of a sample, and argument checks.

A sample is a dict. A *field* of it, such as "image", holds an array of shape (channels, *axes), with 2 or 3 spatial
axes. For a field read by `LoadNifti`, the key "FIELD.spacing" holds the voxel size in millimetres per axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stallfree.errors import InputError, clara_field

Sample = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]

AXES = {2: "bilinear", 3: "trilinear"}
"""The supported numbers of spatial axes, and torch's name of linear interpolation for each."""


class FieldTransform:
    """Base class of the transforms: the fields that they process.

    Args:
        fields: the name of a field, or several.
    """

    def __init__(self, fields: str | Sequence[str]) -> None:
        names = [fields] if isinstance(fields, str) else fields
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
            raise InputError(f'fields={fields!r}: give the name of a field, such as "image", or a list of them')
        self.fields = tuple(names)

    def __call__(self, sample: Sample) -> Sample:
        return {**sample, **{field: self._apply(self._array(sample, field)) for field in self.fields}}

    def _array(self, sample: Sample, field: str) -> Array:
        """Return the array that `_apply` gets."""
        return self._volume(sample, field)

    def _apply(self, array: Array) -> Array:
        """Transform the array of one field."""
        raise NotImplementedError

    def _value(self, sample: Sample, field: str) -> Any:
        if field not in sample:
            raise clara_field(
                f"{self!r}: the sample has no field {field!r}: give one of {', '.join(map(repr, sample))}"
            )
        return sample[field]

    def _volume(self, sample: Sample, field: str) -> Array:
        """Return the array in `field`, converted from a tensor if necessary, as made by MONAI."""
        value = self._value(sample, field)
        if isinstance(value, torch.Tensor):
            value = value.detach().as_subclass(torch.Tensor).numpy()
        if not isinstance(value, np.ndarray):
            raise clara_field(
                f"{self!r}: field {field!r} holds a {type(value).__name__} and no volume: put a step that loads it, "
                "such as LoadNifti, first"
            )
        return value

    def _spatial(self, sample: Sample, field: str, axes: int | None = None) -> Array:
        """Return the array in `field`, of shape (channels, *axes)."""
        array, spacing = self._volume(sample, field), sample.get(spacing_of(field))
        if axes is None:
            axes = array.ndim - 1 if spacing is None else len(spacing)
        if array.ndim != axes + 1 or axes not in AXES:
            raise clara_field(
                f"{self!r}: field {field!r} has shape {array.shape}, expected channels and {axes} axes: put "
                "ConvertToChannelsFirst before, and give a number for each axis"
            )
        return array

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.fields)})"


def spacing_of(field: str) -> str:
    """Return the key that holds the voxel size of `field`."""
    return f"{field}.spacing"


class Sized(FieldTransform):
    """A transform with a size in voxels per axis."""

    def __init__(self, fields: str | Sequence[str], size: Sequence[int]) -> None:
        super().__init__(fields)
        self.size = voxels_per_axis(size, "size")

    def _array(self, sample: Sample, field: str) -> Array:
        return self._spatial(sample, field, len(self.size))

    def _large_enough(self, sample: Sample, field: str) -> Array:
        array = Sized._array(self, sample, field)
        if any(have < want for have, want in zip(array.shape[1:], self.size, strict=True)):
            raise clara_field(
                f"{self!r}: field {field!r} has {list(array.shape[1:])} voxels, fewer than the crop of "
                f"{list(self.size)}: put SymmetricPadder or a resampling before"
            )
        return array


def crop(array: Array, starts: Array, size: Sequence[int]) -> Array:
    """Return the `size` voxels of `array` from `starts` on, in all channels, as a view."""
    places = zip(starts.tolist(), size, strict=True)
    cut = (slice(None), *(slice(start, start + length) for start, length in places))
    return array[cut]


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def voxels_per_axis(size: Any, name: str) -> tuple[int, ...]:
    """Return `size` as a tuple. Raises `InputError`, which calls it `name`, unless it is 2 or 3 positive integers."""
    whole = isinstance(size, (list, tuple)) and all(
        isinstance(voxels, int) and not isinstance(voxels, bool) and voxels > 0 for voxels in size
    )
    if not whole or len(size) not in AXES:
        raise InputError(f"{name}={size!r}: give voxels per axis, 2 or 3 whole numbers such as [96, 96, 96]")
    return tuple(size)


def is_share(value: Any) -> bool:
    """Return whether `value` is a number within 0 to 1."""
    return is_number(value) and 0 <= value <= 1


def is_text(value: Any) -> bool:
    """Return whether `value` is a string and not empty."""
    return isinstance(value, str) and value != ""


def chance(probability: Any) -> float:
    """Return `probability` as a float. Raises `InputError` unless it is within 0 to 1."""
    if not is_share(probability):
        raise InputError(f"probability={probability!r}: give a number of 0 to 1")
    return float(probability)
