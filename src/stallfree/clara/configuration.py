"""Clara's training configuration: JSON with placeholders, the arguments of an `image_pipeline`, and transforms."""

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from stallfree.errors import StallfreeError, clara_configuration, missing_extra
from stallfree.pipeline.compose import Transform
from stallfree.sources.paths import canonical, read_file

_PIPELINES = [f"{task}ImagePipeline{end}" for task in ("Segmentation", "Classification") for end in ("", "WithCache")]

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


def read_json(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Return the JSON object in the file at `path`, local or a fsspec URL. `what` is its name in messages.

    Raises `InputError` if the file cannot be read, is not JSON, or contains anything but an object.
    """
    path = canonical(path)
    try:
        content = json.loads(read_file(path))
    except StallfreeError:
        raise
    except Exception as error:
        raise clara_configuration(f"{what} {path!r} cannot be read as JSON ({error}): correct it") from error
    if not isinstance(content, dict):
        raise wrong(f"{what} {path!r}", content, "an object: {...}")
    return content


def wrong(where: str, value: Any, expected: str) -> StallfreeError:
    """Return the error for a `value` in the configuration or data list that is not as `expected`."""
    return clara_configuration(f"{where} is {value!r:.200}, expected {expected}")


def fill(value: Any, where: str, variables: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return `value` with all placeholders replaced by `variables`, at any depth.

    A string that is a single placeholder becomes the variable itself, a number for instance. Raises `InputError` for an
    undefined placeholder, and for one that refers to itself, through those that it is `within`.
    """
    if isinstance(value, dict):
        return {key: fill(item, f"{where}.{key}", variables) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, f"{where}[{number}]", variables) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def variable(name: str) -> Any:
        if name in within:
            raise clara_configuration(f"{where}: {{{name}}} stands for itself ({' -> '.join((*within, name))})")
        if name not in variables:
            advice = f'pass load(..., {name}=...), or put "{name}" at the top of the configuration'
            raise clara_configuration(f"{where} is {value!r}, and nothing says what {{{name}}} stands for: {advice}")
        content = variables[name]
        content = os.fspath(content) if isinstance(content, os.PathLike) else content
        return fill(content, where, variables, (*within, name)) if isinstance(content, str) else content

    single = _PLACEHOLDER.fullmatch(value)
    return variable(single[1]) if single else _PLACEHOLDER.sub(lambda match: str(variable(match[1])), value)


class Component(NamedTuple):
    """An object named in a configuration: `name` of a known class or `path` of a user's one, and its arguments."""

    where: str
    name: str
    path: str
    args: dict[str, Any]


def component(entry: Any, where: str) -> Component:
    """Return the component that `entry` describes. Raises `InputError` if it is invalid."""
    if not isinstance(entry, dict):
        raise wrong(where, entry, 'an object: {"name": ..., "args": {...}}')
    if unknown := sorted(entry.keys() - {"name", "path", "args", "search"}):  # only Clara's AutoML uses `search`
        raise clara_configuration(f"{where} has the unknown key {unknown[0]!r}: use name, path, args")
    name, path, args = entry.get("name", ""), entry.get("path", ""), entry.get("args", {})
    if not isinstance(name, str) or not isinstance(path, str) or bool(name) == bool(path):
        raise wrong(where, entry, '"name" for what is known here, or "path" for a class of your own ("module.Class")')
    if not isinstance(args, dict):
        raise wrong(f"{where}.args", args, 'an object: {"argument": value, ...}')
    return Component(where, name, path, args)


# -- arguments of an image_pipeline -----------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_text(value: Any) -> bool:
    """Return whether `value` is a string and not empty."""
    return isinstance(value, str) and value != ""


def _is_whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (2, 3) and all(_is_whole(-1)(n) and n != 0 for n in value)


_REQUIRED = object()
_ARGUMENTS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "data_list_file_path": (_REQUIRED, is_text, "the path of the data list, a JSON file"),
    "data_file_base_dir": (_REQUIRED, is_text, "the folder that the paths in the data list are relative to"),
    "data_list_key": (_REQUIRED, is_text, 'a key of the data list, such as "training"'),
    "output_crop_size": (_REQUIRED, _is_size, "2 or 3 whole numbers of voxels: [96, 96, 96]; -1 is any number"),
    "output_batch_size": (10, _is_whole(1), "samples per batch, an int of 1 or more"),
    "num_workers": (4, _is_whole(0), "worker processes, an int of 0 or more"),
    "prefetch_size": (0, _is_whole(0), "batches to prepare ahead, an int of 0 or more"),
    "shuffle": (None, lambda value: isinstance(value, bool), "true or false"),
    "repeat": (None, lambda value: isinstance(value, bool), "true or false (one iteration is one epoch, either way)"),
    "output_data_dims": (None, lambda value: value in (2, 3), "2 or 3"),
    "output_image_channels": (None, _is_whole(1), "channels of the image, an int of 1 or more"),
    "output_label_format": (None, lambda value: value in (None, *([1] * n for n in range(9))), "1 for each label"),
}
"""The arguments of a pipeline: for each its default, a check, and what it must be."""

_CACHE_ARGUMENTS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "num_cache_objects": (_REQUIRED, _is_whole(1), "samples kept in memory, an int of 1 or more"),
    "replace_percent": (None, lambda n: is_number(n) and 0 <= n <= 1, "0 to 1 of the cache: 0.1 is a tenth"),
}
_FIXED = {"output_data_format": "channels_first", "output_image_dtype": "float32", "duplicate_count": 1}
_EMPTY = ("batched_by_transforms", "extra_inputs", "batch_transforms", "items_per_category", "category_weights")
"""Arguments of which one value is supported: the stated one, or none."""


def parse(pipeline: Component, training: bool) -> dict[str, Any]:
    """Return the arguments of `pipeline`, of the section `train` or `validate`, and three of our own.

    These are its "name", whether its labels are "volumes", and whether it is "cached". Raises `InputError` at the first
    error.

    The defaults are Clara's: batches of 10 and 4 workers; prefetch is left to the loader. A training cache replaces a
    tenth after each epoch, a validation cache nothing; training is shuffled, validation is not.
    """
    if pipeline.name not in _PIPELINES:
        raise wrong(pipeline.where, pipeline.name or pipeline.path, f"one of {', '.join(_PIPELINES)}")
    args, where = pipeline.args, f"{pipeline.where} ({pipeline.name})"
    volumes, cached = pipeline.name.startswith("Segmentation"), pipeline.name.endswith("WithCache")
    known = {**_ARGUMENTS, **(_CACHE_ARGUMENTS if cached else {})}
    defaults = {name: default for name, (default, _, _) in known.items()}
    for name, value in (defaults | args).items():
        _, check, expected = known.get(name, (None, None, f"{_FIXED.get(name)!r}; leave the argument out"))
        if value is _REQUIRED:
            raise clara_configuration(f"{where}: the argument {name!r} is missing: give {expected}")
        if check is None and name not in _FIXED and name not in _EMPTY:
            raise clara_configuration(f"{where} has no argument {name!r}: use {', '.join(known)}")
        if name in args and not (check(value) if check else (value or None) == _FIXED.get(name)):
            raise wrong(f"{where}: {name}", value, expected)
    size, axes = args["output_crop_size"], args.get("output_data_dims")
    if axes not in (None, len(size)):
        raise wrong(f"{where}: output_crop_size", size, f"{axes} numbers, as output_data_dims={axes}")
    own = {"name": pipeline.name, "volumes": volumes, "cached": cached}
    return {**defaults, "shuffle": training, "replace_percent": 0.1 if training else 0.0, **args, **own}


# -- transforms -------------------------------------------------------------------------------------------------------

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
        loads = '{"name": "LoadNifti", "args": {"fields": ["image", "label"]}}'
        raise wrong(where, entries, f"a list of transforms, of which the first loads: [{loads}, ...]")
    return [_make(component(entry, f"{where}[{number}]")) for number, entry in enumerate(entries)]


def _make(entry: Component) -> Transform:
    where, args = f"{entry.where} ({entry.name or entry.path})", entry.args
    clara = _CLARA.get(entry.name)
    described: Callable[..., Any] = clara or _class(entry, entry.name)
    try:
        if clara is not None:
            name, values = clara(**{key: value for key, value in args.items() if key != "fields"})
            transform = _class(entry, name)(keys=args["fields"], **values)
        else:
            transform = described(**args)
    except StallfreeError:
        raise
    except Exception as error:
        parameters = [*(["fields"] if clara else []), *map(str, inspect.signature(described).parameters.values())]
        arguments = ", ".join(parameters) or "none"
        raise clara_configuration(f"{where} cannot be made: {error!r}; its arguments are {arguments}") from error
    if not callable(transform):
        raise clara_configuration(f"{where} is no transform: its instances cannot be called with a sample")
    return transform  # type: ignore[no-any-return]


def _class(entry: Component, name: str) -> Callable[..., Any]:
    """Return the user's class at "module.Class", or MONAI's transform `name`."""
    if entry.path:
        module, _, class_name = entry.path.rpartition(".")
        try:
            user_class = getattr(import_module(module), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            problem = f"{entry.where}: {entry.path!r} cannot be imported"
            raise clara_configuration(f'{problem} ({error}): give "module.Class"') from error
        if not callable(user_class):
            raise wrong(f"{entry.where}: {entry.path!r}", user_class, "a class")
        return user_class  # type: ignore[no-any-return]
    try:
        library = import_module("monai.transforms")
        import_module("nibabel")
    except ImportError as error:
        raise missing_extra("nibabel" if "nibabel" in str(error) else "monai", "medical", entry.name) from error
    monai_class = getattr(library, name, None)
    if not isinstance(monai_class, type) or not issubclass(monai_class, library.Transform):
        own = 'for one of your own give {"path": "module.Class"}'
        raise wrong(entry.where, name, f"a transform of MONAI, or of Clara: {', '.join(_CLARA)}; {own}")
    return monai_class
