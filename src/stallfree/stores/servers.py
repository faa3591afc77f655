"""Which server holds which sample: servers that stand alone, or the masters of a Redis Cluster."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError, StorageError
from stallfree.stores.addresses import Address
from stallfree.stores.shard import REQUEST_BYTES, Fixed, Location, Request, Shard

Array = npt.NDArray[Any]

START_SECONDS = 5.0
"""Seconds that a given server may be silent when it is used for the first time."""


class Servers(Protocol):
    """The servers of a data set. Picklable."""

    names: list[str]
    """Of servers that stand alone: they decide who owns an id. Empty for a cluster, where the key decides."""

    @property
    def shards(self) -> list[Shard]:
        """All servers."""

    def split(self, owner: Array, keys: Sequence[bytes]) -> list[tuple[Shard, Array]]:
        """Each server that owns some of `keys`, with their positions. `owner` is that of each, if there are names."""

    def requests(self, keys: Sequence[bytes], typical: int) -> list[Request]:
        """How to ask a server for `keys`, whose values have about `typical` bytes."""

    def moved(self, error: Exception) -> bool:
        """Whether `error` says that another server holds a key now. Later calls of `split` follow that."""

    def close(self) -> None:
        """Close all connections."""


class Standalone:
    """Servers that stand alone, in the same order everywhere."""

    def __init__(self, names: Sequence[str], locations: Sequence[Location], timeout: float) -> None:
        self.names, self._locations, self._timeout = list(names), list(locations), timeout
        self.shards = [Shard(location, timeout) for location in locations]

    def split(self, owner: Array, keys: Sequence[bytes]) -> list[tuple[Shard, Array]]:
        """See `Servers`."""
        if len(self.shards) == 1:
            return [(self.shards[0], np.arange(len(keys)))] if len(keys) else []
        return [(self.shards[place], np.flatnonzero(owner == place)) for place in np.unique(owner).tolist()]

    def requests(self, keys: Sequence[bytes], typical: int) -> list[Request]:
        """MGETs of about 512 KiB."""
        step = max(1, REQUEST_BYTES // max(1, typical))
        return [[("MGET", *keys[start : start + step])] for start in range(0, len(keys), step)]

    def moved(self, error: Exception) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """See `Servers`."""
        for shard in self.shards:
            shard.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Standalone, (self.names, self._locations, self._timeout)


class Cluster:
    """The masters of a Redis Cluster. redis-py's `RedisCluster` says which of them serves a key.

    Args:
        nodes: addresses of one or more nodes. What is said of the first (user, password, TLS) holds for all.
        timeout: seconds that a node may be silent.
    """

    def __init__(self, nodes: Sequence[Address], timeout: float) -> None:
        self.names: list[str] = []
        self._nodes, self._timeout = list(nodes), timeout
        self._lock = threading.Lock()
        self._shards: dict[tuple[str, int], Shard] = {}
        self._cluster: Any = None

    @property
    def shards(self) -> list[Shard]:
        """The masters."""
        return [self._shard(node) for node in self._client().get_primaries()]

    def split(self, owner: Array, keys: Sequence[bytes]) -> list[tuple[Shard, Array]]:
        """See `Servers`. Keys of slots that no master serves are in none."""
        cluster, positions = self._client(), dict[Shard, list[int]]()
        for position, key in enumerate(keys):
            node = cluster.get_node_from_key(key)
            if node is not None:
                positions.setdefault(self._shard(node), []).append(position)
        return [(shard, np.array(found)) for shard, found in positions.items()]

    def requests(self, keys: Sequence[bytes], typical: int) -> list[Request]:
        """GETs, as an MGET must not have keys of several slots."""
        step = max(1, REQUEST_BYTES // max(1, typical))
        return [[("GET", key) for key in keys[start : start + step]] for start in range(0, len(keys), step)]

    def moved(self, error: Exception) -> bool:
        """See `Servers`."""
        from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

        if isinstance(error, MovedError):
            self.refresh()
        return isinstance(error, (MovedError, AskError, TryAgainError, ClusterDownError))

    def refresh(self) -> None:
        """Read the table of slots again."""
        from redis.exceptions import RedisError

        with contextlib.suppress(RedisError, OSError):  # no node answers: what was known stays
            self._client().nodes_manager.initialize()

    def close(self) -> None:
        """See `Servers`."""
        for shard in self._shards.values():
            shard.close()
        if self._cluster is not None:
            self._cluster[1].close()

    def _shard(self, node: Any) -> Shard:
        where = str(node.host), int(node.port)
        shard = self._shards.get(where)
        if shard is None:
            with self._lock:
                location = _Node(self._nodes[0].at(*where), self)
                shard = self._shards.setdefault(where, Shard(location, self._timeout))
        return shard

    def _client(self) -> Any:
        """A client for the table of slots, made anew in a forked child."""
        if self._cluster is None or self._cluster[0] != os.getpid():
            self._cluster = os.getpid(), self._nodes[0].cluster(self._nodes, self._timeout)
        return self._cluster[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Cluster, (self._nodes, self._timeout)


class _Node(Fixed):
    """A node of a cluster. When it is lost, another one may take its place."""

    def __init__(self, address: Address, cluster: Cluster) -> None:
        super().__init__(address)
        self._cluster = cluster

    def confirm(self, after: int) -> None:
        """Read the table of slots again."""
        self._cluster.refresh()


def find_servers(addresses: Sequence[Address], timeout: float) -> Servers:
    """The servers at `addresses`: all that stand alone, or one or more nodes of one Redis Cluster.

    Raises `InputError` for servers that cannot be used together or that refuse us, `StorageError` for one that does
    not answer within 5 s. Of a cluster, one node that answers is enough.
    """
    from redis.exceptions import AuthenticationError, RedisError, ResponseError

    if not addresses or len({(str(address), address.db) for address in addresses}) < len(addresses):
        given = ", ".join(map(str, addresses)) or "none"
        raise InputError(f"the servers {given} were given: give one or more, each of them once")
    answered = clusters = 0
    lost: StorageError | None = None
    for address in addresses:
        client = address.client(START_SECONDS)
        try:
            client.ping()
            with contextlib.suppress(ResponseError):  # a user who must not ask
                clusters += client.info("server").get("redis_mode") == "cluster"
            answered += 1
        except (AuthenticationError, ResponseError) as error:
            raise InputError(f"the server {address} refuses us: {error}. Give its user and password") from error
        except (RedisError, OSError) as error:
            lost = lost or StorageError(
                f"the server {address} does not answer within {START_SECONDS:.0f} s ({error}): start it, or correct "
                "the address"
            )
        finally:
            client.close()
    if lost is not None and not clusters:
        raise lost
    if clusters == answered:
        return Cluster(addresses, timeout)
    if clusters:
        raise InputError(
            f"the servers {', '.join(map(str, addresses))} do not belong together: give nodes of one Redis Cluster, or "
            "servers that stand alone"
        )
    ordered = sorted(addresses, key=lambda address: f"{address}/{address.db}")
    names = [f"{address}/{address.db}" for address in ordered]
    return Standalone(names, [Fixed(address) for address in ordered], timeout)
