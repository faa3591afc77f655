"""What `cache="auto"` caches of a data set: its samples, or the files that it reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stallfree.autotune.measure import Probe, measure
from stallfree.datasets.dataset_probe import FirstLook, look, reason_in
from stallfree.errors import InputError, StallfreeError, text_of
from stallfree.notes import is_users
from stallfree.pipeline._objects import attribute
from stallfree.pipeline.compose import Compose, Transform
from stallfree.pipeline.protocol import Source
from stallfree.sources.mapped import as_source


class NotCachedError(StallfreeError):
    """Nothing of a data set can be cached."""

    page = "dataset-random"


@dataclass(frozen=True)
class Subject:
    """What is to be cached.

    Attributes:
        source: source of the samples.
        steps: all steps that are applied to a record.
        first: one sample.
        why: the reason why not the samples, but the files that the data set reads are cached; "" for samples.
    """

    source: Source
    steps: Compose
    first: FirstLook
    why: str = ""

    def measure(self, seed: int, *, brief: bool = True) -> Probe:
        """Measure storage, prep and cache on some samples; if `brief`, a small data set takes less time."""
        return measure(self.source, self.steps, self.first, seed=seed)


def subject_of(dataset: Any, transform: Transform | None) -> Subject:
    """Examine the first samples of a data set.

    Raises `NotCachedError` if neither its samples nor the files that it reads can be cached.
    """
    source = as_source(dataset)
    steps = steps_of(source, transform)
    try:
        return Subject(source, steps, look(source, steps))
    except InputError as error:
        if is_users(error):
            raise
        why = reason_in(error)
        raise NotCachedError(why or text_of(error)) from error


def steps_of(source: Source, transform: Transform | None) -> Compose:
    """The steps of a source, followed by `transform`."""
    return Compose([source.pipeline, *([] if transform is None else [transform])])


def callables(dataset: Any, prefix: str = "") -> list[str]:
    """The callable attributes of a data set; first those whose names suggest a transform."""
    held: dict[str, Any] = attribute(dataset, "__dict__") or {}
    names = [prefix + name for name, value in held.items() if callable(value) and not isinstance(value, type)]
    if not prefix and (inner := held.get("dataset")) is not None:  # of a `Subset`, say
        names += callables(inner, "dataset.")
    return sorted(names, key=lambda name: not re.search("transform|aug", name))
