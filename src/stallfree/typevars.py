"""Type variables of the generic classes, the type of a map-style data set, and the base of what is closed."""

from typing import Any, Protocol, Self

from typing_extensions import TypeVar

BatchT_co = TypeVar("BatchT_co", covariant=True, default=Any)
"""What a loader yields."""

SampleT_co = TypeVar("SampleT_co", covariant=True, default=Any)
"""What a data set returns for an id."""

T = TypeVar("T")


class MapStyle(Protocol[SampleT_co]):
    """Any map-style data set. Torch's `Dataset` declares no length, so none is required here."""

    def __getitem__(self, index: int, /) -> SampleT_co: ...


class Closing:
    """Is closed at the end of a `with` block."""

    def close(self) -> None:
        """Release what this object holds. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
