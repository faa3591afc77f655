"""The nodes of a job find each other, with a real store of the job and nodes in processes of their own."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed
from job_store import JobStore
from node_tools import PATIENCE, make_node, needs_server, server_at, told, until
from stallfree.stores.endpoint import Address
from stallfree.stores.meet import Peer, Place, find_interface, find_place, meet
from stallfree.stores.spawn import Doors

from children import Child
from stallfree.errors import InputError, WaitError
from stallfree.stores import meet as meeting

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


@dataclass(frozen=True)
class Stand:
    """As much of a node as a meeting needs; nobody is at its addresses."""

    unix: Doors
    public: Doors | None

    @staticmethod
    def at(port: int, password: str = "secret") -> Stand:
        here = Doors(Address(path=f"/nowhere/{port}"), Address(path=f"/nowhere/{port}/clerk"))
        return Stand(here, Doors.at("127.0.0.1", port, port + 1, password))


def process(folder: Path, place: Place, root: str, write: str) -> Child:
    """A process of the node that is `root`, which writes what it finds."""

    def work() -> None:
        os.environ["STALLFREE_ROOT"] = str(folder / root)
        with make_node(interface="127.0.0.1") as node:
            peers, me = meet(node, "one", place, seconds=PATIENCE)
            own = told(node.folder)["pid"]
            found = [peer.name for peer in peers], me, [server_at(peer.doors.server) for peer in peers], own
            (folder / write).write_text(json.dumps(found))
            for number, doors in enumerate(peer.doors for peer in peers):
                assert (doors == node.unix) == (number == me)
                assert bool(doors.server.path) == bool(doors.clerk.path) == (number == me)
                assert doors.clerk.password == doors.server.password
            (folder / f"{write}.clerks").write_text(json.dumps([peer.doors.clerk.port for peer in peers]))
            assert node.public is not None
            (folder / f"{write}.clerk").write_text(str(node.public.clerk.port))
            (folder / f"{write}.met").touch()
            count = int((folder / "count").read_text())  # nobody leaves before all have looked at everybody's server
            until(lambda: len(list(folder.glob("*.met"))) == count, "all have met")

    return Child(work)


def run(folder: Path, places: list[tuple[Place, str]]) -> list[tuple[list[str], int, list[int], int]]:
    """What processes found that run at the same time: names, own place, servers, own server."""
    (folder / "count").write_text(str(len(places)))
    children = [process(folder, place, root, str(number)) for number, (place, root) in enumerate(places)]
    assert [child.wait() for child in children] == [0] * len(places)
    return [tuple(json.loads((folder / str(number)).read_text())) for number in range(len(places))]


# --- meeting ----------------------------------------------------------------------------------------------------------


@needs_server
def test_all_processes_of_three_nodes_find_the_same_servers_in_the_same_order(tmp_path: Path, master: JobStore) -> None:
    places = [(Place(number, 3, "127.0.0.1", master.port), f"node{number}") for number in (2, 0, 1, 0)]
    found = run(tmp_path, places)
    assert [names for names, _, _, _ in found] == [[HOST, f"{HOST}#1", f"{HOST}#2"]] * 4
    assert [me for _, me, _, _ in found] == [2, 0, 1, 0]
    servers = found[0][2]
    assert len(set(servers)) == 3
    ports = {me: int((tmp_path / f"{number}.clerk").read_text()) for number, (_, me, _, _) in enumerate(found)}
    for number, (_, me, seen, own) in enumerate(found):
        assert seen == servers
        assert own == servers[me]
        clerks = json.loads((tmp_path / f"{number}.clerks").read_text())
        del clerks[me]
        assert clerks == [ports[other] for other in range(3) if other != me]


@needs_server
def test_ranks_that_share_a_server_are_one_node(tmp_path: Path, master: JobStore) -> None:
    places = [(Place(rank, 4, "127.0.0.1", master.port), f"node{rank // 2}") for rank in range(4)]
    found = run(tmp_path, places)
    assert [names for names, _, _, _ in found] == [[HOST, f"{HOST}#1"]] * 4
    assert [me for _, me, _, _ in found] == [0, 0, 1, 1]
    assert {tuple(servers) for _, _, servers, _ in found} == {(found[0][3], found[3][3])}


@needs_server
def test_what_an_earlier_attempt_left_behind_is_passed_over(tmp_path: Path, master: JobStore) -> None:
    """An address where nobody is, and one where somebody is who does not know that password."""
    with make_node("other", interface="127.0.0.1") as other:
        assert other.public is not None
        for number, port in enumerate((1, other.public.server.port)):
            left = {"name": "old", "host": "127.0.0.1", "port": port, "clerk": port + 1, "password": "old"}
            master.set(f"stallfree/2/one/{number}", json.dumps({"version": 2, **left}))
        found = run(tmp_path, [(Place(number, 2, "127.0.0.1", master.port), f"node{number}") for number in (0, 1)])
    assert [names for names, _, _, _ in found] == [[HOST, f"{HOST}#1"]] * 2
    assert found[0][2] == found[1][2] == [found[0][3], found[1][3]]


def test_one_node_asks_nobody() -> None:
    node = Stand.at(1)
    assert meet(node, "one", Place()) == ([Peer(HOST, node.unix)], 0)
    assert meet(node, "one") == ([Peer(HOST, node.unix)], 0)
    assert meet(replace(node, public=None), "one") == ([Peer(HOST, node.unix)], 0)


# --- who does not come ------------------------------------------------------------------------------------------------


def test_nodes_that_do_not_come_are_named(master: JobStore) -> None:
    master.set("stallfree/4/one/2", "here")
    master.set("stallfree/4/another/3", "here")
    with pytest.raises(WaitError, match=r"of the 4 nodes of the job, number 0, 3 did not make the store 'one'"):
        meet(Stand.at(1), "one", Place(1, 4, "127.0.0.1", master.port), seconds=1)


def test_a_server_that_does_not_answer_is_named(master: JobStore) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        told = {"version": 2, "name": "far", "host": "127.0.0.1", "port": port, "clerk": 1, "password": "x"}
        master.set("stallfree/2/one/1", json.dumps(told))
        with pytest.raises(
            WaitError, match=f"node 1 of the store 'one', far at 127.0.0.1 ports {port} and 1, does not answer"
        ):
            meet(Stand.at(1), "one", Place(0, 2, "127.0.0.1", master.port), seconds=1)


@needs_server
def test_a_node_whose_server_answers_and_whose_clerk_cannot_be_reached_is_named(master: JobStore) -> None:
    with make_node(interface="127.0.0.1") as node, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # as behind a firewall
        public = node.public
        assert public is not None
        told = {"version": 2, "name": "far", "host": "127.0.0.1", "port": public.server.port}
        told |= {"password": public.server.password}
        place = Place(0, 2, "127.0.0.1", master.port)
        port = silent.getsockname()[1]
        master.set("stallfree/2/one/1", json.dumps({**told, "clerk": port}))
        with pytest.raises(WaitError, match=rf"ports {public.server.port} and {port}, .* let the ports through"):
            meet(Stand.at(1), "one", place, seconds=1)
        master.set("stallfree/2/one/1", json.dumps({**told, "clerk": public.clerk.port}))  # where no clerk lives yet
        peers, me = meet(Stand.at(1), "one", place, seconds=PATIENCE)
        assert ([peer.name for peer in peers], me) == ([HOST, "far"], 0)
        assert peers[1].doors == public


def test_nobody_where_the_nodes_should_meet() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(
            WaitError, match=rf"MASTER_PORT={port}, .* call torch.distributed.init_process_group before"
        ):
            meet(Stand.at(1), "one", Place(0, 2, "127.0.0.1", port), seconds=0.2)


def test_the_meeting_place_may_go_away(master: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds: master.close())
    with pytest.raises(WaitError, match=rf"MASTER_PORT={master.port}, went away while the store 'one' was made"):
        meet(Stand.at(1), "one", Place(0, 2, "127.0.0.1", master.port), seconds=PATIENCE)


@pytest.mark.parametrize("told", ["{", "[]", '{"version": 1}', "7"])
def test_a_node_of_another_release(master: JobStore, told: str) -> None:
    master.set("stallfree/2/one/1", told)
    with pytest.raises(InputError, match="node 1 of the job runs another release"):
        meet(Stand.at(1), "one", Place(0, 2, "127.0.0.1", master.port), seconds=PATIENCE)


def test_several_nodes_need_an_interface() -> None:
    node = replace(Stand.at(1), public=None)
    with pytest.raises(InputError, match=r"listens on this host only: give interface"):
        meet(node, "one", Place(0, 2, "127.0.0.1", 1))


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
def test_the_environment_tells_the_place(
    given: dict[str, str], expected: Place | tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert find_place() == (expected if isinstance(expected, Place) else Place(*expected, "10.0.0.1", 29500))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            "the job has 2 nodes, and MASTER_ADDR and MASTER_PORT do not say",
        ),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT do not say"),
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "2"}, "use cluster_mode=False"),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2", **FAR}, "node 2 of 2: .* contradict each other"),
        ({"RANK": "x", "WORLD_SIZE": "2", **FAR}, "RANK='x' in the environment: give a whole number, or unset it"),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", **FAR, "MASTER_PORT": "?"}, r"MASTER_PORT='\?'"),
    ],
)
def test_an_environment_that_makes_no_sense(given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=said):
        find_place()


def test_a_process_group_tells_it_too(monkeypatch: pytest.MonkeyPatch, master: JobStore) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(InputError, match="the job has 4 nodes"):
        find_place()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "7")
    assert find_place() == Place(3, 4, "10.0.0.1", 7)


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ({"master": "10.0.0.5"}, "10.0.0.5"),
        ({"master": "127.0.1.1", "192.0.2.1": "10.0.0.6"}, "10.0.0.6"),  # its own name, on Debian
        ({"master": "", "192.0.2.1": "10.0.0.6"}, None),
        ({"master": "127.0.1.1", "192.0.2.1": ""}, None),
    ],
)
def test_the_interface_is_the_one_that_leads_to_the_master(
    ways: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_way_to", ways.__getitem__)
    if expected is None:
        with pytest.raises(InputError, match="no way leads to MASTER_ADDR='master' from here"):
            find_interface(Place(0, 2, "master", 1))
    else:
        assert find_interface(Place(0, 2, "master", 1)) == expected


def test_the_way_to_this_host() -> None:
    assert find_interface(Place(0, 2, "127.0.0.1", 1)) == "127.0.0.1"
    assert find_interface(Place(0, 2, "localhost", 1)) in ("127.0.0.1", "::1")
    with pytest.raises(InputError, match=r"no\.such\.host\.invalid"):
        find_interface(Place(0, 2, "no.such.host.invalid", 1))
