"""Hosts for tests: nodes in network namespaces of their own, with a bridge between them.

The namespaces have no names and nothing of them is to be seen from outside: they last as long as a process is in them
or a descriptor refers to them. So the kernel removes them, and all links in them, however a test ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import math
import os
import random
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import psutil
import pytest
from job_store import JobStore
from nodes import Here, Nodes
from server_tools import until

_NEW_NAMES, _NEW_NETWORK = 0x04000000, 0x40000000  # CLONE_NEWUTS, CLONE_NEWNET
_ALL = 0x0003  # ETH_P_ALL
_SOL_PACKET, _NOTES, _ONLY_WHAT_COMES = 263, 15, 23  # PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def enter(namespace: str | int) -> None:
    """Bring this thread into a namespace (its file or descriptor). What it opens and starts from now on is there."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC) if isinstance(namespace, str) else os.dup(namespace)
    try:
        _checked(_libc.setns(fd, _NEW_NETWORK))
    finally:
        os.close(fd)


def _elsewhere(call: Callable[[], Any]) -> Any:
    """What `call` gives in a thread of its own, which may leave its namespace. Its exceptions are raised here."""
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append((call(), None))
        except BaseException as error:
            answer.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((given, error),) = answer
    if error is not None:
        raise error
    return given


def _new_namespace() -> int:
    def make() -> int:
        _checked(_libc.unshare(_NEW_NETWORK))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return int(_elsewhere(make))


class Network:
    """`count` hosts with the addresses 10.77.0.1, 10.77.0.2 and so on, joined by a bridge in a namespace of its own.

    Each host has another interface, on which the others are not to be reached though its default route leads there.
    Skips the test where that is not possible.
    """

    def __init__(self, count: int) -> None:
        if shutil.which("ip") is None:
            pytest.skip("there is no `ip`, which makes network namespaces for tests: apt install iproute2")
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._namespaces: list[int] = []
        try:
            for _ in range(1 + count):
                self._namespaces.append(_new_namespace())
            self._build()
        except OSError as error:
            self.close()
            pytest.skip(f"network namespaces are not to be had here: {error}")
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        bridge, *hosts = self._namespaces
        self.command(bridge, "link add bridge type bridge")
        self.command(bridge, "link set bridge up")
        for number, host in enumerate(hosts):
            self.command(bridge, f"link add port{number} type veth peer name eth0 netns /proc/self/fd/{host}")
            self.command(bridge, f"link set port{number} master bridge up")
            self.command(host, "link set lo up")
            self.command(host, f"address add {self.addresses[number]}/24 dev eth0")
            self.command(host, "link set eth0 up")
            self.command(bridge, f"link add aside{number} type veth peer name eth1 netns /proc/self/fd/{host}")
            self.command(host, f"address add 192.168.77.{number + 1}/24 dev eth1")
            self.command(host, "link set eth1 up")
            self.command(host, "route add default dev eth1")

    def command(self, namespace: int, words: str) -> None:
        """Run `ip` in a namespace. Raises `OSError` if it cannot do what it is told."""

        def run() -> subprocess.CompletedProcess[str]:
            enter(namespace)
            return subprocess.run(
                ["ip", *words.split()], pass_fds=self._namespaces, capture_output=True, text=True, check=False
            )

        done = _elsewhere(run)
        if done.returncode:
            raise OSError(f"`ip {words}`: {done.stderr.strip()}")

    def file(self, number: int) -> str:
        """Of the namespace of a host, for other processes of this user."""
        return f"/proc/{os.getpid()}/fd/{self._namespaces[1 + number]}"

    def cut(self, number: int) -> None:
        """From now on packets from and to this host vanish. Connections are not told."""
        self.command(self._namespaces[0], f"link set port{number} down")

    def mend(self, number: int) -> None:
        """Let them pass again."""
        self.command(self._namespaces[0], f"link set port{number} up")

    @contextlib.contextmanager
    def poor(self, number: int, *, delay: float = 0.0, loss: float = 0.0, rate: float = math.inf) -> Iterator[None]:
        """Meanwhile the link of this host is a bad one: see `Cable`."""
        bridge, port = self._namespaces[0], f"port{number}"

        def lay() -> Cable:
            enter(bridge)
            return Cable(port, "plug", delay, loss, rate)

        self.command(bridge, "link add socket type veth peer name plug")
        self.command(bridge, "link set plug up")
        self.command(bridge, "link set socket master bridge up")
        self.command(bridge, f"link set {port} nomaster")
        cable = _elsewhere(lay)
        try:
            yield
            assert cable.packets
            assert bool(cable.lost) == bool(loss)
        finally:
            cable.close()
            self.command(bridge, "link delete plug")
            self.command(bridge, f"link set {port} master bridge")

    def processes(self) -> list[int]:
        """Those that are in one of the namespaces."""
        inodes = {os.fstat(namespace).st_ino for namespace in self._namespaces}
        found = []
        for pid in psutil.pids():
            try:
                if os.stat(f"/proc/{pid}/ns/net").st_ino in inodes:
                    found.append(pid)
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def close(self) -> None:
        """Let go of the namespaces. They are gone when the processes in them are."""
        while self._namespaces:
            os.close(self._namespaces.pop())


class Cable:
    """Carries the packets between two interfaces of this thread's namespace.

    Each takes `delay` seconds, and in each direction as long as it needs at `rate` bytes per second, in a row; a share
    of `loss` of them vanishes. The kernel's own ways (`tc qdisc ... netem`) are often not to be had. With each
    packet goes what the kernel notes of it: packets between namespaces are larger than any link allows, and their
    checksums were never computed.
    """

    def __init__(self, one: str, other: str, delay: float, loss: float, rate: float) -> None:
        self._delay, self._loss, self._rate = delay, loss, rate
        self._chance = random.Random(1)
        self.packets = self.lost = 0
        self._ends = [self._open(one), self._open(other)]
        self._told, self._tell = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    @staticmethod
    def _open(interface: str) -> socket.socket:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        end.setsockopt(_SOL_PACKET, _NOTES, 1)
        end.setsockopt(_SOL_PACKET, _ONLY_WHAT_COMES, 1)
        end.bind((interface, _ALL))
        return end

    def _carry(self) -> None:
        poll = select.poll()
        for number in (self._told, *(end.fileno() for end in self._ends)):
            poll.register(number, select.POLLIN)
        under_way: list[tuple[float, int, bytes, socket.socket]] = []
        one, other = self._ends
        ways = {one.fileno(): (one, other), other.fileno(): (other, one)}
        free = {one.fileno(): 0.0, other.fileno(): 0.0}  # when the last packet of this direction is through
        while True:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, packet, to = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # the interface is down
                    to.send(packet)
            pause = 1000 * (under_way[0][0] - now) if under_way else None
            for ready, _ in poll.poll(pause):
                if ready == self._told:
                    return
                start, to = ways[ready]
                with contextlib.suppress(OSError):
                    packet = start.recv(1 << 17)
                    self.packets += 1
                    if self._chance.random() < self._loss:
                        self.lost += 1
                        continue
                    free[ready] = max(free[ready], time.monotonic()) + len(packet) / self._rate
                    heapq.heappush(under_way, (free[ready] + self._delay, self.packets, packet, to))

    def close(self) -> None:
        """Carry no more."""
        os.close(self._tell)
        self._thread.join()
        os.close(self._told)
        for end in self._ends:
            end.close()


class Hosts(Nodes):
    """`count` nodes, each on a host of its own. The first one keeps what the job meets at."""

    def __init__(self, count: int) -> None:
        self.network = Network(count)
        try:
            super().__init__(count)
        except BaseException:
            self.network.close()
            raise
        try:
            for number in range(count):
                self.run_on(
                    number, _move, os.getpid(), self.network.file(number), f"host{number}", self.network.addresses[0]
                )
            self.job_store.close()
            self.job_store = JobStore(self.network.addresses[0], self.network.file(0))
            self.run(_meet_at, self.job_store.port)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, at)
            until(lambda: not self.network.processes(), "no process is left on the hosts")
        finally:
            self.network.close()


def _move(here: Here, tests: int, namespace: str, name: str, master: str) -> None:
    """Have this node live on a host, for as long as the process of the tests is there: the bridge ends with it."""
    threading.Thread(target=_end_with, args=(os.pidfd_open(tests),), daemon=True).start()
    enter(namespace)
    _checked(_libc.unshare(_NEW_NAMES))
    socket.sethostname(name)
    os.environ["MASTER_ADDR"] = master


def _end_with(process: int) -> None:
    """End this process when another one has ended, of which this is a descriptor."""
    select.select([process], [], [])
    os._exit(1)


def _meet_at(here: Here, port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)


def listeners(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which a process listens. To be asked on its own host."""
    found = psutil.Process(pid).net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
