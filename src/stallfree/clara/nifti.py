"""`LoadNifti`: reads NIfTI volumes from bytes."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from stallfree.clara.fields import Array, FieldTransform, Sample, spacing_of
from stallfree.errors import InputError, clara_field, image_unreadable, missing_extra
from stallfree.pipeline.compose import mark_deterministic

_GZIP = b"\x1f\x8b"
_NIFTI_2 = (b"\x1c\x02\x00\x00", b"\x00\x00\x02\x1c")
"""The length of the NIfTI-2 header, 540, in either byte order."""


@mark_deterministic
class LoadNifti(FieldTransform):
    """Converts bytes of a NIfTI-1 or NIfTI-2 file, gzipped or not, to an array of shape (x, y, z) or (x, y, z,
    channels).

    It must be the first step, since samples are fetched as bytes. Values are scaled as stated in the header. Requires
    `nibabel` (extra `medical`).

    Args:
        fields: fields to load.
        as_closest_canonical: permute and flip the axes so that they run to the right, front and top as nearly as
            possible.
        dtype: dtype of the result.
    """

    def __init__(
        self, fields: str | Sequence[str], as_closest_canonical: bool | str = False, dtype: str = "float32"
    ) -> None:
        super().__init__(fields)
        if str(as_closest_canonical).lower() not in ("true", "false"):
            raise InputError(f"as_closest_canonical={as_closest_canonical!r}: give true or false")
        self.as_closest_canonical = str(as_closest_canonical).lower() == "true"
        try:
            found = np.dtype(dtype)
        except TypeError:
            found = np.dtype(object)
        if found.kind not in "iuf":
            raise InputError(f'dtype={dtype!r}: give the name of a type of numbers, such as "float32"')
        self.dtype = str(found.name)
        _nibabel()

    def __call__(self, sample: Sample) -> Sample:
        changed = dict(sample)
        for field in self.fields:
            data = self._value(sample, field)
            if not isinstance(data, bytes):
                raise clara_field(
                    f"{self!r}: field {field!r} holds a {type(data).__name__} and no bytes of a file: files are read "
                    "for LoadNifti if it is the first transform, and a number is no file"
                )
            try:
                changed[field], changed[spacing_of(field)] = self._parse(data)
            except Exception as error:  # a damaged file can raise anything
                raise image_unreadable(
                    f"{self!r}: the {len(data)} bytes of field {field!r} are no whole NIfTI volume "
                    f"({type(error).__name__}: {error})"
                ) from error
        return changed

    def _parse(self, data: bytes) -> tuple[Array, Array]:
        nibabel = _nibabel()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
        kind = nibabel.Nifti2Image if data.startswith(_NIFTI_2) else nibabel.Nifti1Image
        image = kind.from_bytes(data)
        if self.as_closest_canonical:
            image = nibabel.as_closest_canonical(image)
        array = np.asarray(image.dataobj).astype(self.dtype, order="C")
        return array, np.array(image.header.get_zooms()[: min(3, array.ndim)], np.float32)


def _nibabel() -> Any:
    try:
        return import_module("nibabel")
    except ImportError as error:
        raise missing_extra("nibabel", "medical", "LoadNifti") from error
