"""A group of loaders on several hosts that share one preparation on a Ray cluster.

The group is a named actor, which owns the workers. The coordinators of all hosts request the same batches from it, by
number: the first request starts the preparation, and every host gets a reference of the same batch, which it fetches
once. The actor keeps a batch until all hosts have requested it. It ends when no host has been in contact for 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from stallfree.errors import InputError, group_mismatch
from stallfree.loader.messages import Task, unpack_task
from stallfree.ray.ray_pool import ActorPool, Built, Events, Owner
from stallfree.ray.ray_workers import GroupTerms, RayWorkers

_CONTACT_SECONDS = 1.0
"""Seconds between two contacts of a host."""

_GONE_SECONDS = 8.0
"""Seconds without a contact after which a host does not count."""

_LAG_SECONDS = 20.0
"""Longest wait for a host that has not requested batches which fill the group's limit."""

_END_SECONDS = 30.0
_LEAST = 64
"""Least number of batches that are kept for hosts that lag."""

Key = tuple[int, int]


@dataclass
class _Host:
    seen: float
    behind: bool = False  # not waited for, until it requests a batch that is kept


@dataclass
class _Entry:
    """A batch: its result once it is built, and the hosts that were given it."""

    ids: bytes
    built: asyncio.Future[Built | None]
    given: set[str] = field(default_factory=set)

    def is_result(self, other: Built) -> bool:
        """Whether `other` is the result."""
        built = self.built.result() if self.built.done() else None
        return built is not None and (built.worker, built.seconds) == (other.worker, other.seconds)


class RayGroup:
    """The actor of a group. See `Owner`, whose methods run in the thread of its pool.

    Args:
        packed: the result of `pack_setup`.
        spec: the workers.
        terms: of the group, as the first host gives them.
    """

    def __init__(self, packed: bytes, spec: RayWorkers, terms: GroupTerms) -> None:
        self._terms = terms
        self._hosts: dict[str, _Host] = {}
        self._entries: dict[Key, _Entry] = {}
        self._changed = asyncio.Condition()
        self._capacity, self._lost, self._problem = 0, 0, ""
        self._events: Events = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start = packed, spec
        self._contact = time.monotonic()

    # -- requests of hosts --------------------------------------------------------------------------------------------

    async def contact(self, host: str, same: dict[str, str]) -> tuple[int, int, str]:
        """Keep a host in the group; return capacity, lost workers and the reason why there are no workers, or "".

        Raises `InputError` if the terms of the host differ.
        """
        for name, value in self._terms.same.items():
            if same.get(name) != value:
                raise group_mismatch(
                    f"this host does not fit into the group {self._terms.name!r}: it has {name}={value}, this host "
                    f"gives {same.get(name)}. Give the same, or the name of another group"
                )
        now = self._contact = time.monotonic()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._run_pool, name="stallfree-pool", daemon=True).start()
            self._loop.call_later(_END_SECONDS, self._end_if_left)
        self._hosts.setdefault(host, _Host(now)).seen = now
        return self._capacity, self._lost, self._problem

    async def leave(self, host: str) -> None:
        """Remove a host. Ends with the last one: a later group may have other data."""
        if self._hosts.pop(host, None) is not None and not self._hosts:
            os._exit(0)
        await self._drop()

    async def request(self, host: str, packed: bytes, lost: Built | None) -> tuple[Built | None, list[Any]]:
        """Return a batch that all hosts share, and its memory as a list of one reference; None if it cannot be built.

        Args:
            host: that requests it.
            packed: its task.
            lost: an earlier result, whose memory is lost.
        """
        _, task = unpack_task(packed)
        key, ids = (task.token, task.number), task.ids.tobytes()
        entry = self._entries.get(key)
        if entry is not None and lost is not None and entry.is_result(lost):
            del self._entries[key]  # `_begin` may wait, and must not find it then
            entry = None
        if entry is None or entry.ids != ids:
            entry = await self._begin(key, task, ids, host)
        elif host in self._hosts:
            self._hosts[host].behind = False
        built = await asyncio.shield(entry.built)
        if built is None:
            if self._entries.get(key) is entry:
                del self._entries[key]
            return None, []
        entry.given.add(host)
        await self._drop()
        return built._replace(memory=None), [built.memory]

    async def _begin(self, key: Key, task: Task, ids: bytes, host: str) -> _Entry:
        """Begin a batch. Waits if another host lags by too many batches."""
        deadline = time.monotonic() + _LAG_SECONDS
        while (behind := self._lagging(host)) and (left := deadline - time.monotonic()) > 0:
            async with self._changed:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            if (there := self._entries.get(key)) is not None and there.ids == ids:
                return there  # another host has requested it meanwhile
        for other in behind:
            self._hosts[other].behind = True
        loop = asyncio.get_running_loop()
        entry = self._entries[key] = _Entry(ids, loop.create_future())
        self._events.put(lambda: self._pool.submit(task))
        return entry

    def _alive(self) -> list[str]:
        now = time.monotonic()
        return [name for name, host in self._hosts.items() if not host.behind and now - host.seen < _GONE_SECONDS]

    def _lagging(self, host: str) -> list[str]:
        """Hosts that did not request batches which fill the limit."""
        limit = max(_LEAST, 4 * self._capacity)
        if len(self._entries) < limit:
            return []
        others = [name for name in self._alive() if name != host]
        return [name for name in others if any(name not in entry.given for entry in self._entries.values())]

    async def _drop(self) -> None:
        """Drop batches that all hosts were given, but for the last ones: another host may be about to join."""
        alive = set(self._alive())
        through = [key for key, entry in self._entries.items() if entry.built.done() and alive <= entry.given]
        for key in through[: max(0, len(self._entries) - _LEAST)]:
            del self._entries[key]
        async with self._changed:
            self._changed.notify_all()

    def _end_if_left(self) -> None:
        if time.monotonic() > self._contact + _END_SECONDS:
            os._exit(0)
        assert self._loop is not None
        self._loop.call_later(_END_SECONDS / 3, self._end_if_left)

    # -- the pool -----------------------------------------------------------------------------------------------------

    def _run_pool(self) -> None:
        packed, spec = self._start
        self._pool = ActorPool(import_module("ray"), spec, packed, 0, self, self._events)
        self._pool.run()

    def _in_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)

    def built(self, task: Task, built: Built) -> None:
        """See `Owner`."""
        self._in_loop(lambda: self._set(task, built))

    def undone(self, task: Task) -> None:
        """See `Owner`."""
        self._in_loop(lambda: self._set(task, None))

    def _set(self, task: Task, built: Built | None) -> None:
        entry = self._entries.get((task.token, task.number))
        if entry is not None and not entry.built.done():
            entry.built.set_result(built)

    def changed(self, capacity: int, lost: int) -> None:
        """See `Owner`."""
        self._capacity, self._lost = capacity, self._lost + lost
        self._problem = "" if capacity else self._problem

    def failed(self, reason: str | InputError) -> None:
        """See `Owner`."""
        self._problem = str(reason)


class GroupClient:
    """A host's part in a group. The same interface as `ActorPool`.

    Args:
        ray: the module.
        spec: the workers; the first host decides.
        packed: the result of `pack_setup`.
        first: unused: the numbers of the workers are those of the group.
        owner: gets the results.
        events: calls to make in `run`; None ends it.
        terms: of the group.
    """

    def __init__(
        self, ray: Any, spec: RayWorkers, packed: bytes, first: int, owner: Owner, events: Events, terms: GroupTerms
    ) -> None:
        self._ray, self._owner, self._events, self._terms = ray, owner, events, terms
        self._host = secrets.token_hex(8)
        self._options = {
            "name": f"stallfree-group-{terms.name}",
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_concurrency": 10000,
        }
        self._arguments = packed, spec, terms
        self._sent: dict[Key, tuple[Task, Any]] = {}
        self._stated = (-1, 0)
        self._contacting: float | None = None
        self._find()

    def _find(self) -> None:
        """Find the actor of the group, or create it."""
        self._group = self._ray.remote(RayGroup).options(**self._options).remote(*self._arguments)

    def run(self) -> None:
        """Run until the end."""
        while True:
            try:
                event = self._events.get(timeout=_CONTACT_SECONDS)
            except queue.Empty:
                pass
            else:
                if event is None:
                    break
                event()
            self._contact()
        self._ray.wait([self._group.leave.remote(self._host)], timeout=1.0)

    def _contact(self) -> None:
        now = time.monotonic()
        if self._contacting is not None and now < self._contacting + _CONTACT_SECONDS:
            return
        self._contacting = now
        group = self._group
        self._watch(group.contact.remote(self._host, self._terms.same), lambda future: self._answer(group, future))

    def _watch(self, ref: Any, then: Callable[[Any], object]) -> None:
        ref.future().add_done_callback(lambda future: self._events.put(lambda: then(future)))

    def _answer(self, group: Any, future: Any) -> None:
        if group is not self._group:
            return
        error = future.exception()
        if isinstance(error, InputError) or isinstance(getattr(error, "cause", None), InputError):
            self._owner.failed(error if isinstance(error, InputError) else error.cause)
        elif error is not None:
            self._replace()
        else:
            capacity, lost, problem = future.result()
            if problem:
                self._owner.failed(problem)
            elif (capacity, lost) != self._stated:
                self._owner.changed(capacity, lost - self._stated[1])
                self._stated = capacity, lost

    def _replace(self) -> None:
        """The actor of the group was lost: request all from the next one."""
        self._stated = (-1, 0)
        self._owner.changed(0, 0)
        tasks = [task for task, _ in self._sent.values()]
        self._sent.clear()
        for task in tasks:
            self._owner.undone(task)
        self._find()

    def submit(self, task: Task, lost: Built | None = None) -> None:
        """Receive a task; `lost`: its earlier result, whose memory is lost."""
        key, group = (task.token, task.number), self._group
        self._sent[key] = task, group
        ref = group.request.remote(self._host, task.pack(), None if lost is None else lost._replace(memory=None))
        self._watch(ref, lambda future: self._receive(key, group, future))

    def _receive(self, key: Key, group: Any, future: Any) -> None:
        task, asked = self._sent.get(key, (None, None))
        if task is None or asked is not group:
            return
        if future.exception() is not None:
            if group is self._group:
                self._replace()
            return
        del self._sent[key]
        built, memory = future.result()
        if built is None:
            self._owner.undone(task)
        else:
            self._owner.built(task, built._replace(memory=memory[0]))

    def forget(self, token: int) -> None:
        """Return the tasks of iterations before `token`."""
        for key in [key for key in self._sent if key[0] < token]:
            self._owner.undone(self._sent.pop(key)[0])

    def resize(self, workers: int) -> None:
        """Do nothing: the first host decides the number of workers."""

    def note_trip(self, trip: float, seconds: float) -> None:
        """Do nothing: the group measures its own round trips."""
