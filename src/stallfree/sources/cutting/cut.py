"""`cut`: a data set split at its own attributes that hold a transform."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stallfree.errors import StallfreeError, cut_attribute, text_of
from stallfree.pipeline._objects import attribute
from stallfree.pipeline.compose import Transform
from stallfree.pipeline.protocol import Source
from stallfree.sources.base import normalize_id, require_samples
from stallfree.sources.cut_source import CutSource
from stallfree.sources.cutting.check import Check
from stallfree.sources.detach import value_at
from stallfree.sources.mapped import is_source, require_map_style


def cut(dataset: Any, *attributes: str, check: Sequence[int] = ()) -> CutSource:
    """Split a data set at the attributes that hold its transform.

    What comes before the transform can then be cached.

    The result is a source. Its `fetch(id)` is `dataset[id]` without the transform: the decoded image, the label. Its
    `pipeline` is the transform. A `CachedDataset` of it caches decoded images, or what the deterministic steps of the
    transform make of them, and runs the random steps in each epoch.

    To find out what the transform is called with, a copy of the data set has an object in its place that notes each
    call. `dataset` itself is not changed. A transform may be called several times and with several arguments, its
    output may be unpacked, an item of it taken, or be passed to another of `attributes`. Anything else that
    `__getitem__` does with the output needs the output itself, and is refused.

    The first and the last sample and six others are made with and without `cut` from equal states of the random
    generators, in a child process, and must be equal bit for bit.

    Args:
        dataset: a map-style data set.
        attributes: names of attributes that hold a transform, such as `"transform"` and `"target_transform"`. A name
            may be dotted: `"inner.transform"`, `"datasets.0.transform"`.
        check: ids of further samples to compare.

    Returns:
        A source for `DataLoader` and `CachedDataset`. Its samples are those of `dataset`.

    Raises:
        InputError: an attribute does not exist or holds no transform; `__getitem__` uses the output of a transform,
            draws random numbers itself, or makes another sample if the transform runs later.
        Exception: the error of a sample, if none can be read.

    Example:
        ```python
        data = sf.cut(images, "transform")  # whose `__getitem__` opens, decodes and transforms
        image, label = data.fetch(0)  # without the transform
        cached = sf.CachedDataset(data, capacity="8MiB")
        ```
    """
    if is_source(dataset):
        raise cut_attribute(
            f"{type(dataset).__name__} has its transform apart already: give it to a loader or a CachedDataset as it is"
        )
    require_map_style(dataset)
    require_samples(len(dataset), f"The data set {type(dataset).__name__}", "Give one with at least one sample.")
    if not attributes:
        raise cut_attribute("cut got no attribute: name the one that holds the transform: cut(dataset, 'transform')")
    transforms = [_transform_at(dataset, name) for name in attributes]
    ids = [normalize_id(id, len(dataset)) for id in check]
    bare, steps = Check(dataset, attributes, transforms).source(ids)
    return CutSource(dataset, bare, steps, attributes)


def _transform_at(dataset: Any, name: str) -> Transform:
    kind = type(dataset).__name__
    try:
        transform = value_at(dataset, name)
    except (AttributeError, LookupError, TypeError) as error:
        known = sorted(key for key, value in getattr(dataset, "__dict__", {}).items() if callable(value))
        raise cut_attribute(
            f"{kind} has no attribute {name!r}: name one that holds a transform"
            + (f" (callable are {', '.join(known)})" if known else "")
        ) from error
    if transform is None:
        raise cut_attribute(f"the {name} of {kind} is None, so there is nothing to cut: leave it out")
    if not callable(transform):
        raise cut_attribute(
            f"the {name} of {kind} is of type {type(transform).__name__}, which cannot be called: name an attribute "
            "that holds a transform"
        )
    return transform  # type: ignore[no-any-return]


_CUTS = 4
"""Maximum attributes of a data set that are tried as its transform."""


def cut_any(dataset: Any) -> tuple[Source | None, str]:
    """Cut a data set at the first of its callable attributes that verifies.

    Returns:
        The cut source and words such as "cut at transform"; or None and the reason.
    """
    reason = "no attribute holds a transform"
    for name in _callables(dataset)[:_CUTS]:
        try:
            return cut(dataset, name), f"cut at {name}"
        except StallfreeError as error:
            reason = text_of(error)
    return None, reason


def _callables(dataset: Any, prefix: str = "") -> list[str]:
    """The callable attributes of a data set; first those whose names suggest a transform."""
    held: dict[str, Any] = attribute(dataset, "__dict__") or {}
    names = [prefix + name for name, value in held.items() if callable(value) and not isinstance(value, type)]
    if not prefix and (inner := held.get("dataset")) is not None:  # of a `Subset`, say
        names += _callables(inner, "dataset.")
    return sorted(names, key=lambda name: not re.search("transform|aug", name))
