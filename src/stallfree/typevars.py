"""Type variables of the generic classes, and the type of a map-style data set."""

from typing import Any, Protocol

from typing_extensions import TypeVar

BatchT_co = TypeVar("BatchT_co", covariant=True, default=Any)
"""What a loader yields."""

SampleT_co = TypeVar("SampleT_co", covariant=True, default=Any)
"""What a data set returns for an id."""

T = TypeVar("T")


class MapStyle(Protocol[SampleT_co]):
    """Any map-style data set. Torch's `Dataset` declares no length, so none is required here."""

    def __getitem__(self, index: int, /) -> SampleT_co: ...
