"""Clara's training configuration: JSON with placeholders, components, and the arguments of an `image_pipeline`."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stallfree.errors import StallfreeError, clara_configuration
from stallfree.sources.paths import canonical, read_file

PIPELINES = {
    "SegmentationImagePipeline": (True, False),
    "SegmentationImagePipelineWithCache": (True, True),
    "ClassificationImagePipeline": (False, False),
    "ClassificationImagePipelineWithCache": (False, True),
}
"""Names of pipelines; for each, whether its labels are volumes and whether it has a cache."""

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


def read_json(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Return the JSON object in the file at `path`, local or a fsspec URL. `what` is its name in messages.

    Raises `InputError` if the file cannot be read, is not JSON, or contains anything but an object.
    """
    path = canonical(path)
    try:
        data = read_file(path)
    except StallfreeError:
        raise
    except Exception as error:
        raise clara_configuration(f"{what} {path!r} cannot be read ({error}): give the path of a JSON file") from error
    try:
        content = json.loads(data)
    except ValueError as error:
        raise clara_configuration(f"{what} {path!r} is no valid JSON ({error}): correct it there") from error
    if not isinstance(content, dict):
        raise clara_configuration(f"{what} {path!r} holds a {type(content).__name__}, expected an object: {{...}}")
    return content


class Variables:
    """The values of placeholders: those at the top of `config`, overridden by `arguments`."""

    def __init__(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        top = {name: value for name, value in config.items() if not isinstance(value, dict)}
        self._values: dict[str, Any] = {**top, **arguments}

    def fill(self, value: Any, where: str) -> Any:
        """Return `value` with all placeholders replaced, at any depth.

        A string that is a single placeholder becomes the variable itself, a number for instance. Raises `InputError`
        for an undefined placeholder, and for one that refers to itself.
        """
        if isinstance(value, str):
            return self._text(value, where, ())
        if isinstance(value, dict):
            return {key: self.fill(item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return value

    def _text(self, text: str, where: str, within: tuple[str, ...]) -> Any:
        single = _PLACEHOLDER.fullmatch(text)
        if single is not None:
            return self._value(single[1], text, where, within)
        return _PLACEHOLDER.sub(lambda match: str(self._value(match[1], text, where, within)), text)

    def _value(self, name: str, text: str, where: str, within: tuple[str, ...]) -> Any:
        if name in within:
            chain = " -> ".join(f"{{{part}}}" for part in (*within, name))
            raise clara_configuration(
                f"{where}: the placeholder {{{name}}} stands for itself ({chain}): give {name}=..."
            )
        if name not in self._values:
            raise clara_configuration(
                f"{where} is {text!r}, and nothing says what {{{name}}} stands for: pass it as load(..., {name}=...), "
                f'or put "{name}" at the top of the configuration'
            )
        value = self._values[name]
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        return self._text(value, where, (*within, name)) if isinstance(value, str) else value


class Component(NamedTuple):
    """An object named in a configuration: `name` of a known class or `path` of a user's one, and its arguments."""

    where: str
    name: str
    path: str
    args: dict[str, Any]


def component(entry: Any, where: str) -> Component:
    """Return the component that `entry` describes. Raises `InputError` if it is invalid."""
    if not isinstance(entry, dict):
        raise clara_configuration(f'{where} is {entry!r}, expected an object: {{"name": ..., "args": {{...}}}}')
    unknown = sorted(entry.keys() - {"name", "path", "args", "search"})  # only Clara's AutoML uses `search`
    if unknown:
        raise clara_configuration(f"{where} has the unknown key {unknown[0]!r}: use name, path, args")
    name, path, args = entry.get("name", ""), entry.get("path", ""), entry.get("args", {})
    if not isinstance(name, str) or not isinstance(path, str) or bool(name) == bool(path):
        raise clara_configuration(
            f'{where} has name={name!r} and path={path!r}: give one of them, "name" for what is known here, "path" for '
            'a class of your own ("module.Class")'
        )
    if not isinstance(args, dict):
        raise clara_configuration(f'{where}.args is {args!r}, expected an object: {{"argument": value, ...}}')
    return Component(where, name, path, args)


# -- arguments of an image_pipeline -----------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_text(value: Any) -> bool:
    """Return whether `value` is a string and not empty."""
    return isinstance(value, str) and value != ""


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _size(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (2, 3) and all(_integer(-1)(n) and n != 0 for n in value)


def _only(*values: Any) -> tuple[Callable[[Any], bool], str]:
    def check(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return check, f"{json.dumps(values[0])}; other values are not supported: leave the argument out"


_REQUIRED = ("data_list_file_path", "data_file_base_dir", "data_list_key", "output_crop_size")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data_list_file_path": (is_text, "the path of the data list, a JSON file"),
    "data_file_base_dir": (is_text, "the folder that the paths in the data list are relative to"),
    "data_list_key": (is_text, 'a key of the data list, such as "training"'),
    "output_crop_size": (_size, "a list of 2 or 3 whole numbers of voxels, such as [96, 96, 96]; -1 is any number"),
    "output_batch_size": (_integer(1), "samples per batch, an int of 1 or more"),
    "num_workers": (_integer(0), "worker processes, an int of 0 or more"),
    "prefetch_size": (_integer(0), "batches to prepare ahead, an int of 0 or more"),
    "shuffle": (lambda value: isinstance(value, bool), "true or false"),
    "repeat": (lambda value: isinstance(value, bool), "true or false (one iteration is one epoch here, either way)"),
    "output_data_dims": (lambda value: value in (2, 3), "2 or 3"),
    "output_image_channels": (_integer(1), "channels of the image, an int of 1 or more"),
    "output_data_format": _only("channels_first"),
    "output_image_dtype": _only("float32"),
    "output_label_format": (lambda value: value in (None, *([1] * n for n in range(9))), "1 for each label"),
    "batched_by_transforms": _only(False),
    "duplicate_count": _only(1),
    "extra_inputs": _only(None),
    "batch_transforms": _only(None, []),
    "items_per_category": _only(None),
    "category_weights": _only(None),
}
_CACHE_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_cache_objects": (_integer(1), "samples kept in memory, an int of 1 or more"),
    "replace_percent": (
        lambda value: is_number(value) and 0 <= value <= 1,
        "the share of the cache that is replaced after each epoch, 0 to 1: 0.1 is a tenth",
    ),
}


def parse(pipeline: Component, training: bool) -> dict[str, Any]:
    """Return the arguments of `pipeline`, of the section `train` or `validate`. Raises `InputError` at the first error.

    The defaults are Clara's: batches of 10 and 4 workers; prefetch is left to the loader. A training cache replaces a
    tenth after each epoch, a validation cache nothing; training is shuffled, validation is not.
    """
    if pipeline.name not in PIPELINES:
        raise clara_configuration(
            f"{pipeline.where}: {pipeline.name or pipeline.path!r} is no pipeline known here: "
            f"use {', '.join(PIPELINES)}"
        )
    cached, args, where = PIPELINES[pipeline.name][1], pipeline.args, f"{pipeline.where} ({pipeline.name})"
    checks = {**_CHECKS, **(_CACHE_CHECKS if cached else {})}
    for name in (*_REQUIRED, *(("num_cache_objects",) if cached else ())):
        if name not in args:
            raise clara_configuration(f"{where}: the argument {name!r} is missing: give {checks[name][1]}")
    for name, value in args.items():
        if name in checks:
            check, expected = checks[name]
            if not check(value):
                raise clara_configuration(f"{where}: {name}={value!r}, expected {expected}")
        elif name in _CACHE_CHECKS:
            raise clara_configuration(
                f"{where}: {name!r} is an argument of the pipelines with a cache: remove it, or name the one ending in "
                "WithCache"
            )
        else:
            near = difflib.get_close_matches(name, checks, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"use {', '.join(checks)}"
            raise clara_configuration(f"{where}: the argument {name!r} is unknown: {advice}")
    size = args["output_crop_size"]
    if args.get("output_data_dims", len(size)) != len(size):
        raise clara_configuration(
            f"{where}: output_data_dims={args['output_data_dims']} and output_crop_size={size}: give one number for "
            "each axis"
        )
    defaults = {"output_batch_size": 10, "num_workers": 4, "prefetch_size": 0, "output_image_channels": None}
    return {**defaults, "shuffle": training, "replace_percent": 0.1 if training else 0.0, **args}


def advice_on(args: Mapping[str, Any], where: str) -> list[str]:
    """Return recommendations of Clara's manual for a cache whose settings work but waste time or memory."""
    advice, objects, batch = [], args["num_cache_objects"], args["output_batch_size"]
    if objects % batch:
        below = objects - objects % batch
        advice.append(
            f"{where}: num_cache_objects={objects} is not divisible by output_batch_size={batch}, so the last batch of "
            f"each epoch has only {objects % batch} and wastes part of a step: set num_cache_objects to "
            f"{f'{below} or ' if below else ''}{below + batch}"
        )
    if args["prefetch_size"]:
        advice.append(
            f"{where}: prefetch_size={args['prefetch_size']} with a cache: that many batches are prepared ahead and "
            "take memory beside the cache, though its samples are at hand anyway: set prefetch_size to 0"
        )
    return advice
