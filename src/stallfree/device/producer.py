"""The loading process of a `ProcessPrefetcher`: runs the loader, copies its batches to slots and announces them."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.device.batch_codec import pack_layout, split
from stallfree.device.consumer_server import ConsumerServer
from stallfree.device.protocol import pack_length
from stallfree.device.slots import memory_of, poison
from stallfree.device.staging import Place, Stager, pin
from stallfree.errors import StorageError
from stallfree.ipc.folders import attach, remove_unused
from stallfree.ipc.fork_guard import Owner, keep_from_children
from stallfree.ipc.process import Parent
from stallfree.pipeline.randomness import draw_seed

_REMOVE_SECONDS = 0.2
"""Seconds for the kernel to release what a killed process held."""

_SWITCH_SECONDS = 0.001
"""Longest delay of the consumers' messages by a loader in pure Python; Python's default is 5 ms."""


class LazyFactory:
    """A function that is unpickled when it is called, so that errors of both are handled alike.

    It seeds torch's generator in the new process with a number drawn in this one.
    """

    def __init__(self, make_loader: Callable[[], Iterable[Any]]) -> None:
        self._make_loader = make_loader
        self._seed = draw_seed()
        self._pickled = b""

    def __call__(self) -> Iterable[Any]:
        """Call the function and return its result."""
        torch.manual_seed(self._seed)
        make: Callable[[], Iterable[Any]] = pickle.loads(self._pickled)
        return make()

    def __getstate__(self) -> dict[str, Any]:
        return {"_pickled": bytes(ForkingPickler.dumps(self._make_loader)), "_seed": self._seed}


@dataclass(frozen=True)
class Setup:
    """The configuration of the loading process.

    Attributes:
        make_loader: creates the loader.
        device: target device of the batches.
        depth: batches that are ready, besides the one in use.
        consumers: number of consumers.
        folder: folder of the socket, and of the slots on a CPU.
    """

    make_loader: LazyFactory
    device: torch.device
    depth: int
    consumers: int
    folder: Path


def produce(parent: Parent, listener: socket.socket, setup: Setup) -> None:
    """Run the loading process.

    Args:
        parent: the process that started this one.
        listener: socket that the consumers connect to.
        setup: configuration of the process.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        folder = attach(setup.folder)
    except StorageError:
        return  # the parent has closed the prefetcher
    keep_from_children(folder)
    server = ConsumerServer(parent, listener, setup.consumers, setup.depth + 1)
    try:
        Producer(server, setup).run()
    finally:
        server.close()
        folder.close()
        _remove(setup.folder)


def _remove(folder: Path) -> None:
    """Remove the folder if it is unused.

    The kernel may close the connections of a killed process before it releases the process's lock on the folder. All
    processes that detect the death then find the folder locked and leave it in place.
    """
    deadline = time.monotonic() + _REMOVE_SECONDS
    while folder.exists() and not remove_unused(folder) and time.monotonic() < deadline:
        time.sleep(0.001)


class Producer:
    """Runs the loader, one epoch at a time."""

    def __init__(self, server: ConsumerServer, setup: Setup) -> None:
        self._server, self._setup, self._owner = server, setup, Owner()
        self._memory = memory_of(setup.device, setup.folder)
        self._memory.bind()
        self._stream = self._memory.new_stream()
        self._stager = Stager(self._memory, standing=True)
        self._used = [[self._memory.new_event() for _ in range(setup.consumers)] for _ in server.free]
        # The stream waits for the event of a single consumer; this thread waits for the events of several.
        alone = setup.consumers == 1
        self._places = [
            Place(self._memory.new_event(), used[0] if alone else self._memory.new_event()) for used in self._used
        ]

    def run(self) -> None:
        """Serve epochs until the server stops."""
        loader: Any
        try:
            loader = self._setup.make_loader()
        except BaseException as error:
            loader = _Broken(error)
        self._server.set_length(pack_length(loader))
        with self._memory.using(self._stream):
            while self._server.begin():
                self._run_epoch(loader)
            self._poison()
        with contextlib.suppress(Exception):
            loader.close()

    def _run_epoch(self, loader: Any) -> None:
        server, batches = self._server, None
        count_wait = getattr(loader, "count_wait", lambda _: None)
        slot = server.take()
        while slot is not None:
            self._drop_copied()
            try:
                if batches is None:
                    batches = loader.prefetched_by(self) if hasattr(loader, "prefetched_by") else iter(loader)
                begun = time.monotonic()
                batch = next(batches)
                count_wait(time.monotonic() - begun)
            except StopIteration:
                break
            except BaseException as error:
                server.fail(slot, error)
                if batches is None:
                    slot = None
                    break
            else:
                self._send(slot, batch)
                del batch
            slot = server.take()
        server.set_length(pack_length(loader))  # a consumer may request it after the end
        server.end(slot)

    def _drop_copied(self) -> None:
        """Drop the loader's batches whose copies are done."""
        for place in self._places:
            if place.held is not None and self._memory.reached(place.copied):
                place.held = None

    def _send(self, slot: int, batch: Any) -> None:
        try:
            body = self._copy(slot, batch)
            memory = self._places[slot].memory
            assert memory is not None
            self._server.announce(slot, memory, lambda consumer: self._share(slot, consumer), body)
        except BaseException as error:
            self._server.fail(slot, error)

    def _copy(self, slot: int, batch: Any) -> bytes:
        """Copy a batch into a slot; returns the packed layout and the rest of the batch."""
        memory, place = self._memory, self._places[slot]
        tensors, rest = split(batch)
        self._await_consumers(slot)
        before = place.memory
        try:
            sent = self._stager.send(place, tensors)
        finally:
            memory.record(place.copied)
        if before is not None and before is not place.memory:
            memory.discard(before)
        return pickle.dumps((pack_layout(sent.leaves), rest), pickle.HIGHEST_PROTOCOL)

    def _await_consumers(self, slot: int) -> None:
        """Delay the copies into a slot until no consumer works with it."""
        for consumer, event in enumerate(self._used[slot] if self._setup.consumers > 1 else ()):
            self._memory.finish_while(event, lambda consumer=consumer: self._server.is_connected(consumer))  # type: ignore[misc]

    def _share(self, slot: int, consumer: int) -> bytes:
        memory, place = self._memory, self._places[slot]
        assert place.memory is not None
        events = memory.share_event(place.copied), memory.share_event(self._used[slot][consumer])
        return pickle.dumps((memory.share(place.memory), events))

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], object]:
        """Pin the ring of a stallfree loader: see `staging.pin`."""
        return pin(self._memory, self._places, self._owner, memory)

    def _poison(self) -> None:
        for slot in self._server.free:
            place = self._places[slot]
            if place.memory is not None:
                self._await_consumers(slot)
                self._memory.wait(place.used)
                poison(self._memory, place.memory)
                self._memory.record(place.copied)
                self._memory.finish(place.copied)


class _Broken:
    """Stands for a loader that could not be created; raises the error when used."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        raise self._error

    __len__: Any = __iter__
