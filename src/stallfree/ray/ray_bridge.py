"""The bridge: the process that is connected to a Ray cluster for a loader.

It submits tasks to the actors of a pool, or of a group that several hosts share, and copies their batches into slots.
It ends with the training process, and its actors end with it, since Ray ends the actors of a driver that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import socket
import time
from importlib import import_module
from typing import Any

from stallfree.errors import InputError, WorkerError, text_of
from stallfree.ipc.process import Parent
from stallfree.ipc.remote import pack_error
from stallfree.loader.messages import FORGET, PRIVATE, READY, RESIZE, UNDONE, Result, Task, unpack_result, unpack_task
from stallfree.loader.processes import WorkerSetup
from stallfree.loader.ring import Slots
from stallfree.ray.ray_actor import pack_setup
from stallfree.ray.ray_group import GroupClient
from stallfree.ray.ray_pool import ActorPool, Built, Events
from stallfree.ray.ray_workers import HEAD, PROBLEM, REASON, RESULT, STATE, GroupTerms, RayWorkers

_CONNECT_SECONDS = 3.0


def bridge_main(
    parent: Parent,
    slots: Slots,
    setup: WorkerSetup | bytes,
    first: int,
    spec: RayWorkers,
    address: str | None,
    group: GroupTerms | None,
) -> None:
    """Run the bridge until its end.

    Args:
        parent: the training process.
        slots: of the ring.
        setup: of the workers, or the result of `pack_setup`.
        first: number of the first worker.
        spec: the workers.
        address: of the cluster.
        group: the group that shares the workers, or None.
    """
    events: Events = queue.SimpleQueue()
    bridge = Bridge(parent, slots, events)
    parent.listen(lambda message: events.put(None if message is None else lambda: bridge.receive(message)))
    with contextlib.suppress(OSError):
        parent.report()
        ray = None
        try:
            packed = setup if isinstance(setup, bytes) else pack_setup(setup)
            ray = connect(address, spec)
            bridge.note(lacking(ray, spec))
            pool = ActorPool if group is None else GroupClient
            bridge.pool = pool(ray, spec, packed, first, bridge, events, *([] if group is None else [group]))
        except InputError as error:
            bridge.failed(error)
        except Exception as error:
            bridge.failed(f"no Ray workers could be started: {type(error).__name__}: {text_of(error)}")
        else:
            bridge.pool.run()
        if ray is not None:
            ray.shutdown()
    os._exit(0)  # without waiting for threads of Ray


def connect(address: str | None, spec: RayWorkers) -> Any:
    """Connect to the cluster; return the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_module("ray")
    try:
        if address is not None and (found := re.fullmatch(r"(?:ray://)?([\w.-]+):(\d+)", address)):
            socket.create_connection((found[1], int(found[2])), _CONNECT_SECONDS).close()  # Ray itself retries for long
        ray.init(
            address=address,
            namespace="stallfree",
            runtime_env=None if spec.runtime_env is None else dict(spec.runtime_env),
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"the cluster at address={address!r} cannot be reached ({text_of(error)}). Give the address that `ray "
            'start --head` printed, such as "10.0.0.1:6379", or None for a cluster on this machine'
        ) from error
    return ray


def lacking(ray: Any, spec: RayWorkers) -> str:
    """Return why no node of the cluster can ever hold a worker, or ""."""
    required = {"CPU": 1.0, **(spec.resources or {})}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in required.items()) for node in nodes):
        return ""
    most = {name: max(node.get(name, 0) for node in nodes) for node in nodes for name in node if ":" not in name}
    return (
        f"no node of the cluster has resources={required}, which a worker requires. There are {len(nodes)} nodes, of "
        f"which one has at most {most}. Give smaller resources=, or add a node that has them"
    )


class Bridge:
    """Passes tasks of the training process on, and copies batches into slots. See `ray_pool.Owner`."""

    pool: ActorPool | GroupClient

    def __init__(self, parent: Parent, slots: Slots, events: Events) -> None:
        self._parent, self._slots, self._events = parent, slots, events
        self._wanted = 0

    def receive(self, message: bytearray) -> None:
        """Handle a message of the training process."""
        kind, task = unpack_task(message)
        if kind == FORGET:
            self._wanted = max(self._wanted, task.token)
            self.pool.forget(self._wanted)
        elif kind == RESIZE:
            self.pool.resize(task.token)
        elif task.token < self._wanted:
            self.undone(task)
        else:
            self.pool.submit(task)

    def _send(self, kind: int, worker: int, capacity: int, *pieces: bytes | memoryview) -> None:
        self._parent.send(HEAD.pack(kind, worker, capacity), *pieces)

    def undone(self, task: Task) -> None:
        """See `Owner`."""
        self._send(RESULT, 0, 0, *Result(UNDONE, task.token, task.number, task.slot).pack())

    def changed(self, capacity: int, lost: int) -> None:
        """See `Owner`."""
        self._send(STATE, lost, capacity)

    def failed(self, reason: str | InputError) -> None:
        """See `Owner`."""
        self._send(PROBLEM, 0, 0, pack_error(WorkerError(reason) if isinstance(reason, str) else reason))

    def note(self, reason: str) -> None:
        """Send why no worker may get ready, or ""."""
        self._send(REASON, 0, 0, reason.encode(errors="replace"))

    def built(self, task: Task, built: Built) -> None:
        """See `Owner`. The batch is copied when it has arrived in the object store of this node."""
        arrived = time.monotonic()
        if built.memory is None:
            self._deliver(task, built, None)
            return

        def copy(future: Any) -> None:
            if future.exception() is not None:  # its node was lost meanwhile
                self.pool.submit(task, lost=built)
                return
            if built.trip is not None:
                self.pool.note_trip(built.trip + time.monotonic() - arrived, built.seconds)
            self._deliver(task, built, future.result())

        built.memory.future().add_done_callback(lambda future: self._events.put(lambda: copy(future)))

    def _deliver(self, task: Task, built: Built, memory: Any) -> None:
        result = unpack_result(built.head)
        result.slot, result.started = task.slot, time.monotonic() - built.seconds
        if memory is not None:
            there = self._slots.reserve(task.slot, result.size)
            if there is None:
                result.status, result.memory = PRIVATE, memory
            else:
                there[: result.size] = memory
                result.status = READY
        self._send(RESULT, built.worker, 0, *result.pack())
