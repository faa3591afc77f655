"""Transforms by name: Clara's in MONAI's classes, MONAI's own, and the user's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from stallfree.clara.configuration import Component, component
from stallfree.errors import StallfreeError, clara_configuration, missing_extra
from stallfree.pipeline.compose import Transform

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}

_CLARA: dict[str, Callable[..., tuple[str, dict[str, Any]]]] = {
    "LoadNifti": lambda as_closest_canonical=False, dtype="float32": ("LoadImaged", {
        "reader": "NibabelReader", "as_closest_canonical": str(as_closest_canonical).lower() == "true",
        "dtype": np.dtype(dtype),
    }),
    "ConvertToChannelsFirst": lambda: ("EnsureChannelFirstd", {}),
    "ScaleIntensityRange": lambda a_min, a_max, b_min, b_max, clip=False: ("ScaleIntensityRanged", {
        "a_min": a_min, "a_max": a_max, "b_min": b_min, "b_max": b_max, "clip": clip,
    }),
    "NormalizeNonzeroIntensities": lambda: ("NormalizeIntensityd", {"nonzero": True, "channel_wise": True}),
    "CenterData": lambda subtrahend=None, divisor=None: ("NormalizeIntensityd", {
        "subtrahend": subtrahend, "divisor": divisor,
    }),
    "ScaleByResolution": lambda target_resolution, is_label=False: ("Spacingd", {
        "pixdim": target_resolution, "mode": "nearest" if is_label else "bilinear",
    }),
    "ScaleToShape": lambda target_shape, is_label=False: ("Resized", {
        "spatial_size": target_shape, "mode": "nearest-exact" if is_label else _LINEAR[len(target_shape)],
    }),
    "SymmetricPadder": lambda size: ("SpatialPadd", {"spatial_size": size}),
    "CropFixedSizeCenter": lambda size: ("CenterSpatialCropd", {"roi_size": size}),
    "CropFixedSizeRandomCenter": lambda size: ("RandSpatialCropd", {"roi_size": size, "random_size": False}),
    "RandomAxisFlip": lambda probability=0.5: ("RandAxisFlipd", {"prob": probability}),
    "AddGaussianNoise": lambda probability=0.5, variance=0.1: ("RandGaussianNoised", {
        "prob": probability, "std": math.sqrt(variance), "sample_std": False,
    }),
}  # fmt: skip
"""Clara's transforms: their arguments after `fields`, the class of MONAI, and its arguments after `keys`."""


def make_transforms(entries: Any, where: str) -> list[Transform]:
    """Create the transforms of `entries`, the list at `where` in the configuration.

    Raises `InputError` for the first invalid one, `MissingExtraError` if it needs a missing package.
    """
    if not isinstance(entries, list) or not entries:
        raise clara_configuration(
            f"{where} is {entries!r}, expected a list of transforms, of which the first loads: "
            '[{"name": "LoadNifti", "args": {"fields": ["image", "label"]}}, ...]'
        )
    return [_make(component(entry, f"{where}[{number}]")) for number, entry in enumerate(entries)]


def _make(wanted: Component) -> Transform:
    where = f"{wanted.where} ({wanted.name or wanted.path})"
    described: Callable[..., Any] = _CLARA.get(wanted.name) or _class(wanted, wanted.name)
    try:
        if wanted.name in _CLARA:
            fields, args = wanted.args["fields"], {key: value for key, value in wanted.args.items() if key != "fields"}
            name, args = described(**args)
            transform = _class(wanted, name)(keys=fields, **args)
        else:
            transform = described(**wanted.args)
    except StallfreeError:
        raise
    except Exception as error:
        arguments = list(map(str, inspect.signature(described).parameters.values()))
        raise clara_configuration(
            f"{where} cannot be made: {type(error).__name__}: {error}; its arguments are "
            f"{', '.join(['fields', *arguments] if wanted.name in _CLARA else arguments) or 'none'}"
        ) from error
    if not callable(transform):
        raise clara_configuration(f"{where} is no transform: its instances cannot be called with a sample")
    return transform  # type: ignore[no-any-return]


def _class(wanted: Component, name: str) -> Callable[..., Any]:
    """Return the user's class at "module.Class", or MONAI's transform `name`."""
    if wanted.path:
        module, _, class_name = wanted.path.rpartition(".")
        try:
            user_class: Callable[..., Any] = getattr(import_module(module), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise clara_configuration(
                f'{wanted.where}: {wanted.path!r} cannot be imported ({error}): give "module.Class", with the module '
                "on Python's path"
            ) from error
        if not callable(user_class):
            kind = type(user_class).__name__
            raise clara_configuration(f"{wanted.where}: {wanted.path!r} is a {kind}, expected a class")
        return user_class
    try:
        library = import_module("monai.transforms")
        import_module("nibabel")
    except ImportError as error:
        raise missing_extra("nibabel" if "nibabel" in str(error) else "monai", "medical", wanted.name) from error
    monai_class = getattr(library, name, None)
    if not isinstance(monai_class, type) or not issubclass(monai_class, library.Transform):
        raise clara_configuration(
            f"{wanted.where}: {name!r} is a transform neither of Clara nor of MONAI: known of Clara are "
            f'{", ".join(_CLARA)}; for one of your own give {{"path": "module.Class"}}'
        )
    return monai_class
