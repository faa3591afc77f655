"""Validation of the arguments of an `image_pipeline`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from stallfree.clara.configuration import Component
from stallfree.clara.fields import is_share, is_text
from stallfree.errors import clara_configuration

PIPELINES = {
    "SegmentationImagePipeline": (True, False),
    "SegmentationImagePipelineWithCache": (True, True),
    "ClassificationImagePipeline": (False, False),
    "ClassificationImagePipelineWithCache": (False, True),
}
"""Pipeline names; for each, whether its labels are volumes and whether it has a cache."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a section.

    Attributes:
        name: name of the pipeline.
        place: position of the pipeline in the configuration.
        volumes: whether labels are volumes (segmentation), else numbers (classification).
        cached: whether a window of samples is kept in memory.
        data_list_file_path: path of the data list.
        data_file_base_dir: base folder of the paths in the data list.
        data_list_key: key of the list in the data list.
        output_crop_size: voxels per axis of a sample; -1 for any number.
        output_image_channels: channels of a sample; None for any number.
        output_batch_size: samples per batch.
        num_workers: number of worker processes.
        prefetch_size: batches prepared ahead; 0 for the loader's default.
        shuffle: shuffle in each epoch.
        num_cache_objects: samples in the window.
        replace_percent: share of the window that is replaced after each epoch, 0 to 1.
    """

    name: str
    place: str
    volumes: bool
    cached: bool
    data_list_file_path: str
    data_file_base_dir: str
    data_list_key: str
    output_crop_size: tuple[int, ...]
    shuffle: bool
    replace_percent: float = 0.0
    output_image_channels: int | None = None
    output_batch_size: int = 10
    num_workers: int = 4
    prefetch_size: int = 0
    num_cache_objects: int = 0

    def advice(self) -> list[str]:
        """Return recommendations of Clara's manual for settings that work but are not optimal."""
        if not self.cached:
            return []
        found, rest = [], self.num_cache_objects % self.output_batch_size
        if rest:
            below, above = self.num_cache_objects - rest, self.num_cache_objects - rest + self.output_batch_size
            found.append(
                f"{self.place}: num_cache_objects={self.num_cache_objects} is not divisible by output_batch_size="
                f"{self.output_batch_size}, so the last batch of each epoch has only {rest} and wastes part of a step: "
                f"set num_cache_objects to {f'{below} or ' if below else ''}{above}"
            )
        if self.prefetch_size:
            found.append(
                f"{self.place}: prefetch_size={self.prefetch_size} with a cache: that many batches are prepared ahead "
                "and take memory beside the cache, though its samples are at hand anyway: set prefetch_size to 0"
            )
        return found


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _size(value: Any) -> bool:
    whole = isinstance(value, list) and all(_whole(-1)(voxels) and voxels != 0 for voxels in value)
    return whole and len(value) in (2, 3)


_Check = tuple[Callable[[Any], bool], str]
_CHECKS: dict[str, _Check] = {
    "data_list_file_path": (is_text, "the path of the data list, a JSON file"),
    "data_file_base_dir": (is_text, "the folder that the paths in the data list are relative to"),
    "data_list_key": (is_text, 'a key of the data list, such as "training"'),
    "output_crop_size": (_size, "a list of 2 or 3 whole numbers of voxels, such as [96, 96, 96]; -1 is any number"),
    "output_batch_size": (_whole(1), "samples per batch, an int of 1 or more"),
    "num_workers": (_whole(0), "worker processes, an int of 0 or more"),
    "prefetch_size": (_whole(0), "batches to prepare ahead, an int of 0 or more"),
    "shuffle": (lambda value: isinstance(value, bool), "true or false"),
    "repeat": (lambda value: isinstance(value, bool), "true or false (one iteration is one epoch here, either way)"),
    "output_data_dims": (lambda value: value in (2, 3), "2 or 3"),
    "output_image_channels": (_whole(1), "channels of the image, an int of 1 or more"),
}
_CACHE_CHECKS: dict[str, _Check] = {
    "num_cache_objects": (_whole(1), "samples kept in memory, an int of 1 or more"),
    "replace_percent": (is_share, "the share of the cache that is replaced after each epoch, 0 to 1: 0.1 is a tenth"),
}
_FIXED: dict[str, tuple[Any, ...]] = {
    "output_data_format": ("channels_first",),
    "output_image_dtype": ("float32",),
    "batched_by_transforms": (False,),
    "duplicate_count": (1,),
    "extra_inputs": (None,),
    "batch_transforms": (None, []),
    "items_per_category": (None,),
    "category_weights": (None,),
}
"""Clara's arguments that are supported only with Clara's default values."""
_REQUIRED = ("data_list_file_path", "data_file_base_dir", "data_list_key", "output_crop_size")


def parse(pipeline: Component, training: bool) -> Arguments:
    """Return the arguments of `pipeline`, of the section `train` or `validate`. Raises `InputError` at the first error.

    The defaults are Clara's: batches of 10 and 4 workers; prefetch is left to the loader. A training cache replaces a
    tenth after each epoch, a validation cache nothing; training is shuffled, validation is not.
    """
    if pipeline.name not in PIPELINES:
        raise clara_configuration(
            f"{pipeline.place}: {pipeline.name or pipeline.path!r} is no pipeline known here: "
            f"use {', '.join(PIPELINES)}"
        )
    volumes, cached = PIPELINES[pipeline.name]
    args, place = pipeline.args, f"{pipeline.place} ({pipeline.name})"
    checks = {**_CHECKS, **(_CACHE_CHECKS if cached else {})}
    _check_names(args, place, checks, cached)
    for name, (check, expected) in checks.items():
        if name in args and not check(args[name]):
            raise clara_configuration(f"{place}: {name}={args[name]!r}, expected {expected}")
    size = tuple(args["output_crop_size"])
    if args.get("output_data_dims", len(size)) != len(size):
        raise clara_configuration(
            f"{place}: output_data_dims={args['output_data_dims']} and output_crop_size={list(size)}: give one number "
            "for each axis"
        )
    given = {field.name: args[field.name] for field in fields(Arguments) if field.name in args}
    given = {"shuffle": training, "replace_percent": 0.1 if training else 0.0, **given, "output_crop_size": size}
    return Arguments(pipeline.name, pipeline.place, volumes, cached, **given)


def _check_names(args: dict[str, Any], place: str, checks: dict[str, _Check], cached: bool) -> None:
    """Raise `InputError` for an argument that is missing, unknown or unsupported."""
    for name in (*_REQUIRED, *(("num_cache_objects",) if cached else ())):
        if name not in args:
            raise clara_configuration(f"{place}: the argument {name!r} is missing: give {checks[name][1]}")
    for name, value in args.items():
        if name == "output_label_format":
            if value is not None and not (isinstance(value, list) and all(type(n) is int and n == 1 for n in value)):
                raise clara_configuration(
                    f"{place}: {name}={value!r} is not supported, only 1 for each label: put labels into the data "
                    "list as the model is to get them"
                )
        elif name in _FIXED:
            if not any(type(value) is type(only) and value == only for only in _FIXED[name]):
                raise clara_configuration(
                    f"{place}: {name}={value!r} is not supported, only {_FIXED[name][0]!r}: leave the argument out"
                )
        elif name not in checks:
            if name in _CACHE_CHECKS:
                raise clara_configuration(
                    f"{place}: {name!r} is an argument of the pipelines with a cache: remove it, or name "
                    "the one ending in WithCache"
                )
            near = difflib.get_close_matches(name, checks, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"use {', '.join(checks)}"
            raise clara_configuration(f"{place}: the argument {name!r} is unknown: {advice}")
