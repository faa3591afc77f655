"""The number of this node in its job, and the address at which other nodes reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

from stallfree.errors import launch_environment, network_interface

_RESERVED_ADDRESS = "192.0.2.1"  # reserved for documentation by RFC 5737: no host has it


@dataclass(frozen=True)
class Place:
    """The number of this node in its job, from environment variables.

    Attributes:
        number: from 0. If it is unknown which ranks share a node, each rank has its own number.
        count: number of nodes.
        host: MASTER_ADDR; empty for one node.
        port: MASTER_PORT.
    """

    number: int = 0
    count: int = 1
    host: str = ""
    port: int = 0


def find_place() -> Place:
    """This node's place, from the variables of torchrun, `torch.distributed` or SLURM.

    The first that is set counts: GROUP_RANK and GROUP_WORLD_SIZE; RANK and WORLD_SIZE (or an initialised
    `torch.distributed`) with LOCAL_WORLD_SIZE; SLURM_NODEID and SLURM_NNODES. One node if nothing is set. Ranks whose
    MASTER_ADDR is a loop-back address are on one node, unless LOCAL_WORLD_SIZE is set.

    Raises `InputError` for values that are not numbers or contradict each other, and for several nodes without
    MASTER_ADDR and MASTER_PORT.
    """
    number, count, known = _find_number()
    host = os.environ.get("MASTER_ADDR", "")
    if count == 1 or (not known and is_loopback(host)):
        return Place()
    if not 0 <= number < count:
        raise launch_environment(
            f"node {number} of {count}: RANK, WORLD_SIZE or similar variables of the environment contradict each "
            "other. Start the job with torchrun, or correct them"
        )
    port = _number("MASTER_PORT")
    if not host or port is None:
        raise launch_environment(
            f"the job has {count} nodes, and MASTER_ADDR or MASTER_PORT is not set: start it with torchrun, or set both"
        )
    return Place(number, count, host, port)


def _find_number() -> tuple[int, int, bool]:
    """Number and count of the nodes, and True.

    If it is unknown which ranks share a node: number and count of the ranks, and False.
    """
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
        raise launch_environment(
            f"{variable}={given!r} in the environment: give a whole number, or unset it"
        ) from error


def find_interface(place: Place) -> str:
    """The address of this host on its route to MASTER_ADDR. Raises `InputError` if there is no route."""
    found = _route_to(place.host)
    if is_loopback(found) and not is_loopback(place.host):
        found = _route_to(_RESERVED_ADDRESS)  # the master may resolve its own name to a loop-back address
    if not found:
        raise network_interface(
            f"there is no route to MASTER_ADDR={place.host!r} from here: correct it, or give interface=... with the "
            "address of this host at which the other nodes reach it"
        )
    return found


def _route_to(host: str) -> str:
    """The address of this host on the route to another; empty if there is none. Nothing is sent."""
    try:
        family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as test:
            test.connect(there)
            return str(test.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def is_loopback(host: str) -> bool:
    """Whether `host` is this host itself, by its number or as "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
