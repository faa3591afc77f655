"""The mapping of keys to servers: standalone servers, or the masters of a Redis Cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.errors import (
    MissingExtraError,
    StorageError,
    server_address,
    server_refused,
    server_unreachable,
)
from stallfree.stores.addresses import Address
from stallfree.stores.shard import FixedLocation, Location, Request, Shard

Array = npt.NDArray[Any]

START_SECONDS = 5.0
"""Timeout in seconds for the first use of a given server."""


_REFRESH_SECONDS = 1.0
"""Minimum interval between two reads of a cluster's table of slots."""

_SILENT_SECONDS = 5.0
"""The same interval after no node answered."""


class Servers(Protocol):
    """The servers of a data set. Picklable."""

    names: list[str]
    """Names of standalone servers, which determine the owner of an id. Empty for a cluster, where the key does."""

    @property
    def shards(self) -> list[Shard]:
        """All servers."""

    def split(self, owner: Array, keys: Sequence[bytes]) -> list[tuple[Shard, Array]]:
        """Each server that owns some of `keys`, with their positions. `owner` is per key, if there are names."""

    def request(self, keys: Sequence[bytes]) -> Request:
        """The commands that request the values of `keys` from one server."""

    def moved(self, error: Exception) -> bool:
        """Whether `error` reports that a key moved to another server. Later calls of `split` use the new server."""

    def close(self) -> None:
        """Close all connections."""


class Standalone:
    """Standalone servers, in the same order in all processes."""

    def __init__(self, names: Sequence[str], locations: Sequence[Location], timeout: float) -> None:
        self.names, self._locations, self._timeout = list(names), list(locations), timeout
        self.shards = [Shard(location, timeout) for location in locations]

    def split(self, owner: Array, keys: Sequence[bytes]) -> list[tuple[Shard, Array]]:
        """See `Servers`."""
        if len(self.shards) == 1:
            return [(self.shards[0], np.arange(len(keys)))] if len(keys) else []
        return [(self.shards[place], np.flatnonzero(owner == place)) for place in np.unique(owner).tolist()]

    def request(self, keys: Sequence[bytes]) -> Request:
        """See `Servers`."""
        return [("MGET", *keys)]

    def moved(self, error: Exception) -> bool:
        """False: keys of standalone servers never move."""
        return False

    def close(self) -> None:
        """See `Servers`."""
        for shard in self.shards:
            shard.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Standalone, (self.names, self._locations, self._timeout)


class Cluster:
    """The masters of a Redis Cluster, with a table of the slots that each of them serves.

    The table is read again when a master reports a moved key, and while one is lost.

    Args:
        nodes: addresses of one or more nodes. User, password and TLS of the first are used for all.
        timeout: seconds that a node may be silent.
    """

    def __init__(self, nodes: Sequence[Address], timeout: float) -> None:
        self.names: list[str] = []
        self._nodes = [nodes[0], *(nodes[0].at(node.host, node.port) for node in nodes[1:])]
        self._timeout = timeout
        self._masters: dict[tuple[str, int], Shard] = {}
        self._table: dict[int, Shard] = {}
        self._next_read = 0.0

    @property
    def shards(self) -> list[Shard]:
        """The masters; empty until the table could be read."""
        if not self._table:
            self.refresh()
        return list(self._masters.values())

    def split(self, owner: Array, keys: Sequence[bytes]) -> list[tuple[Shard, Array]]:
        """See `Servers`. Keys of slots without a master are left out."""
        from redis.crc import key_slot

        if not self._table:
            self.refresh()
        table, positions = self._table, dict[Shard, list[int]]()
        for position, key in enumerate(keys):
            shard = table.get(key_slot(key))
            if shard is not None:
                positions.setdefault(shard, []).append(position)
        return [(shard, np.array(found)) for shard, found in positions.items()]

    def request(self, keys: Sequence[bytes]) -> Request:
        """One GET per key, because an MGET must not have keys of several slots."""
        return [("GET", key) for key in keys]

    def moved(self, error: Exception) -> bool:
        """See `Servers`."""
        from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

        if isinstance(error, MovedError):
            self.refresh()
        return isinstance(error, (MovedError, AskError, TryAgainError, ClusterDownError))

    def refresh(self, timeout: float | None = None) -> str:
        """Re-read the table of slots, rate-limited.

        If no node answers, keeps the table and returns the reason.
        """
        now = time.monotonic()
        if now < self._next_read:
            return ""
        self._next_read = now + _SILENT_SECONDS
        slots, problem = self._read_slots(timeout or self._timeout)
        if not slots:
            return problem
        self._next_read = now + _REFRESH_SECONDS
        masters: dict[tuple[str, int], Shard] = {}
        table: dict[int, Shard] = {}
        for first, last, where in slots:
            if where not in masters:
                found = self._masters.get(where)
                masters[where] = found or Shard(_Node(self._nodes[0].at(*where), self), self._timeout)
            table.update(dict.fromkeys(range(first, last + 1), masters[where]))
        gone = [shard for where, shard in self._masters.items() if where not in masters]
        self._masters, self._table = masters, table
        for shard in gone:
            shard.close()
        return ""

    def _read_slots(self, timeout: float) -> tuple[list[tuple[int, int, tuple[str, int]]], str]:
        """The ranges of slots and their masters, from the first node that answers; and any error."""
        problem = "no slots"
        for node in list(self._nodes):
            try:
                found = node.request(timeout, "CLUSTER", "SLOTS")
                nodes = [[(_text(name) or node.host, int(port)) for name, port, *_ in part[2:]] for part in found]
                slots = [(int(part[0]), int(part[1]), here[0]) for part, here in zip(found, nodes, strict=True)]
            except Exception as error:  # of the socket, of redis-py, or for an invalid table
                problem = str(error)
                continue
            known = (self._nodes[0].at(*where) for here in nodes for where in here)
            self._nodes = list(dict.fromkeys([*self._nodes, *known]))  # any node may be lost later
            if slots:
                return slots, ""
        return [], problem

    def close(self) -> None:
        """See `Servers`."""
        for shard in self._masters.values():
            shard.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cluster, (self._nodes, self._timeout)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else ""


class _Node(FixedLocation):
    """A node of a cluster. If it is lost, another one may replace it."""

    def __init__(self, address: Address, cluster: Cluster) -> None:
        super().__init__(address)
        self._cluster = cluster

    def confirm(self, after: int) -> None:
        """Re-read the table of slots."""
        self._cluster.refresh()


def find_servers(addresses: Sequence[Address], timeout: float) -> Servers:
    """The servers at `addresses`: all standalone servers, or one or more nodes of one Redis Cluster.

    Raises `InputError` for servers that cannot be combined or that refuse access, `StorageError` for one that does not
    answer within 5 s. For a cluster, one node that answers is enough.
    """
    from redis.exceptions import AuthenticationError, ResponseError

    if not addresses or len({(str(address), address.db) for address in addresses}) < len(addresses):
        given = ", ".join(map(str, addresses)) or "none"
        raise server_address(f"the servers {given} were given: give one or more, each of them once")
    answered = clusters = 0
    lost: StorageError | None = None
    for address in addresses:
        try:
            address.request(START_SECONDS, "PING")
            with contextlib.suppress(ResponseError):  # a user without permission
                clusters += b"_mode:cluster" in address.request(START_SECONDS, "INFO", "server")  # redis_, server_
            answered += 1
        except (AuthenticationError, ResponseError) as error:
            raise server_refused(f"the server {address} refuses access: {error}. Give its user and password") from error
        except MissingExtraError:
            raise
        except Exception as error:  # of the socket, of redis-py, or of a parser on invalid data
            lost = lost or server_unreachable(
                f"the server {address} does not answer within {START_SECONDS:.0f} s ({error}): start it, or correct "
                "the address"
            )
    if lost is not None and not clusters:
        raise lost
    if clusters == answered:
        cluster = Cluster(addresses, timeout)
        problem = cluster.refresh(START_SECONDS)
        if not cluster.shards:
            raise server_unreachable(f"the cluster of {addresses[0]} has no slot table ({problem}): repair the cluster")
        return cluster
    if clusters:
        raise server_address(
            f"the servers {', '.join(map(str, addresses))} do not belong together: give nodes of one Redis Cluster, or "
            "standalone servers"
        )
    ordered = sorted(addresses, key=lambda address: f"{address}/{address.db}")
    names = [f"{address}/{address.db}" for address in ordered]
    return Standalone(names, [FixedLocation(address) for address in ordered], timeout)
