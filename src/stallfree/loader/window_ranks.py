"""Which part of the data a host has in its Smart Cache, and which part of the window a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from stallfree.errors import InputError
from stallfree.loader.ranks import environment_number

if TYPE_CHECKING:
    from stallfree.loader.smart_cache import SmartCacheDataset


class RankSampler(DistributedSampler[Any]):
    """Splits the window among the ranks of this host, as `LOCAL_RANK` and `LOCAL_WORLD_SIZE` say.

    Its seed is that of the window, which a state may replace.
    """

    def __init__(self, window: SmartCacheDataset, shuffle: bool, drop_last: bool) -> None:
        super().__init__(
            window,  # type: ignore[arg-type]
            num_replicas=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            rank=int(os.environ.get("LOCAL_RANK", "0")),
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self._window = window

    def __iter__(self) -> Iterator[Any]:
        self.seed = self._window.plan.seed & 0x7FFFFFFF
        return super().__iter__()


def hosts_of_job() -> tuple[int, int]:
    """(number of this host, number of hosts), as torchrun says."""
    return environment_number("GROUP_RANK", 0), environment_number("GROUP_WORLD_SIZE", 1)


def checked_hosts(hosts: Any) -> tuple[int, int]:
    """`hosts` as given. Raises `InputError` for what is no number of a host and number of hosts."""
    number, count = hosts if isinstance(hosts, (tuple, list)) and len(hosts) == 2 else (0, 0)
    if not (isinstance(number, int) and isinstance(count, int) and 0 <= number < count):
        raise InputError(f"hosts={hosts!r:.80}: give (number of this host, number of hosts), such as (0, 2)")
    return number, count
