"""A loader as its prefetcher sees it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stallfree.device import DevicePrefetcher
    from stallfree.loader.dataloader import DataLoader


class HostLoader:
    """A loader as its prefetcher sees it: its batches of the host."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = weakref.proxy(loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._loader._iterate(None)  # type: ignore[no-any-return]

    def prefetched_by(self, prefetcher: DevicePrefetcher) -> Iterator[Any]:
        """See `DataLoader`."""
        return self._loader.prefetched_by(prefetcher)  # type: ignore[no-any-return]

    def count_wait(self, seconds: float) -> None:
        """See `DataLoader`."""
        self._loader.count_wait(seconds)

    @property
    def position(self) -> Any:
        """See `DataLoader`."""
        return self._loader.position

    def state_at(self, position: Any) -> dict[str, Any]:
        """See `DataLoader`."""
        return self._loader.state_at(position)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The state now, batches that are copied ahead counted."""
        return self.state_at(self.position)
