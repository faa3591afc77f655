"""Data sets of torchvision and Hugging Face, cut into reading and transform.

Both apply a transform that the user gave them to what they have read. Taken as they are, their samples are random where
the transform is, so that nothing could be cached. Their classes are recognised by name and module, so neither library
is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from stallfree.errors import dataset_changed
from stallfree.pipeline.compose import Compose, OnItem, Transform, flatten, mark_of
from stallfree.pipeline.objects import comes_from
from stallfree.pipeline.values import same
from stallfree.sources.base import BaseSource
from stallfree.sources.decode import DecodeImage
from stallfree.sources.detach import is_same, value_at, with_values
from stallfree.sources.files import FileDataset

_VISION = ("transform", "target_transform", "transforms")
_FORMAT = ("_format_type", "_format_kwargs", "_format_columns", "_output_all_columns")


class CutSource(BaseSource):
    """A data set whose `fetch` leaves out its own transform, which is in `pipeline`. The samples are the same.

    `fetch` raises `InputError` when the transform of the data set has been replaced since: it would have no effect.

    Attributes:
        dataset: the data set as it was given.

    Args:
        dataset: the data set.
        bare: the same without its transform.
        steps: the transform, as steps.
        watched: names of the attributes of `dataset` that say what its transform is; they may be dotted.
    """

    def __init__(self, dataset: Any, bare: BaseSource, steps: Sequence[Transform], watched: tuple[str, ...]) -> None:
        self.dataset = dataset
        self.pipeline = Compose([*bare.pipeline, *steps])
        self.threads = bare.threads
        self._bare = bare
        self._watched = {name: _value_at(dataset, name) for name in watched}

    def __len__(self) -> int:
        return len(self.dataset)

    def _record(self, id: int) -> Any:
        for name, value in self._watched.items():
            if not is_same(_value_at(self.dataset, name), value):
                raise dataset_changed(
                    f"the {name.removeprefix('_')} of {type(self.dataset).__name__} was changed after the data set was "
                    "given away: make a new loader (and CachedDataset) with the data set as it is now"
                )
        return self._bare.fetch(id)

    def _where(self, id: int) -> str:
        return self._bare.where(id)

    def fingerprint(self) -> str:
        """The fingerprint of the data set without its transform."""
        return f"CutSource {self._bare.fingerprint()}"

    def __repr__(self) -> str:
        return f"CutSource({type(self.dataset).__name__}, {len(self)} samples)"


class Jointly:
    """Calls `transform` with the parts of a sample as its arguments, as torchvision calls the `transforms` of pairs."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, sample: Sequence[Any]) -> Any:
        return self.transform(*sample)

    def __repr__(self) -> str:
        return f"Jointly({self.transform!r})"


class OnRow:
    """Calls `transform` with a batch of one row, as `datasets` does for the transform of `with_transform`."""

    def __init__(self, transform: Callable[[dict[str, Any]], Any]) -> None:
        self.transform = transform

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: column[0] for name, column in self.transform({key: [row[key]] for key in row}).items()}

    def __repr__(self) -> str:
        return f"OnRow({self.transform!r})"


def cut_known(dataset: Any, plain: Callable[[Any], BaseSource]) -> CutSource | None:
    """Return a data set of torchvision or Hugging Face as a `CutSource`; None if it cannot be cut.

    Reads one sample of a torchvision data set three times. Data sets that the user marked, and those with code of
    their own between reading and transform, are not cut.

    Args:
        dataset: any map-style data set.
        plain: makes a source of one that has no transform.
    """
    if mark_of(dataset) is not None:
        return None
    if any(_is(cls, "VisionDataset", "torchvision.datasets") for cls in type(dataset).__mro__):
        return _vision(dataset, plain)
    if _is(type(dataset), "Dataset", "datasets.arrow_dataset"):
        return _hugging_face(dataset, plain)
    return None


def _is(cls: type, name: str, library: str) -> bool:
    return cls.__name__ == name and comes_from(cls, library)


# --- torchvision ----------------------------------------------------------------------------------------------------


def _vision(dataset: Any, plain: Callable[[Any], BaseSource]) -> CutSource | None:
    if not _module_of_reading(dataset).startswith("torchvision.datasets") or not len(dataset):
        return None  # a class of the user's, which may do anything with its transforms
    bare = _without(dataset)
    try:
        sample = bare[0]
        steps = _vision_steps(dataset, sample)
    except Exception:  # a sample that cannot be read, or one that is computed from what a transform returns
        return None
    if steps is None:
        return None
    files = _image_files(dataset, sample)
    return CutSource(dataset, plain(bare) if files is None else files, steps, (*_VISION, "loader"))


def _module_of_reading(dataset: Any) -> str:
    return str(getattr(type(dataset).__getitem__, "__module__", ""))


def _image_files(dataset: Any, sample: Any) -> FileDataset | None:
    """The files of an `ImageFolder`, if Pillow makes its samples of them: then their bytes are the records."""
    module = "torchvision.datasets.folder"
    loader = getattr(dataset, "loader", None)
    if (_module_of_reading(dataset), getattr(loader, "__module__", "")) != (module, module):
        return None
    backend = getattr(sys.modules.get("torchvision"), "get_image_backend", None)
    if getattr(loader, "__name__", "") not in ("default_loader", "pil_loader") or (backend and backend() != "PIL"):
        return None
    paths, labels = ([pair[place] for pair in dataset.samples] for place in (0, 1))
    files = FileDataset(paths, labels, decode=DecodeImage("pil"))
    return files if same(files[0], sample) else None


def _without(dataset: Any) -> Any:
    """A copy of `dataset` without its transforms."""
    return with_values(dataset, {name: None for name in _VISION if hasattr(dataset, name)})


def _value_at(dataset: Any, name: str) -> Any:
    """The value of a dotted attribute, None if there is none."""
    try:
        return value_at(dataset, name)
    except (AttributeError, LookupError):
        return None


class _Seen:
    """Stands for a transform: notes what it is called with, and returns a mark for each."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.marks: list[object] = []

    def __call__(self, *parts: Any) -> Any:
        self.calls.append(parts)
        self.marks += [object() for _ in parts]
        return self.marks[0] if len(parts) == 1 else tuple(self.marks)


def _vision_steps(dataset: Any, bare: Any) -> list[Transform] | None:
    """The transforms of `dataset` as steps on its sample `bare`, number 0; None if it does not apply each once to that.

    Found out with marks in the place of the transforms: torchvision's classes do this each in its own code.
    """
    seen = {name: _Seen() for name in _VISION if getattr(dataset, name, None) is not None}
    marked = with_values(dataset, seen)[0]
    used = {name: stand_in for name, stand_in in seen.items() if stand_in.calls}
    if any(len(stand_in.calls) != 1 for stand_in in used.values()):
        return None
    if list(used) == ["transforms"]:
        return _joint_steps(dataset.transforms, used["transforms"], marked, bare)
    if used.keys() != seen.keys() - {"transforms"}:
        return None
    steps: list[Transform] = []
    for name, stand_in in used.items():
        step = _single_step(getattr(dataset, name), stand_in, marked, bare)
        if step is None:
            return None
        steps += flatten(step)
    return steps


def _single_step(transform: Transform, seen: _Seen, marked: Any, bare: Any) -> Transform | None:
    """`transform` as a step on the sample `bare`; None if that is not what it was called with."""
    if marked is seen.marks[0]:
        return transform if same(seen.calls[0], (bare,)) else None
    if not isinstance(marked, tuple) or not isinstance(bare, tuple) or len(marked) != len(bare):
        return None
    for place, part in enumerate(marked):
        if part is seen.marks[0]:
            return OnItem(place, transform) if same(seen.calls[0], (bare[place],)) else None
    return None


def _joint_steps(transforms: Any, seen: _Seen, marked: Any, bare: Any) -> list[Transform] | None:
    """The steps of `transforms`, which takes all parts of a sample at once."""
    if not isinstance(marked, tuple) or list(marked) != seen.marks or not same(seen.calls[0], bare):
        return None
    if _is(type(transforms), "StandardTransform", "torchvision.datasets"):
        parts = (transforms.transform, transforms.target_transform)
        return [step for place, part in enumerate(parts) if part is not None for step in flatten(OnItem(place, part))]
    return [step if _takes_samples(step) else Jointly(step) for step in flatten(transforms)]


def _takes_samples(step: Any) -> bool:
    """Whether `step` is of torchvision's transforms v2, which take a whole sample as one argument too."""
    return any(_is(cls, "Transform", "torchvision.transforms.v2") for cls in type(step).__mro__)


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def _hugging_face(dataset: Any, plain: Callable[[Any], BaseSource]) -> CutSource | None:
    form = dataset.format
    transform = form["format_kwargs"].get("transform")
    if form["type"] != "custom" or transform is None or set(form["columns"]) != set(dataset.column_names):
        return None
    return CutSource(dataset, plain(dataset.with_format(None)), [OnRow(transform)], _FORMAT)
