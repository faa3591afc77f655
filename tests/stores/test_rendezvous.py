"""The nodes of a job find each other, with a real store of the job and nodes in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from job_store import JobStore
from server_tools import Listener, is_alive, make_server, record, server_at

from children import Child
from redis_servers import PATIENCE, needs_server, until
from stallfree.errors import InputError, WaitError
from stallfree.stores.addresses import Address
from stallfree.stores.launch import place as place_module
from stallfree.stores.launch.place import Place, find_interface, find_place
from stallfree.stores.launch.rendezvous import NodeAddresses
from stallfree.stores.launch.server import NodeServer

HOST = socket.gethostname()
VARIABLES = (
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_NODEID", "SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def master() -> Iterator[JobStore]:
    store = JobStore()
    yield store
    store.close()


class Rank:
    """A process of a job: it attaches to the server of its node, meets the others, and then calls functions."""

    def __init__(self, root: Path, place: Place) -> None:
        root.mkdir(mode=0o700, exist_ok=True)
        self.folder = root / "redis-one"
        self._end, theirs = multiprocessing.Pipe()
        self.child = Child(self._live, theirs, place)
        theirs.close()

    def _live(self, connection: Any, place: Place) -> None:
        self._end.close()
        with (
            make_server(root=self.folder.parent) as server,
            NodeAddresses(server, "one", place, seconds=PATIENCE) as addresses,
        ):
            connection.send(None)
            while (call := connection.recv()) is not None:
                function, arguments = call
                connection.send(function(addresses, *arguments))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Its result there, given the addresses."""
        self._end.send((function, arguments))
        return self.receive()

    def receive(self) -> Any:
        """What it sends next; first None, when it has met the others."""
        assert self._end.poll(2 * PATIENCE), "the rank sends nothing"
        return self._end.recv()

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._end.close()
        self.child.kill()

    def close(self) -> None:
        """Let it end."""
        self._end.send(None)
        assert self.child.wait() == 0
        self._end.close()


@pytest.fixture
def job(tmp_path: Path, master: JobStore) -> Iterator[Callable[..., list[Rank]]]:
    """Starts ranks of these nodes, one number for each, and returns when they have met."""
    ranks: list[Rank] = []

    def start(*nodes: int) -> list[Rank]:
        for number, node in enumerate(nodes):
            ranks.append(Rank(tmp_path / f"node{node}", Place(number, len(nodes), "127.0.0.1", master.port)))
        for rank in ranks:
            rank.receive()
        return ranks

    yield start
    for rank in ranks:
        rank.close()


def names(addresses: NodeAddresses) -> tuple[tuple[str, ...], int]:
    return addresses.names, addresses.me


def of(addresses: NodeAddresses, place: int) -> tuple[int, Address] | None:
    return addresses.of(place)


def confirm(addresses: NodeAddresses, place: int, after: int) -> None:
    addresses.confirm(place, after)


def servers(addresses: NodeAddresses) -> list[int | None]:
    """The process ids of the servers at all addresses."""
    return [server_at((addresses.of(place) or (0, None))[1]) for place in range(len(addresses.names))]


def in_fork(addresses: NodeAddresses, place: int, after: int) -> bool:
    """Whether a forked child and a pickled copy in it get an address that is confirmed after `after`."""

    def read() -> None:
        copy = pickle.loads(pickle.dumps(addresses))
        assert threading.active_count() == 1
        assert (copy.names, copy.me) == (addresses.names, addresses.me)
        assert copy.of(place) == addresses.of(place)
        addresses.confirm(place, after)
        until(lambda: addresses.of(place)[0] > after, "it is confirmed")
        assert copy.of(place)[1] == addresses.of(place)[1]
        addresses.close()
        os._exit(server_at(addresses.of(place)[1]) is None)

    return Child(read).wait() == 0


def confirmed(rank: Rank, place: int) -> Address:
    """The address that a rank gets after a lost connection."""
    last = rank.call(of, place)[0]
    rank.call(confirm, place, last)

    def newer() -> Any:
        found = rank.call(of, place)
        return found and found[0] > last and found[1]

    address: Address = until(newer, "the address is confirmed")
    return address


# --- meeting ----------------------------------------------------------------------------------------------------------


@needs_server
def test_all_processes_of_three_nodes_find_the_same_servers_in_the_same_order(
    job: Callable[..., list[Rank]],
) -> None:
    ranks = job(0, 0, 1, 2)
    places = (0, 0, 1, 2)
    assert [rank.call(names) for rank in ranks] == [((HOST, f"{HOST}#1", f"{HOST}#2"), place) for place in places]
    expected = [record(rank.folder)["pid"] for rank in ranks[1:]]
    assert [rank.call(servers) for rank in ranks] == [expected] * 4
    for path in ranks[0].folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


@needs_server
def test_what_an_earlier_attempt_left_is_passed_over_and_gets_nothing(
    job: Callable[..., list[Rank]], master: JobStore
) -> None:
    """The address of a server that has ended, whose port another process has now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Listener(port) as thief:
        for number in range(2):
            master.set(f"stallfree/2/one/{number}", json.dumps({"version": 3, "host": "old", "id": "old"}))
        left = {"sequence": 7, "host": "127.0.0.1", "port": port, "password": "old"}
        master.set("stallfree/node/old/address", json.dumps(left))
        master.set("stallfree/node/old/requests", "7")
        ranks = job(0, 1)
        assert ranks[0].call(names) == ((HOST, f"{HOST}#1"), 0)
        assert None not in ranks[0].call(servers)
        until(lambda: not any(os.listdir(rank.folder / "requests") for rank in ranks), "all requests are removed")
    assert (thief.connections, thief.received) == (0, b"")


@needs_server
def test_a_job_of_one_node_needs_no_store() -> None:
    with make_server() as server:
        for place in (Place(), None):
            threads = threading.active_count()
            with NodeAddresses(server, "one", place) as addresses:
                assert names(addresses) == ((HOST,), 0)
                number, address = addresses.of(0)
                assert address == server.address()
                addresses.confirm(0, number)
                assert addresses.of(0) == (number + 1, address)
                os.kill(record(server.folder)["pid"], signal.SIGKILL)
                until(lambda: (addresses.of(0) or (0,))[0] > number + 1, "it has another address")  # noqa: B023
                assert threading.active_count() == threads
                assert os.listdir(server.folder / "requests") == []


# --- servers that die -------------------------------------------------------------------------------------------------


@needs_server
def test_a_restarted_server_is_found_after_confirm_and_nothing_is_sent_to_its_old_port(
    job: Callable[..., list[Rank]],
) -> None:
    ranks = job(0, 1, 2)
    first = record(ranks[2].folder)
    os.kill(first["supervisor"], signal.SIGSTOP)
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: not is_alive(first["pid"]), "the server is dead")
    with Listener(first["port"]) as thief:
        before = ranks[0].call(of, 2)
        ranks[0].call(confirm, 2, before[0])
        assert ranks[2].call(of, 2) is None
        assert in_turn(ranks[0]) == before  # while no server runs, nothing is confirmed
        os.kill(first["supervisor"], signal.SIGCONT)
        second = record(ranks[2].folder, first["start"])
        for rank in ranks[:2]:
            address = confirmed(rank, 2)
            assert (address.port, address.password) == (second["port"], second["password"])
        expected = [record(rank.folder)["pid"] for rank in ranks]
        assert [rank.call(servers) for rank in ranks] == [expected] * 3
    assert (thief.connections, thief.received) == (0, b"")
    # A request is removed after its address was written.
    until(lambda: not any(os.listdir(rank.folder / "requests") for rank in ranks), "all requests are removed")


def in_turn(rank: Rank) -> Any:
    """The address of the third node, once a confirmation that was requested later, of the second, has come."""
    confirmed(rank, 1)
    return rank.call(of, 2)


@needs_server
def test_another_process_of_the_node_takes_over_when_the_announcer_is_killed(job: Callable[..., list[Rank]]) -> None:
    ranks = job(0, 1, 1, 1)
    for _ in range(2):
        confirmed(ranks[0], 1)
        lock = ranks[1].folder / "announcer"
        (announcer,) = [rank for rank in ranks[1:] if holds_lock(rank.child.pid, lock)]
        announcer.kill()
        ranks.remove(announcer)
        assert server_at(confirmed(ranks[0], 1)) == record(ranks[1].folder)["pid"]
        assert server_at(confirmed(ranks[1], 0)) == record(ranks[0].folder)["pid"]


def holds_lock(pid: int, path: Path) -> bool:
    """Whether a process has locked a byte of a file."""
    inode = path.stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(
        int(fields[4]) == pid and int(fields[5].rpartition(":")[2]) == inode for fields in locks if fields[1] != "->"
    )


@needs_server
def test_forked_children_and_pickled_copies_use_files_only(job: Callable[..., list[Rank]]) -> None:
    ranks = job(0, 1)
    for place in range(2):
        assert ranks[0].call(in_fork, place, ranks[0].call(of, place)[0])
    assert confirmed(ranks[0], 1)  # the parent's thread goes on


@needs_server
def test_what_is_known_stays_when_the_store_goes_away(job: Callable[..., list[Rank]], master: JobStore) -> None:
    ranks = job(0, 1)
    before = ranks[0].call(servers)
    os.kill(master._process.pid, signal.SIGKILL)
    for rank in ranks:
        until(lambda rank=rank: not holds_lock(rank.child.pid, rank.folder / "announcer"), "its thread has ended")
    assert ranks[0].call(servers) == before
    os.kill(before[0], signal.SIGKILL)
    until(lambda: ranks[0].call(servers)[0] not in (None, before[0]), "the own server has another address")


# --- nodes that do not come -------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[NodeServer]:
    with make_server() as made:
        yield made


def meet(server: NodeServer, place: Place, seconds: float = PATIENCE) -> None:
    NodeAddresses(server, "one", place, seconds=seconds).close()


@needs_server
def test_nodes_that_do_not_come_are_named(server: NodeServer, master: JobStore) -> None:
    place = Place(1, 4, "127.0.0.1", master.port)
    master.set("stallfree/4/one/2", json.dumps({"version": 3, "host": "old", "id": "old"}))
    master.set("stallfree/4/another/3", "here")
    with pytest.raises(WaitError, match=r"of the 4 nodes of the job, number 0, 3 did not create the store 'one'"):
        meet(server, place, 1)
    for number in (0, 3):
        master.set(f"stallfree/4/one/{number}", json.dumps({"version": 3, "host": "old", "id": "old"}))
    with pytest.raises(WaitError, match=r"of the 4 nodes of the job, number 0, 2, 3 did not create"):
        meet(server, place, 1)


@needs_server
def test_a_server_that_does_not_answer_is_named(server: NodeServer, master: JobStore) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # as behind a firewall
        port = silent.getsockname()[1]
        master.set("stallfree/2/one/1", json.dumps({"version": 3, "host": "far", "id": "far"}))
        address = {"sequence": 9, "host": "127.0.0.1", "port": port, "password": "x"}
        master.set("stallfree/node/far/address", json.dumps(address))
        message = f"node 1 of the store 'one', far at 127.0.0.1 port {port}, does not answer this node: allow the port"
        with pytest.raises(WaitError, match=message):
            meet(server, Place(0, 2, "127.0.0.1", master.port), 1)


@needs_server
def test_no_store_where_the_nodes_should_meet(server: NodeServer) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(
            WaitError, match=rf"MASTER_PORT={port} did not answer .* call torch.distributed.init_process_group before"
        ):
            meet(server, Place(0, 2, "127.0.0.1", port), 0.2)


@needs_server
def test_a_node_of_another_release(server: NodeServer, master: JobStore) -> None:
    for value in ("{", "[]", '{"version": 1}', "7"):
        master.set("stallfree/2/one/1", value)
        with pytest.raises(InputError, match="node 1 of the job runs another release"):
            meet(server, Place(0, 2, "127.0.0.1", master.port))


@needs_server
def test_several_nodes_need_an_interface(server: NodeServer) -> None:
    with pytest.raises(InputError, match=r"only connections from this host: give interface"):
        meet(server, Place(0, 2, "10.0.0.1", 1))


# --- the place of a node ----------------------------------------------------------------------------------------------


FAR = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
NEAR = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Place()),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "RANK": "9", "WORLD_SIZE": "24", **FAR}, (1, 3)),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", **NEAR}, Place(1, 2, "127.0.0.1", 29500)),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", **FAR}, Place()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", **FAR}, (2, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", **NEAR}, Place(1, 2, "127.0.0.1", 29500)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **FAR}, Place()),
        ({"RANK": "5", "WORLD_SIZE": "8", **FAR}, (5, 8)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "3", **FAR}, (5, 8)),
        ({"RANK": "5", "WORLD_SIZE": "8", **NEAR}, Place()),
        ({"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}, Place()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place()),
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "4", **FAR}, (1, 4)),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2", **FAR}, (0, 2)),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "1"}, Place()),
        ({"SLURM_NNODES": "4"}, Place()),
    ],
)
def test_the_place_by_the_environment(
    given: dict[str, str], expected: Place | tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert find_place() == (expected if isinstance(expected, Place) else Place(*expected, "10.0.0.1", 29500))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            "the job has 2 nodes, and MASTER_ADDR or MASTER_PORT is not set",
        ),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "or MASTER_PORT is not set"),
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "2"}, "or set both"),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2", **FAR}, "node 2 of 2: .* contradict each other"),
        ({"RANK": "x", "WORLD_SIZE": "2", **FAR}, "RANK='x' in the environment: give a whole number, or unset it"),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", **FAR, "MASTER_PORT": "?"}, r"MASTER_PORT='\?'"),
    ],
)
def test_an_environment_that_makes_no_sense(
    given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=message):
        find_place()


def test_the_place_by_a_process_group(monkeypatch: pytest.MonkeyPatch, master: JobStore) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(InputError, match="the job has 4 nodes"):
        find_place()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "7")
    assert find_place() == Place(3, 4, "10.0.0.1", 7)


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"master": "10.0.0.5"}, "10.0.0.5"),
        ({"master": "127.0.1.1", "192.0.2.1": "10.0.0.6"}, "10.0.0.6"),  # its own name, on Debian
        ({"master": "", "192.0.2.1": "10.0.0.6"}, None),
        ({"master": "127.0.1.1", "192.0.2.1": ""}, None),
    ],
)
def test_the_interface_is_that_of_the_route_to_the_master(
    routes: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "_route_to", routes.__getitem__)
    if expected is None:
        with pytest.raises(InputError, match="there is no route to MASTER_ADDR='master' from here"):
            find_interface(Place(0, 2, "master", 1))
    else:
        assert find_interface(Place(0, 2, "master", 1)) == expected


def test_the_route_to_this_host() -> None:
    assert find_interface(Place(0, 2, "127.0.0.1", 1)) == "127.0.0.1"
    assert find_interface(Place(0, 2, "localhost", 1)) in ("127.0.0.1", "::1")
    with pytest.raises(InputError, match=r"no\.such\.host\.invalid"):
        find_interface(Place(0, 2, "no.such.host.invalid", 1))
