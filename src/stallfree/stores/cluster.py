"""Where the parts of a data set lie among given servers, which stand alone or are the nodes of a Redis Cluster.

A cluster has 16,384 slots, each served by one of its masters, and refuses a request for keys of several slots. The slot
of a key follows from what it has in braces, the tag. So a data set has as many parts as the cluster has masters, each
under a tag of its own: the smallest number whose slot that master serves. Who attaches first writes the tags down in
the cluster, and all others use these: parts are the same for everybody, whoever serves their slots later.

What follows: a master that fails over to a replica takes nothing from anybody but hits. A slot that is given to another
master takes its whole part along; while that lasts, most samples of the part are misses. Masters that join later are
used by data sets that are stored after that, or after `clear`.
"""

from __future__ import annotations

import binascii
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stallfree.errors import InputError, StallfreeError, StorageError
from stallfree.stores.endpoint import Address, Endpoint
from stallfree.stores.wire import Refused, Wire

T = TypeVar("T")

_SLOTS = 1 << 14

START_SECONDS = 5.0
"""Seconds that a server may be silent when it is asked for the first time."""

_ASKED = 2
"""Other nodes that are asked who serves a slot."""


@dataclass(frozen=True)
class Spot:
    """Where a part of a data set lies. Picklable.

    Attributes:
        address: of the server.
        tag: of the keys in a cluster; empty for a server that stands alone.
        nodes: addresses of the cluster's nodes.
    """

    address: Address
    tag: str = ""
    nodes: tuple[Address, ...] = ()

    @property
    def name(self) -> str:
        """The same for all processes, whoever serves a slot at the moment."""
        return f"{{{self.tag}}}" if self.tag else f"{self.address}/{self.address.db}"

    def endpoint(self, timeout: float) -> Endpoint:
        """The server, as `Endpoint` has it."""
        return SlotEndpoint(self, timeout) if self.tag else Endpoint(self.address, timeout)


def find_spots(addresses: Sequence[Address], key: str) -> list[Spot]:
    """Where the parts of a data set lie, in an order that is the same for everybody.

    Args:
        addresses: of all servers that stand alone, or of one or more nodes of one Redis Cluster.
        key: of the data set, as text.

    Raises `InputError` for servers that cannot be used together or do not let us in, `StorageError` for one that does
    not answer within 5 s. Of a cluster, one node that answers is enough.
    """
    layouts, lost = [], None
    for address in addresses:
        try:
            layouts.append(look(address, START_SECONDS))
        except StorageError as error:
            lost = lost or error
    clusters = [layout for layout in layouts if layout is not None]
    if lost and not clusters:
        raise lost
    if not clusters:
        return sorted(map(Spot, addresses), key=lambda spot: spot.name)
    if len(clusters) < len(layouts) or any(clusters[0].ids.isdisjoint(other.ids) for other in clusters):
        raise InputError(
            f"the servers {', '.join(map(str, addresses))} do not belong together: give nodes of one Redis Cluster, or "
            "servers that stand alone"
        )
    layout = clusters[0]
    return [
        Spot(layout.masters.get(slot_of(tag), layout.nodes[0]), tag, layout.nodes)
        for tag in _agree_on_tags(layout, key)
    ]


def slot_of(tag: str) -> int:
    """The slot of all keys with this tag, and of a key without tag."""
    return binascii.crc_hqx(tag.encode(), 0) % _SLOTS


def _agree_on_tags(layout: Layout, key: str) -> list[str]:
    """A tag for each master, as whoever came first has written them down."""
    tags: dict[Address, str] = {}
    for number in range(_SLOTS):  # a master that serves next to nothing may be left out
        master = layout.masters.get(slot_of(str(number)))
        if master is not None:
            tags.setdefault(master, str(number))
    wished = ",".join(sorted(tags.values()))
    noted = tags_key(key)
    client = layout.masters.get(slot_of(noted), layout.nodes[0]).client(START_SECONDS)
    from redis.exceptions import RedisError

    found = None
    with contextlib.suppress(RedisError):  # then what is wished is what most others wish
        client.set(noted, wished, nx=True)
    with contextlib.suppress(RedisError):
        found = client.get(noted)
    client.close()
    text = found.decode(errors="replace") if isinstance(found, bytes) else wished
    return text.split(",") if all(map(str.isdecimal, text.split(","))) else wished.split(",")


def tags_key(key: str) -> str:
    """Where the tags of a data set are written down."""
    return f"stallfree-tags:{key}"


def forget_tags(spot: Spot, key: str, timeout: float) -> None:
    """Have the tags of a data set be chosen anew by whoever attaches next.

    Args:
        spot: of one of its parts; where that stands alone, there are none.
        key: of the data set, as text.
        timeout: seconds that a server may be silent.
    """
    if not spot.tag:
        return
    from redis.exceptions import RedisError

    endpoint = SlotEndpoint(replace(spot, tag=tags_key(key)), timeout)  # a key without braces is its own tag
    endpoint.seek()
    with contextlib.suppress(RedisError):
        endpoint.client().delete(tags_key(key))
    endpoint.close()


@dataclass(frozen=True)
class Layout:
    """Who serves what in a cluster, as one of its nodes sees it.

    Attributes:
        masters: the address of the master of each slot that is served.
        nodes: of all nodes, replicas too.
        ids: by which the nodes know each other.
    """

    masters: dict[int, Address]
    nodes: tuple[Address, ...]
    ids: frozenset[bytes]


def look(address: Address, seconds: float) -> Layout | None:
    """Ask a node for the layout of its cluster; None if it says that it stands alone, or may not say.

    Args:
        address: of the node. What is said there of passwords and TLS holds for all nodes.
        seconds: that it may be silent.

    Raises `InputError` if it does not let us in, `StorageError` if it does not answer, or serves nothing.
    """
    connection: Any = address.connection(seconds)
    from redis import exceptions

    asked = False
    try:
        connection.connect()
        connection.send_command("PING")
        connection.read_response()
        asked = True
        connection.send_command("CLUSTER", "SLOTS")
        return _layout(connection.read_response(), address)
    except (exceptions.AuthenticationError, exceptions.ResponseError) as error:
        if asked:  # it is no cluster, or has no such command, or this user may not ask
            return None
        raise InputError(
            f"the server {address} does not let us in: {error}. Check username, password and db"
        ) from error
    except exceptions.RedisError as error:
        raise StorageError(f"no server answers at {address}: {error}. Start it, or leave it out") from error
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise StorageError(
            f"the server {address} tells of its cluster what nobody understands: {error}. Give Redis or Valkey"
        ) from error
    finally:
        connection.disconnect()


def _layout(slots: Any, asked: Address) -> Layout:
    masters: dict[int, Address] = {}
    nodes: dict[Address, bytes] = {}
    for first, last, *servers in slots:
        places = [_place_of(server, asked) for server in servers]
        masters.update(dict.fromkeys(range(first, last + 1), places[0]))
        nodes.update(zip(places, (bytes(server[2]) for server in servers), strict=True))
    if not masters:
        raise StorageError(f"the Redis Cluster of {asked} serves no slots: give them to its nodes first")
    return Layout(masters, tuple(nodes), frozenset(nodes.values()))


def _place_of(server: Any, asked: Address) -> Address:
    """The address of a node: host or nothing, port, id and, in newer servers, a list of further names."""
    host, port, _, *more = server
    if host == b"?" and more:  # it has no name; its number is among the others
        pairs = dict(zip(more[0][::2], more[0][1::2], strict=True))
        host = pairs.get(b"ip")
    return _at(asked, host.decode() if host else "", int(port))


def _at(known: Address, host: str, port: int) -> Address:
    """Another node of the cluster of `known`; no host means the same one."""
    return replace(known, host=host or known.host, port=port, path="")


class SlotEndpoint(Endpoint):
    """The master that serves a slot of a cluster, whichever that is at the time.

    One that refuses because another serves the slot now tells which; that is what `moved` is for. When it is lost, its
    breaker asks other nodes who serves the slot before it pings.

    Args:
        spot: with the tag whose slot it is, and where it was served when that was looked up.
        timeout: seconds that a server may be silent, for each step of connecting and asking.
    """

    def __init__(self, spot: Spot, timeout: float = 0.25) -> None:
        super().__init__(spot.address, timeout)
        self._spot = spot
        self._returned = self.breaker.returned

    def run(self, call: Callable[[Wire], T]) -> T | None:
        """See `Endpoint`. When another process has found the server back, it may be another one."""
        returned = self.breaker.returned
        if returned != self._returned and self.breaker.closed:
            self._returned = returned
            self.seek()
        return super().run(call)

    def moved(self, error: Refused) -> bool:
        """Go where the server has said; False if it said nothing of that kind."""
        if error.code != "MOVED":
            return False
        host, _, port = error.text.rpartition(" ")[2].rpartition(":")
        if host != "?" and port.isdecimal():
            self.move(_at(self.address, host, int(port)))
        else:
            self.seek()
        return True

    def seek(self) -> None:
        """Go where other nodes say. They have `timeout` seconds each, and three are asked at most."""
        others = [node for node in self._spot.nodes if node != self.address]
        for node in [*random.sample(others, min(_ASKED, len(others))), self.address]:
            with contextlib.suppress(StallfreeError):
                layout = look(node, self.timeout)
                master = layout and layout.masters.get(slot_of(self._spot.tag))
                if master:
                    if master != self.address:
                        self.move(master)
                    return

    def _ping(self) -> None:
        self.seek()
        super()._ping()

    def __reduce__(self) -> tuple[Any, ...]:
        return SlotEndpoint, (replace(self._spot, address=self.address), self.timeout)
