"""Addresses of the servers of all nodes, kept up to date through the job's key-value store.

That store is the `TCPStore` at MASTER_ADDR:MASTER_PORT, which torchrun runs from the start, and `init_process_group`
after its call. It has no password: a process that can reach it can read the passwords of the servers, and can also join
the training itself.

One process of each node, the announcer, publishes the address of the node's server and a sequence number. Every node
has a counter in the store. A process that needs an address confirmed adds 1. The announcer of that node then publishes
the address again with the counter's value, if its server is alive. So a record whose number is at least the result of
the addition was published after the addition. A stale address from an earlier attempt of the job is never confirmed.

Files in the folder of the node's server:

    announcer     byte 1 is locked by the process that announces; when it dies, another one takes over
    requests/     an empty file ID-N for each address that is to be confirmed with a number above N
    nodes.json    the confirmed addresses of the other nodes

Workers read and write these files only; they never use the `TCPStore`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from stallfree.errors import InputError, StallfreeError, WaitError, network_interface, nodes_missing
from stallfree.ipc.locks import FileLock
from stallfree.platform import OPEN
from stallfree.stores.addresses import Address
from stallfree.stores.launch.place import Place, find_place, is_loopback
from stallfree.stores.launch.server import REQUESTS, NodeServer, read_running
from stallfree.stores.launch.supervisor import identify, read_json, write_json

log = logging.getLogger("stallfree")

RENDEZVOUS_SECONDS = 300.0
"""Maximum wait for the other nodes."""

_VERSION = 3
_POLL_SECONDS = 0.2
_QUICK_SECONDS = 0.01  # initial pause of an announcer with requests; grows to _POLL_SECONDS
_LOG_SECONDS = 10.0
_REREAD_SECONDS, _REVIVE_SECONDS, _END_SECONDS = 1.0, 5.0, 2.0
_STARTS = 1 << 20  # sequence numbers per start of the node's own server
_NODES = "nodes.json"


class NodeAddresses:
    """The servers of all nodes with a store `name`, in the same order on all nodes.

    The constructor waits for all nodes, and until each server answers this node. Processes with the same server are one
    node, regardless of their numbers. A job of one node needs no `TCPStore`.

    Args:
        server: of this node. In a job of several nodes, other hosts must be able to reach it.
        name: of the store.
        place: of this node; `find_place()` if None.
        seconds: maximum wait for the other nodes.

    Attributes:
        names: one per server: its host name; further servers of that host have `#1`, `#2` and so on added.
        me: the place of this node's server among them.

    A pickled copy or a forked child only reads the files in the folder, as long as the server's folder exists.

    Raises:
        WaitError: if nodes are missing after `seconds`, or a server does not answer. The message names them.
        InputError: if other nodes cannot reach `server`, or run another release.
    """

    def __init__(
        self, server: NodeServer, name: str, place: Place | None = None, *, seconds: float = RENDEZVOUS_SECONDS
    ) -> None:
        place = find_place() if place is None else place
        own = {"version": _VERSION, "host": socket.gethostname(), "id": server.id}
        self._folder, self._nodes = server.folder, _Nodes(server.folder / _NODES)
        self._confirmed = 0  # of the own server
        self._stop: Any = None
        self._set_members([own], server.id)
        if place.count == 1:
            return
        if is_loopback(server.host) and not is_loopback(place.host):
            raise network_interface(
                f"the job has {place.count} nodes, but the server of the store {name!r} accepts only connections from "
                "this host: give interface=..."
            )
        waiting = _NodeWait(name, place.count, seconds)
        store = _connect(place, seconds)
        self._stop = weakref.finalize(self, _Announcer(server, store).stop)  # also at the interpreter's exit
        keys = [f"stallfree/{place.count}/{name}/{number}" for number in range(place.count)]
        try:
            store.set(keys[place.number], json.dumps(own))
            while not store.check(keys):
                waiting.check(lambda: [number for number, key in enumerate(keys) if not store.check([key])])
                time.sleep(_QUICK_SECONDS)
            members = [_unpack(value, number) for number, value in enumerate(store.multi_get(keys))]
            self._wait_for_addresses(store, keys, members, waiting)
            self._set_members(members, server.id)
            for other in range(len(self.names)):
                if other != self.me:
                    self._wait_for_answer(other, waiting)
        except BaseException as error:
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            raise nodes_missing(
                f"the job's key-value store at MASTER_ADDR={place.host}, MASTER_PORT={place.port} ended while the "
                f"store {name!r} was created: {str(error).splitlines()[0]}"
            ) from error

    def _set_members(self, members: list[dict[str, Any]], own: str) -> None:
        """Set names and place from the records of all numbers."""
        hosts = {member["id"]: member["host"] for member in reversed(members)}
        ids = list(dict.fromkeys(member["id"] for member in members))
        before: dict[str, int] = {}
        names = []
        for id in ids:
            count = before[hosts[id]] = before.get(hosts[id], -1) + 1
            names.append(f"{hosts[id]}#{count}" if count else hosts[id])
        self.names, self._ids, self.me = tuple(names), ids, ids.index(own)

    def of(self, place: int) -> tuple[int, Address] | None:
        """The sequence number and address of a server currently known on this node; None if there is none."""
        if place == self.me:
            running = read_running(self._folder)
            return None if running is None else (max(running[0] * _STARTS, self._confirmed), running[1])
        return self._nodes.read().get(self._ids[place])

    def confirm(self, place: int, after: int) -> None:
        """Request an address with a number above `after`, which `of` returns once its node has confirmed it.

        Does not block. After a lost connection, `after` is the last number that `of` returned.
        """
        if place != self.me:
            _request(self._folder, self._ids[place], after)
        elif read_running(self._folder) is not None:
            self._confirmed = after + 1

    def close(self) -> None:
        """Stop the thread. Known addresses are kept. No effect in a forked child."""
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> NodeAddresses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stop": None}

    def _wait_for_addresses(
        self, store: Any, keys: list[str], members: list[dict[str, Any]], waiting: _NodeWait
    ) -> None:
        """Wait until the address of every member is confirmed, and re-read the missing ones."""
        reread = time.monotonic() + _REREAD_SECONDS
        while True:
            known = {*self._ids, *self._nodes.read()}
            missing = [number for number, member in enumerate(members) if member["id"] not in known]
            if not missing:
                return
            for number in missing:
                _request(self._folder, members[number]["id"], 0)
            waiting.check(missing.copy)
            if time.monotonic() > reread:  # records of an earlier attempt of the job may have been replaced
                for number, value in zip(missing, store.multi_get([keys[number] for number in missing]), strict=True):
                    _withdraw(self._folder, members[number]["id"])
                    members[number] = _unpack(value, number)
                reread = time.monotonic() + _REREAD_SECONDS
            time.sleep(_QUICK_SECONDS)

    def _wait_for_answer(self, place: int, waiting: _NodeWait) -> None:
        lost = 0
        while True:
            found = self.of(place)
            assert found is not None
            sequence, address = found
            if sequence > lost and identify((address.host, address.port), address.password, 1.0):
                return
            lost = sequence
            if time.monotonic() > waiting.deadline:
                raise WaitError(
                    f"the server of node {place} of the store {waiting.name!r}, {self.names[place]} at {address.host} "
                    f"port {address.port}, does not answer this node: allow the port in the firewall, or give "
                    "interface=... on that node",
                    page="server-unreachable",
                )
            self.confirm(place, lost)
            time.sleep(0.05)


class _Nodes:
    """The addresses in `nodes.json`, read again after the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[Any, dict[str, tuple[int, Address]]] = None, {}

    def read(self) -> dict[str, tuple[int, Address]]:
        """Sequence number and address by the id of a node."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return {}
        version = found.st_ino, found.st_mtime_ns, found.st_size
        known, nodes = self._last
        if version != known:
            nodes = {
                id: (record["sequence"], Address(host=record["host"], port=record["port"], password=record["password"]))
                for id, record in (read_json(self._path) or {}).items()
            }
            self._last = version, nodes
        return nodes


def known_addresses(folder: Path) -> list[Address]:
    """The addresses known to the node with this folder: its own first, if its server runs."""
    own = read_running(folder)
    others = [address for _, address in _Nodes(folder / _NODES).read().values()]
    return others if own is None else [own[1], *(other for other in others if other != own[1])]


def _request(folder: Path, id: str, after: int) -> None:
    with contextlib.suppress(OSError):  # the folder is deleted or full: the next request may succeed
        os.close(os.open(folder / REQUESTS / f"{id}-{max(0, after)}", os.O_WRONLY | os.O_CREAT | OPEN, 0o600))


def _withdraw(folder: Path, id: str) -> None:
    with contextlib.suppress(OSError):  # it was fulfilled
        os.unlink(folder / REQUESTS / f"{id}-0")


class _Announcer:
    """Publishes the address of this node's server, and gets requested addresses of other nodes.

    Several threads and processes of a node may have one; a lock decides which is active.
    """

    def __init__(self, server: NodeServer, store: Any) -> None:
        self._server, self._store = server, store
        self._thread = threading.Thread(target=self._run, name="stallfree-announcer", daemon=True)
        self._over = threading.Event()
        self._owner = os.getpid()
        self._lock = FileLock(server.folder / "announcer")
        self._start_number = -1  # of the published server
        self._sequence = 0
        self._nodes: dict[str, Any] = {}
        self._requested: dict[str, int] = {}  # minimum sequence number by request file name
        self._revive_at = 0.0
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and join it unless the `TCPStore` blocks it."""
        if os.getpid() == self._owner:
            self._over.set()
            if threading.current_thread() is not self._thread:  # the garbage collector may run in any thread
                self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        """Announce until `stop`, or until the `TCPStore` closes."""
        try:
            while not self._lock.claim(1):
                if self._over.wait(_POLL_SECONDS):
                    return
            self._nodes = read_json(self._server.folder / _NODES) or {}
            pause = 0.0
            while not self._over.wait(pause):
                new = False
                with contextlib.suppress(OSError, StallfreeError):  # no memory for files, or the folder is deleted
                    self._publish()
                    new = self._get_requested()
                pause = _QUICK_SECONDS if new else min(_POLL_SECONDS, 2 * pause + _QUICK_SECONDS)
        except RuntimeError:
            pass  # the job ends; known addresses are kept
        finally:
            self._lock.close()
            self._store = None

    def _publish(self) -> None:
        """Publish the server's address if it is new, or was requested since the last time."""
        folder = self._server.folder
        before = read_running(folder)
        is_new = before is not None and before[0] != self._start_number
        sequence = self._store.add(_counter(self._server.id), int(is_new))
        running = read_running(folder)  # read after the counter, which confirms it
        if running is None:
            if time.monotonic() > self._revive_at:
                self._revive_at = time.monotonic() + _REVIVE_SECONDS
                self._server.revive()
        elif sequence > self._sequence:
            start, address = running
            record = {"sequence": sequence, "host": address.host, "port": address.port, "password": address.password}
            self._store.set(_record(self._server.id), json.dumps(record))
            self._start_number, self._sequence = start, sequence

    def _get_requested(self) -> bool:
        """Write the addresses that other nodes have confirmed. Returns whether there were new requests."""
        new = False
        folder = self._server.folder / REQUESTS
        names = os.listdir(folder)
        for name in names:
            if name not in self._requested:
                id, _, after = name.rpartition("-")
                if id in self._nodes and self._nodes[id]["sequence"] > int(after):
                    self._requested[name] = 0
                    continue
                self._store.compare_set(_record(id), "", "")  # create it if missing, or multi_get would wait
                self._requested[name] = self._store.add(_counter(id), 1)
                new = True
        self._requested = {name: least for name, least in self._requested.items() if name in names}
        if not names:
            return False
        done = []
        values = self._store.multi_get([_record(name.rpartition("-")[0]) for name in names])
        for name, value in zip(names, values, strict=True):
            record = json.loads(value) if value else {"sequence": -1}
            if record["sequence"] >= self._requested[name]:
                done.append(name)
                self._nodes[name.rpartition("-")[0]] = record
        if done:
            write_json(self._server.folder / _NODES, self._nodes)
        for name in done:
            with contextlib.suppress(FileNotFoundError):  # it was withdrawn
                os.unlink(folder / name)
        return new


def _counter(id: str) -> str:
    return f"stallfree/node/{id}/requests"


def _record(id: str) -> str:
    return f"stallfree/node/{id}/address"


def _connect(place: Place, seconds: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(
            place.host, place.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        raise nodes_missing(
            f"the job's key-value store at MASTER_ADDR={place.host}, MASTER_PORT={place.port} did not answer within "
            f"{seconds:g} s: start the job with torchrun, or call torch.distributed.init_process_group before creating "
            "the store"
        ) from error


class _NodeWait:
    """A wait for the nodes of a job that open the store `name`. Logs the missing nodes once.

    Attributes:
        deadline: end of the wait, on the clock of `time.monotonic`.
    """

    def __init__(self, name: str, count: int, seconds: float) -> None:
        self.name, self._count = name, count
        self._log_at, self.deadline = (time.monotonic() + limit for limit in (_LOG_SECONDS, seconds))

    def check(self, missing: Callable[[], list[int]]) -> None:
        """Raise `WaitError` with the `missing` numbers after the deadline."""
        now = time.monotonic()
        if now < min(self._log_at, self.deadline):
            return
        numbers = missing()
        shown = ", ".join(map(str, numbers[:20])) + (f", {len(numbers) - 20} more" if len(numbers) > 20 else "")
        if now > self.deadline:
            raise nodes_missing(
                f"of the {self._count} nodes of the job, number {shown} did not create the store {self.name!r} in "
                "time: all nodes must create it at about the same time"
            )
        self._log_at = self.deadline
        log.warning(
            "the store %r waits for number %s of the %d nodes of the job, up to %.0f s more: all nodes must create it "
            "at about the same time, and close it after all have finished",
            self.name,
            shown,
            self._count,
            self.deadline - now,
        )


def _unpack(value: bytes, number: int) -> dict[str, Any]:
    try:
        member = json.loads(value)
        if member["version"] == _VERSION:
            return dict(member)
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(
        f"node {number} of the job runs another release of stallfree: install the same on all nodes",
        page="release-mismatch",
    )
