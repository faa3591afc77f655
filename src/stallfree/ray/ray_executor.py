"""The executor of Ray workers.

The training process never runs Ray. A child process, the *bridge* (`ray_bridge`), connects to the cluster, submits
tasks to actors (`ray_actor`) and copies their batches from Ray's object store into slots of the ring. If the connection
to the cluster is lost, only the bridge ends: its tasks continue with local workers, and a new bridge tries to connect.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

from stallfree.errors import WorkerError, text_of
from stallfree.frames import users_level
from stallfree.ipc.process import Child, end_all
from stallfree.ipc.remote import unpack_error
from stallfree.loader.batch import failure
from stallfree.loader.messages import UNDONE, Result, Task, forget_message, resize_message, unpack_result
from stallfree.loader.processes import WorkerProcesses, WorkerSetup
from stallfree.notes import raisable
from stallfree.platform import cpu_count
from stallfree.ray.ray_actor import pack_setup
from stallfree.ray.ray_bridge import bridge_main
from stallfree.ray.ray_workers import AUTO_MOST, HEAD, PROBLEM, REASON, STATE, GroupTerms, RayWorkers

log = logging.getLogger("stallfree")

WINDOW_SECONDS, WINDOW_BATCHES = 2.0, 8
"""Least length of a window in which `Demand` measures the training loop."""

PATIENT_WINDOWS = 3
"""Windows that need fewer workers before some are ended."""

PATIENCE = 10.0
"""Seconds without a Ray worker until local workers continue, and between two attempts to connect."""

GROUP_PATIENCE = 60.0
"""The same at the start of a group over hosts, since local workers would prepare batches of other hosts again."""

_STOP_SECONDS = 10.0


class RayExecutor:
    """Executor of Ray workers and local worker processes. See `Executor`.

    A task goes to local workers while they have fewer than `local_ahead` tasks, then to Ray workers up to their
    capacity. Other tasks wait here.

    Args:
        spec: the Ray workers.
        setup: of all workers.
        context: starts the bridge and the local workers.
        local: number of local workers beside the Ray workers, or 0.
        local_ahead: batches in flight for them.
        group: the group over hosts, which only Ray workers prepare for while there are any; or None.
        counts: of the loader.
    """

    needs_slot = True

    def __init__(
        self,
        spec: RayWorkers,
        setup: WorkerSetup,
        context: BaseContext,
        local: int,
        local_ahead: int,
        group: GroupTerms | None,
        counts: Mapping[str, Any],
    ) -> None:
        self._spec, self._context, self._group = spec, context, group
        self._demand = Demand(counts, local) if spec.num_workers == "auto" else None
        self._patience = PATIENCE if group is None else GROUP_PATIENCE
        self._setup = replace(setup, worker=local)  # the numbers of Ray workers follow those of local ones
        self._local = WorkerProcesses(setup, context, local or cpu_count())  # they start with their first tasks
        self._local_ahead = local_ahead if local and group is None else 0
        self._alone_ahead = max(self._local_ahead, 2 * self._local.count)
        self._replaced = 0
        self._waiting: deque[Task] = deque()
        self._remote: dict[tuple[int, int], Task] = {}
        self._here: dict[tuple[int, int], Task] = {}
        self._wanted = 0
        self._bridge: Child | None = None
        self._capacity: int | None = None  # None: not yet known
        self._connected = False  # whether Ray workers have ever been ready
        self._alone = False  # whether local workers continue without Ray workers
        self._since = 0.0  # without Ray workers, in seconds of `time.monotonic`
        self._retry = 0.0
        self._reason = ""  # why no Ray worker may get ready

    # -- the state ----------------------------------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """Batches that should be in flight."""
        if self._alone:
            return self._alone_ahead
        return self._local_ahead + (2 * self._spec.first if self._capacity is None else self._capacity)

    @property
    def replaced(self) -> int:
        """Number of workers and bridges that ended unexpectedly."""
        return self._replaced + self._local.replaced

    @replaced.setter
    def replaced(self, value: int) -> None:
        self._replaced = self._local.replaced = value

    @property
    def stuck(self) -> bool:
        """See `WorkerProcesses`."""
        return self._local.stuck

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """See `Executor`."""
        bridge = self._bridge
        return ([] if bridge is None else [(bridge.fileno(), bridge.events)]) + self._local.descriptors

    def describe(self, task: Task) -> str:
        """See `Executor`."""
        key = task.token, task.number
        if key in self._remote:
            return f"Ray workers, which have {len(self._remote)} batches to do"
        if task in self._waiting:
            return "no worker yet: it waits for a Ray worker"
        return self._local.describe(task)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        """See `Executor`."""
        if self._bridge is None and not self._alone:
            self._connect()
        self._waiting.append(task)
        self._assign()

    def _assign(self) -> None:
        """Pass waiting tasks on."""
        waiting = self._waiting
        while waiting:
            if len(self._here) < (self._alone_ahead if self._alone else self._local_ahead):
                task = waiting.popleft()
                self._here[task.token, task.number] = task
                self._local.submit(task)
            elif self._bridge is not None and not self._alone and len(self._remote) < (self._capacity or 0):
                task = waiting.popleft()
                self._remote[task.token, task.number] = task
                self._bridge.send(task.pack())
            else:
                return

    def forget(self, token: int) -> None:
        """See `Executor`."""
        self._wanted = token
        if self._demand is not None:
            self._demand.restart()
        self._local.forget(token)
        if self._bridge is not None:
            self._bridge.send(forget_message(token))

    def poll(self, number: int | None) -> list[Result]:
        """See `Executor`."""
        results = self._drop_unwanted()
        self._receive(results)
        for result in self._local.poll(number):
            self._here.pop((result.token, result.number), None)
            results.append(result)
        if self._alone and self._bridge is None and time.monotonic() >= self._retry:
            self._connect()
        self._assign()
        if self._demand is not None and self._bridge is not None and (workers := self._demand.workers(results)):
            self._bridge.send(resize_message(workers))
        return results

    def _drop_unwanted(self) -> list[Result]:
        """Return the slots of tasks that wait here and belong to an earlier iteration."""
        if all(task.token >= self._wanted for task in self._waiting):
            return []
        dropped = [task for task in self._waiting if task.token < self._wanted]
        self._waiting = deque(task for task in self._waiting if task.token >= self._wanted)
        return [Result(UNDONE, task.token, task.number, task.slot) for task in dropped]

    def _receive(self, results: list[Result]) -> None:
        bridge = self._bridge
        if bridge is None:
            return
        bridge.flush()
        try:
            while bridge is self._bridge and (message := bridge.receive()) is not None:
                self._handle(message, results)
        except EOFError:
            self._lose("the connection to Ray ended")

    def _handle(self, message: bytearray, results: list[Result]) -> None:
        kind, worker, capacity = HEAD.unpack_from(message)
        body = memoryview(message)[HEAD.size :]
        if kind == STATE:
            self._replaced += worker
            self._set_capacity(capacity)
        elif kind == PROBLEM:
            self._fail(raisable(unpack_error(body)), results)
        elif kind == REASON:
            self._reason = bytes(body).decode(errors="replace")
        else:
            result = unpack_result(body)
            result.worker = self._setup.worker + worker
            self._remote.pop((result.token, result.number), None)
            results.append(result)

    def _set_capacity(self, capacity: int) -> None:
        self._capacity = capacity
        if capacity:
            self._connected, self._alone, self._since = True, False, 0.0
        elif not self._since:
            self._since = time.monotonic()
            if self._connected:
                self._continue_alone("all Ray workers are lost")

    # -- loss ---------------------------------------------------------------------------------------------------------

    def prepare_wait(self) -> bool:
        """See `Executor`: results are always signalled."""
        return False

    def check(self) -> None:
        """See `Executor`."""
        self._local.check()
        bridge = self._bridge
        if bridge is not None and (bridge.overdue or not bridge.alive):
            self._lose("the process that is connected to Ray ended")
        elif self._since and not self._alone and time.monotonic() > self._since + self._patience:
            self._alone = True
            reason = self._reason or f"the cluster of address={self._spec.address!r} has given none yet"
            log.warning(
                "no Ray worker is ready after %g s: %s. Meanwhile, %d local workers start",
                self._patience,
                reason,
                self._local.count,
            )
        self._assign()

    def _connect(self) -> None:
        self._capacity, self._since, self._reason = None, time.monotonic(), ""
        if self._demand is not None:
            self._demand.restart(asked=self._spec.first)
        context, address = self._context, self._spec.address
        setup: WorkerSetup | bytes = self._setup
        ray = sys.modules.get("ray")
        if ray is not None or context.get_start_method() != "fork":  # a fork would inherit the threads of Ray
            context = get_context("forkserver") if context.get_start_method() == "fork" else context
            setup = pack_setup(self._setup)
            if address is None and ray is not None and ray.is_initialized():
                address = ray.get_runtime_context().gcs_address
        arguments = self._setup.builder.slots, setup, self._setup.worker, self._spec, address, self._group
        self._bridge = Child(bridge_main, *arguments, context=context, name="stallfree-ray", leads=True)
        if self._wanted:
            self._bridge.send(forget_message(self._wanted))

    def _lose(self, reason: str) -> None:
        """The bridge has ended: its tasks are done by local workers."""
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            self._replaced += 1
            bridge.end(time.monotonic() + 1.0)
        self._waiting.extendleft(sorted(self._remote.values(), key=lambda task: (-task.token, -task.number)))
        self._remote.clear()
        self._capacity, self._retry = None, time.monotonic() + PATIENCE
        self._continue_alone(reason)

    def _continue_alone(self, reason: str) -> None:
        if not self._alone:
            self._alone = True
            warnings.warn(
                f"{reason}: {self._local.count} local workers continue until Ray workers are ready",
                RuntimeWarning,
                stacklevel=users_level(),
            )
        self._assign()

    def _fail(self, error: BaseException, results: list[Result]) -> None:
        """The bridge cannot have workers. At the start, its error is the result of all tasks."""
        if self._connected or self._alone:
            self._alone = False  # to warn with this reason
            self._lose(text_of(error))
            return
        tasks = [*self._remote.values(), *self._waiting]
        self._remote.clear()
        self._waiting.clear()
        for task in tasks:
            own = WorkerError(text_of(error), ids=task.ids.tolist()) if isinstance(error, WorkerError) else error
            results.append(failure(task, own, here=True))
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.end(time.monotonic() + 1.0)

    def close(self) -> None:
        """See `Executor`."""
        bridge, self._bridge = self._bridge, None
        self._waiting.clear()
        self._remote.clear()
        self._here.clear()
        try:
            if bridge is not None:
                bridge.send(forget_message(1 << 62))
                end_all([bridge], _STOP_SECONDS)
        finally:
            self._local.close()


class Demand:
    """The number of workers that end the wait for prep.

    It is the rate at which the training loop uses batches while it does not wait, times the time of a batch.

    Args:
        counts: of the loader.
        local: number of local workers, which do their part.
    """

    def __init__(self, counts: Mapping[str, Any], local: int) -> None:
        self._counts, self._local = counts, local
        self._asked = 0
        self._seconds = 0.0  # of a batch in a worker, as a moving average
        self._fewer: list[int] = []  # what the last windows needed, if that is fewer than there are
        self.restart()

    def restart(self, asked: int | None = None) -> None:
        """Begin a window; `asked`: the number of workers that there are now."""
        self._asked = self._asked if asked is None else asked
        self._begun, self._batches = time.monotonic(), self._counts["batches"]
        self._waited = self._counts["wait_seconds"]

    def workers(self, results: list[Result]) -> int:
        """The number of workers to have from now on; 0 if it stays."""
        for result in results:
            if spent := result.prep_seconds + result.fetch_seconds:
                self._seconds = spent if not self._seconds else 0.8 * self._seconds + 0.2 * spent
        passed = time.monotonic() - self._begun
        batches = self._counts["batches"] - self._batches
        if passed < WINDOW_SECONDS or batches < WINDOW_BATCHES or not self._seconds:
            return 0
        needed = self.needed(batches, passed, self._counts["wait_seconds"] - self._waited, self._seconds)
        self.restart()
        needed = max(1, min(AUTO_MOST, needed - self._local))
        self._fewer = [*self._fewer, needed] if needed < 0.8 * self._asked else []
        if needed > self._asked or len(self._fewer) == PATIENT_WINDOWS:
            self._asked = max(self._fewer, default=needed)
            self._fewer = []
            return self._asked
        return 0

    @staticmethod
    def needed(batches: int, passed: float, waited: float, seconds: float) -> int:
        """Workers that prepare as fast as the training loop uses batches, with a margin of 10%.

        Args:
            batches: number of batches that the loop used.
            passed: seconds in which it did.
            waited: seconds of these that it waited for batches.
            seconds: of a batch in a worker.
        """
        computing = max(passed - waited, 1e-3 * passed)
        return math.ceil(min(1.1 * seconds * batches / computing, 1e6))
