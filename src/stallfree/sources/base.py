"""What all sources of this package share: ids as lists have them, and errors that name the sample."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

from stallfree.errors import dataset_changed, dataset_empty
from stallfree.notes import note_sample, raisable
from stallfree.pipeline.compose import Compose


def normalize_id(id: int, length: int) -> int:
    """`id` as an int in 0..length-1: negative ids count from the end, integers of any type are taken.

    Raises `IndexError` when it is out of range, as a list does, and `TypeError` when it is no integer.
    """
    index = operator.index(id)
    if not -length <= index < length:
        raise IndexError(f"id {index} is out of range: the data set has {length} samples")
    return index + length if index < 0 else index


class BaseSource(ABC):
    """A `Source` made from four methods: its length, a record, its location, and the fingerprint.

    Attributes:
        pipeline: turns what `fetch` returned into the sample.
        threads: whether `fetch` may run in several threads at once.
        watched: attributes of a data set, each as the data set, a dotted name, and the value that was used. `fetch`
            raises `InputError` when one has been replaced since: it would have no effect.
    """

    pipeline: Compose
    threads: bool = True
    watched: Sequence[tuple[Any, str, Any]] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _record(self, id: int) -> Any:
        """The record of `id`, which is in 0..len-1."""

    def _where(self, id: int) -> str:
        """The place of `id`, which is in 0..len-1; empty if it is not known."""
        return ""

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes when the records change. Does not cover `pipeline`."""

    def where(self, id: int) -> str:
        """The path or URL of sample `id`; empty when it is not known."""
        return self._where(normalize_id(id, len(self)))

    def fetch(self, id: int) -> Any:
        """The record of sample `id` as storage holds it. Raises `IndexError` for an id out of range."""
        for dataset, name, value in self.watched:
            if not is_same(value_at(dataset, name), value):
                raise dataset_changed(
                    f"the {name.removeprefix('_')} of {type(dataset).__name__} was changed after the data set was "
                    "given away: make a new loader (and CachedDataset) with the data set as it is now"
                )
        return self._record(normalize_id(id, len(self)))

    def __getitem__(self, id: int) -> Any:
        id = normalize_id(id, len(self))
        doing = "fetching"
        try:
            record = self.fetch(id)
            doing = "preparing"
            return self.pipeline(record)
        except Exception as error:
            note_sample(error, self, id, doing)
            if isinstance(error, StopIteration):
                raise raisable(error) from error
            raise

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


def require_samples(length: int, what: str, advice: str) -> None:
    """Raise `InputError` when `length` is 0: `what` is empty, and `advice` says what to do."""
    if length == 0:
        raise dataset_empty(f"{what} has length 0: there is nothing to train on. {advice}")


def value_at(dataset: Any, name: str) -> Any:
    """Return the value of a dotted attribute such as `"inner.transform"` or `"datasets.0.transform"`.

    Raises `AttributeError`, `LookupError` or `ValueError` if there is none.
    """
    for part in name.split("."):
        dataset = dataset[int(part)] if isinstance(dataset, (list, tuple)) else getattr(dataset, part)
    return dataset


def is_same(value: Any, other: Any) -> bool:
    """Return whether both are one object; each access to a bound method makes a new one."""
    return value is other or (isinstance(value, MethodType) and bool(value == other))
