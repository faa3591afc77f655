"""The deterministic transforms of configurations, with Clara's names and arguments.

A transform returns a new dict and does not change its input arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from stallfree.clara.fields import (
    AXES,
    Array,
    FieldTransform,
    Sample,
    Sized,
    crop,
    is_number,
    spacing_of,
    voxels_per_axis,
)
from stallfree.errors import InputError, clara_field
from stallfree.pipeline.compose import mark_deterministic


@mark_deterministic
class ConvertToChannelsFirst(FieldTransform):
    """Converts (x, y, z) to (1, x, y, z), and (x, y, z, channels) to (channels, x, y, z); two axes likewise.

    Apply it once per field. Fields read by `LoadNifti` have known axes; other fields with 4 axes count as channels
    last.
    """

    def __call__(self, sample: Sample) -> Sample:
        changed = dict(sample)
        for field in self.fields:
            array, spacing = self._volume(sample, field), sample.get(spacing_of(field))
            axes = min(array.ndim, 3) if spacing is None else len(spacing)
            if array.ndim not in (axes, axes + 1) or axes not in AXES:
                raise clara_field(
                    f"{self!r}: field {field!r} has shape {array.shape}, expected 2 or 3 axes, or channels"
                )
            first = array[None] if array.ndim == axes else np.moveaxis(array, -1, 0)
            changed[field] = np.ascontiguousarray(first)
        return changed


@mark_deterministic
class ScaleIntensityRange(FieldTransform):
    """Maps values from `a_min`..`a_max` to `b_min`..`b_max`, linearly; float32.

    Args:
        fields: fields to scale.
        a_min, a_max: input range.
        b_min, b_max: output range.
        clip: clip values outside the range.
    """

    def __init__(
        self, fields: str | Sequence[str], a_min: float, a_max: float, b_min: float, b_max: float, clip: bool = False
    ) -> None:
        super().__init__(fields)
        if not all(map(is_number, (a_min, a_max, b_min, b_max))) or a_min == a_max:
            raise InputError(
                f"a_min={a_min!r}, a_max={a_max!r}, b_min={b_min!r}, b_max={b_max!r}: give numbers, a_min not a_max"
            )
        self.a_min, self.a_max, self.b_min, self.b_max, self.clip = a_min, a_max, b_min, b_max, bool(clip)

    def _apply(self, array: Array) -> Array:
        scaled: Array = np.subtract(array, self.a_min, dtype=np.float32)
        scaled *= (self.b_max - self.b_min) / (self.a_max - self.a_min)
        scaled += self.b_min
        if self.clip:
            np.clip(scaled, min(self.b_min, self.b_max), max(self.b_min, self.b_max), out=scaled)
        return scaled


@mark_deterministic
class NormalizeNonzeroIntensities(FieldTransform):
    """Scales nonzero voxels to mean 0 and standard deviation 1 in each channel; the others stay 0. float32."""

    def _array(self, sample: Sample, field: str) -> Array:
        return self._spatial(sample, field)

    def _apply(self, array: Array) -> Array:
        scaled = array.astype(np.float32)
        for channel in scaled:
            inside = channel != 0
            if inside.any():
                values = channel[inside]
                channel[inside] = (values - values.mean()) / (values.std() or 1.0)
        return scaled


@mark_deterministic
class CenterData(FieldTransform):
    """Subtracts `subtrahend` and divides by `divisor`; float32.

    Args:
        fields: fields to centre.
        subtrahend: a number; the mean of the field if None.
        divisor: a number; the standard deviation of the field if None.
    """

    def __init__(
        self, fields: str | Sequence[str], subtrahend: float | None = None, divisor: float | None = None
    ) -> None:
        super().__init__(fields)
        for name, number in (("subtrahend", subtrahend), ("divisor", divisor)):
            if number is not None and (not is_number(number) or (name == "divisor" and number == 0)):
                raise InputError(f"{name}={number!r}: give a number{' other than 0' if name == 'divisor' else ''}")
        self.subtrahend, self.divisor = subtrahend, divisor

    def _apply(self, array: Array) -> Array:
        centred = array.astype(np.float32)
        divisor = float(centred.std()) or 1.0 if self.divisor is None else self.divisor
        centred -= centred.mean() if self.subtrahend is None else self.subtrahend
        centred /= divisor
        return centred


@mark_deterministic
class ScaleByResolution(FieldTransform):
    """Resamples to voxels of size `target_resolution`, as nearly as integer numbers of voxels allow.

    Args:
        fields: fields to resample, read by `LoadNifti`, which records their voxel size.
        target_resolution: millimetres per axis.
        is_label: use nearest-neighbour instead of linear interpolation.
    """

    def __init__(self, fields: str | Sequence[str], target_resolution: Sequence[float], is_label: bool = False) -> None:
        super().__init__(fields)
        if not isinstance(target_resolution, (list, tuple)) or not all(
            is_number(size) and size > 0 for size in target_resolution
        ):
            raise InputError(f"target_resolution={target_resolution!r}: give millimetres per axis, such as [1, 1, 1]")
        self.target_resolution, self.is_label = tuple(map(float, target_resolution)), bool(is_label)

    def __call__(self, sample: Sample) -> Sample:
        changed = dict(sample)
        for field in self.fields:
            array = self._spatial(sample, field, len(self.target_resolution))
            spacing = self._value(sample, spacing_of(field))
            wanted = np.rint(np.multiply(array.shape[1:], spacing) / self.target_resolution).astype(int)
            changed[field] = _resize(array, np.maximum(wanted, 1).tolist(), self.is_label)
            changed[spacing_of(field)] = np.array(self.target_resolution, np.float32)
        return changed


@mark_deterministic
class ScaleToShape(FieldTransform):
    """Resamples to `target_shape` voxels per axis, regardless of proportions.

    Args:
        fields: fields to resample.
        target_shape: voxels per axis.
        is_label: use nearest-neighbour instead of linear interpolation.
    """

    def __init__(self, fields: str | Sequence[str], target_shape: Sequence[int], is_label: bool = False) -> None:
        super().__init__(fields)
        self.target_shape, self.is_label = voxels_per_axis(target_shape, "target_shape"), bool(is_label)

    def __call__(self, sample: Sample) -> Sample:
        changed = dict(sample)
        for field in self.fields:
            array = self._spatial(sample, field, len(self.target_shape))
            changed[field] = _resize(array, self.target_shape, self.is_label)
            if spacing_of(field) in sample:
                grown = np.divide(array.shape[1:], self.target_shape)
                changed[spacing_of(field)] = (sample[spacing_of(field)] * grown).astype(np.float32)
        return changed


@mark_deterministic
class SymmetricPadder(Sized):
    """Pads symmetrically with zeros to at least `size` voxels per axis; larger axes are left unchanged.

    Args:
        fields: fields to pad.
        size: least voxels per axis.
    """

    def _apply(self, array: Array) -> Array:
        missing = np.maximum(np.subtract(self.size, array.shape[1:]), 0).tolist()
        return np.pad(array, [(0, 0), *((gap // 2, gap - gap // 2) for gap in missing)]) if any(missing) else array


@mark_deterministic
class CropFixedSizeCenter(Sized):
    """Crops the central `size` voxels.

    Args:
        fields: fields to crop.
        size: voxels per axis.
    """

    def _array(self, sample: Sample, field: str) -> Array:
        return self._large_enough(sample, field)

    def _apply(self, array: Array) -> Array:
        return crop(array, np.subtract(array.shape[1:], self.size) // 2, self.size)


def _resize(array: Array, size: Sequence[int], nearest: bool) -> Array:
    """Resample `array` to `size` voxels per axis. Linear interpolation of integers gives float32."""
    if array.shape[1:] == tuple(size):
        return array
    tensor = torch.from_numpy(np.ascontiguousarray(array, np.float32))[None]
    mode = {"mode": "nearest-exact"} if nearest else {"mode": AXES[len(size)], "align_corners": False}
    resized: Array = functional.interpolate(tensor, tuple(size), **mode)[0].numpy()
    return resized.astype(array.dtype, copy=False) if nearest or array.dtype.kind == "f" else resized
