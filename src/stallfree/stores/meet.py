"""How the nodes of a job learn where the others' servers are.

Every process puts the address of its node's server into the job's key-value store and waits until those of all others
are there and answer. That store is the `TCPStore` at MASTER_ADDR:MASTER_PORT, which torchrun keeps from the start, and
`init_process_group` from then on. It has no password: who can reach it can read the passwords of the servers, as they
can take part in the training itself.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from stallfree.errors import InputError, WaitError
from stallfree.stores.keeper import identify
from stallfree.stores.spawn import Doors, Node

MEET_SECONDS = 300.0
"""Longest wait for the other nodes."""

_VERSION = 2
_ANSWER_SECONDS = 1.0
_SOMEWHERE = "192.0.2.1"  # an address that belongs to nobody, by RFC 5737


@dataclass(frozen=True)
class Place:
    """Which node of its job this is, as the environment tells.

    Attributes:
        number: from 0. Where it is not known which ranks share a node, each counts as one until they have met.
        count: of the nodes.
        host: MASTER_ADDR; empty for one node.
        port: MASTER_PORT.
    """

    number: int = 0
    count: int = 1
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class Peer:
    """A node of the job.

    Attributes:
        name: of its host; further nodes on that host have `#1`, `#2` and so on added. The same in all processes.
        doors: where this process reaches it.
    """

    name: str
    doors: Doors


def find_place() -> Place:
    """This node's place, from what torchrun sets (GROUP_RANK, GROUP_WORLD_SIZE), else RANK, WORLD_SIZE and
    LOCAL_WORLD_SIZE or an initialised `torch.distributed`, else SLURM. One node when nothing is set.

    Ranks that meet at a loop-back address are on one node, unless LOCAL_WORLD_SIZE says something else. Raises
    `InputError` for values that are no numbers or contradict each other, and for several nodes without MASTER_ADDR and
    MASTER_PORT.
    """
    number, count, known = _find_number()
    host = os.environ.get("MASTER_ADDR", "")
    if count == 1 or (not known and _is_loopback(host)):
        return Place()
    if not 0 <= number < count:
        raise InputError(
            f"node {number} of {count}: the environment's RANK, WORLD_SIZE and the like contradict each other. "
            "Start the job with torchrun, or correct them"
        )
    port = _number("MASTER_PORT")
    if not host or port is None:
        raise InputError(
            f"the job has {count} nodes, and MASTER_ADDR and MASTER_PORT do not say where they meet: start it with "
            "torchrun, set both, or use cluster_mode=False"
        )
    return Place(number, count, host, port)


def _find_number() -> tuple[int, int, bool]:
    """Number and count of the nodes; or of the ranks, and False, if it is not known which ranks share a node."""
    number, count = _number("GROUP_RANK"), _number("GROUP_WORLD_SIZE")
    if number is not None and count is not None:
        return number, count, True
    rank, world = _ranks()
    if rank is not None and world is not None:
        here = _number("LOCAL_WORLD_SIZE")
        if here is not None and here > 0 and world % here == 0:
            return rank // here, world // here, True
        return rank, world, False
    number = _number("SLURM_NODEID")
    count = _number("SLURM_STEP_NUM_NODES") or _number("SLURM_NNODES")
    if number is not None and count is not None:
        return number, count, True
    return 0, 1, True


def _ranks() -> tuple[int | None, int | None]:
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _number("RANK"), _number("WORLD_SIZE")


def _number(variable: str) -> int | None:
    given = os.environ.get(variable, "")
    try:
        return int(given) if given else None
    except ValueError as error:
        raise InputError(f"{variable}={given!r} in the environment: give a whole number, or unset it") from error


def find_interface(place: Place) -> str:
    """The address of this host by which other nodes of the job reach it: that of its way to MASTER_ADDR.

    Raises `InputError` when there is none.
    """
    found = _way_to(place.host)
    if _is_loopback(found) and not _is_loopback(place.host):
        found = _way_to(_SOMEWHERE)  # the master's own name may lead to a loop-back address there
    if not found:
        raise InputError(
            f"no way leads to MASTER_ADDR={place.host!r} from here: correct it, or give interface=... with the address "
            "of this host at which the other nodes reach it"
        )
    return found


def _way_to(host: str) -> str:
    """The address of this host on the way to another. Nothing is sent."""
    try:
        family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(there)
            return str(way.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def meet(node: Node, name: str, place: Place | None = None, *, seconds: float = MEET_SECONDS) -> tuple[list[Peer], int]:
    """The nodes of the job that have a store `name`, in the same order everywhere, and the place of this one.

    Args:
        node: this one. If there are several, it has to have a public address.
        name: of the store.
        place: of this node; `find_place()` if None.
        seconds: longest wait for the others.

    Processes that use the same server are one node, whatever their numbers. An address that an earlier attempt of the
    job left behind is noticed: its server does not answer to its password. Raises `WaitError`, which names the nodes
    that are missing, after `seconds`.
    """
    place = find_place() if place is None else place
    own_name = socket.gethostname()
    if place.count == 1:
        return [Peer(own_name, node.unix)], 0
    if node.public is None:
        raise InputError(
            f"the job has {place.count} nodes, and the server of the store {name!r} listens on this host only: give "
            "interface=..."
        )
    own = {
        "version": _VERSION,
        "name": own_name,
        "host": node.public.server.host,
        "port": node.public.server.port,
        "clerk": node.public.clerk.port,
        "password": node.public.server.password,
    }
    deadline = time.monotonic() + seconds
    store = _connect(place, seconds)
    keys = [f"stallfree/{place.count}/{name}/{number}" for number in range(place.count)]
    try:
        store.set(keys[place.number], json.dumps(own))
        _wait_for_all(store, keys, deadline, name)
        told = _wait_for_answers(store, keys, own, deadline, name)
    except RuntimeError as error:
        raise WaitError(
            f"the place where the nodes of the job meet, MASTER_ADDR={place.host}, MASTER_PORT={place.port}, went away "
            f"while the store {name!r} was made: {str(error).splitlines()[0]}"
        ) from error
    return _peers(told, own, node)


def _connect(place: Place, seconds: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(
            place.host, place.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        raise WaitError(
            f"the nodes of the job meet at MASTER_ADDR={place.host}, MASTER_PORT={place.port}, and nobody answered "
            f"there within {seconds:g} s: start the job with torchrun, or call torch.distributed.init_process_group "
            "before the store is made"
        ) from error


def _wait_for_all(store: Any, keys: list[str], deadline: float, name: str) -> None:
    pause = 0.002
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
            raise WaitError(
                f"of the {len(keys)} nodes of the job, {_nodes(missing)} did not make the store {name!r} in time: all "
                "nodes have to, at about the same time"
            )
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def _nodes(numbers: list[str]) -> str:
    shown = numbers if len(numbers) <= 20 else [*numbers[:20], f"{len(numbers) - 20} more"]
    return f"number {', '.join(shown)}"


def _wait_for_answers(
    store: Any, keys: list[str], own: dict[str, Any], deadline: float, name: str
) -> list[dict[str, Any]]:
    """What every node has told, when all their servers answer."""
    told: list[dict[str, Any]] = []
    answered = {_where(own): own["password"]}
    for number, key in enumerate(keys):
        while True:
            peer = _unpack(store.get(key), number)
            where = _where(peer)
            if (
                answered.get(where) != peer["password"]
                and identify(where, peer["password"], _ANSWER_SECONDS)
                and _is_open(where[0], int(peer["clerk"]))
            ):
                answered[where] = peer["password"]
            if answered.get(where) == peer["password"]:
                told.append(peer)
                break
            if time.monotonic() > deadline:
                raise WaitError(
                    f"the server of node {number} of the store {name!r}, {peer['name']} at {where[0]} ports {where[1]} "
                    f"and {peer['clerk']}, does not answer here: let the ports through the firewall, or give "
                    "interface=... on that node"
                )
            time.sleep(0.05)
    return told


def _is_open(host: str, port: int) -> bool:
    """Whether somebody listens there: the clerk, or its keeper as long as that is starting it."""
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _where(peer: dict[str, Any]) -> tuple[str, int]:
    return str(peer["host"]), int(peer["port"])


def _unpack(told: bytes, number: int) -> dict[str, Any]:
    try:
        peer = json.loads(told)
        if peer["version"] == _VERSION:
            return dict(peer)
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"node {number} of the job runs another release of stallfree: install the same on all nodes")


def _peers(told: list[dict[str, Any]], own: dict[str, Any], node: Node) -> tuple[list[Peer], int]:
    """One peer for each server, in the order of the nodes' numbers."""
    peers: list[Peer] = []
    places: dict[tuple[str, int], int] = {}
    hosts: dict[str, int] = {}
    for peer in told:
        where = _where(peer)
        if where in places:
            continue
        places[where] = len(peers)
        before = hosts.get(peer["name"], 0)
        hosts[peer["name"]] = before + 1
        doors = node.unix if where == _where(own) else Doors.at(*where, int(peer["clerk"]), peer["password"])
        peers.append(Peer(f"{peer['name']}#{before}" if before else peer["name"], doors))
    return peers, places[_where(own)]
