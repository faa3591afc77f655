"""`ProcessPrefetcher`: a process of its own loads, and copies to the device what others train with."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.util import Finalize
from typing import Any

import torch

from stallfree.device.consumer import Consumer
from stallfree.device.consumer_server import END_SECONDS
from stallfree.device.producer import LazyFactory, Setup, produce
from stallfree.device.slots import SharedCuda
from stallfree.errors import InputError
from stallfree.ipc.folders import SharedFolder, default_root, sweep
from stallfree.ipc.fork_guard import keep_from_children
from stallfree.ipc.process import Child
from stallfree.ipc.sockets import listen
from stallfree.platform import need_linux

_START_METHOD = "spawn"  # a fork would bring along the threads' locks, and a device that cannot be used
_ANSWER_SECONDS = 1.0


class ProcessPrefetcher:
    """Batches of a loader on the device, loaded and copied there by a process of its own.

        def make_loader():
            return sf.DataLoader(dataset, batch_size=64, num_workers=4)

        if __name__ == "__main__":
            with sf.ProcessPrefetcher(make_loader, "cuda") as batches:
                for epoch in range(90):
                    for images, labels in batches:
                        ...

    The process starts at once, by "spawn": a script needs the guard above. It calls `make_loader`, iterates what that
    gives once per epoch, and copies each batch to one of `depth` + 1 slots in the memory of the device, which are there
    for all its life. The training process has the same memory (CUDA IPC), and hears only which slot is ready. Against
    `DevicePrefetcher`, loading and staging do not take turns with the training loop in one interpreter.

    A batch is valid until the next one is asked for: then its slot is given back, when the work that was given to the
    current stream until then is done. What other streams do with it has to be done by then. A batch may be made of what
    `DevicePrefetcher` takes; all but its tensors is pickled for each batch. Tensors that are not plain (sparse ones,
    subclasses, those on a device) are pickled too, with one warning for each type.

    On a CPU the slots are shared memory of the host, and all else is the same.

    **Several consumers.** Processes that use the same GPU can share the batches: each has every batch of every epoch
    once, in order. Give `prefetcher.consumer(k)` to the process that is consumer k, which iterates it. An epoch begins
    when all have asked for it, and a slot is free when all have given it back, so the slowest sets the pace by `depth`
    batches. Who breaks off an epoch takes part again in the next; who is closed, is no longer referred to or dies is
    not waited for any more. Batches are the same memory for all: do not change them in place. All processes have to see
    the GPU under the same number.

    **Ends.** The process ends with `close`, with the process that made it, or when all consumers have come and gone;
    consumers then get `ProducerError`. It hears of a death by the end of a connection, at once. A loader that does not
    come back within 5 s is ended by the kernel.

    Args:
        make_loader: called without arguments in the new process; gives any iterable. It has to be picklable: a function
            at the top level of a module, or a `functools.partial` of one.
        device: such as "cuda", "cuda:1" or "cpu".
        depth: batches that are ready or on their way, beside the one in use. At least 1.
        consumers: number of processes that iterate. Consumer 0 is this one if it iterates the prefetcher itself.
        timeout: seconds that a consumer waits for a batch, or for the others to begin an epoch, before `WaitError`,
            which says for what. Starting the process is part of the first wait.

    An exception of the loader comes in its place in the order, with the traceback in the other process as its cause;
    after it, `next` goes on if the loader does. One of `make_loader` comes in each epoch. Raises `InputError` for
    arguments that cannot be used, and for a device that is not there; `PlatformError` where there is no Linux.
    """

    def __init__(
        self,
        make_loader: Callable[[], Iterable[Any]],
        device: torch.device | str | int,
        depth: int = 2,
        *,
        consumers: int = 1,
        timeout: float = 300.0,
    ) -> None:
        need_linux("ProcessPrefetcher", "use DevicePrefetcher")
        where = _check(make_loader, device, depth, consumers, timeout)
        self.depth, self.consumers, self.timeout = depth, consumers, timeout
        sweep(default_root())  # what killed processes left
        shared = SharedFolder(f"prefetch-{os.getpid()}-{secrets.token_hex(6)}", initialize=lambda _: None)
        try:
            self._child = _start(shared, make_loader, where, depth, consumers)
        except BaseException:
            shared.close()
            raise
        self.device, self._folder = where, shared.path
        self._own = self.consumer(0)
        self._own.describe_end = partial(_describe_end, self._child)
        # In this process only, and at its end before multiprocessing waits for its children.
        self._end = Finalize(self, _end, (self._child, shared), exitpriority=100)

    def __iter__(self) -> Iterator[Any]:
        started = iter(self._own)
        started.keeps = self
        return started

    def __len__(self) -> int:
        """Number of batches of an epoch, as the loader says."""
        return len(self._own)

    @property
    def pid(self) -> int:
        """The process that loads."""
        return self._child.pid

    def consumer(self, number: int) -> Consumer:
        """Who gets the batches as consumer `number`, from 0 on. Picklable, for any process of this user on this host.

        Raises `InputError` if there is no such number.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.consumers:
            raise InputError(f"consumer({number!r}): give a number from 0 to {self.consumers - 1}, as consumers= says")
        return Consumer(self._folder, number, self.consumers, self.device, self.timeout)

    def close(self) -> None:
        """End the process, and wait until it has ended. May be called twice."""
        self._own.close()
        self._end()

    def __enter__(self) -> ProcessPrefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise InputError("a ProcessPrefetcher belongs to the process that made it: give others its consumer(1), ...")


def _check(make_loader: Any, device: Any, depth: Any, consumers: Any, timeout: Any) -> torch.device:
    """The device, if all is well."""
    if not callable(make_loader):
        raise InputError(
            f"make_loader={make_loader!r:.80}: give a function without arguments that makes the loader, which the new "
            "process calls"
        )
    for name, value in (("depth", depth), ("consumers", consumers)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r}: give a whole number, 1 or more")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InputError(f"timeout={timeout!r}: give the seconds to wait for a batch, more than 0")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"device={device!r} is no device: give such as 'cuda', 'cuda:1' or 'cpu'") from error
    if where.type == "cuda":
        return SharedCuda(where).device
    if where.type != "cpu":
        raise InputError(f"device={device!r}: processes share memory of 'cuda' and 'cpu' only. Use DevicePrefetcher")
    return torch.device("cpu")


def _start(
    shared: SharedFolder, make_loader: Callable[[], Iterable[Any]], device: torch.device, depth: int, consumers: int
) -> Child:
    """Start the process that loads. Raises `InputError` if what it needs cannot be sent to it."""
    setup = Setup(LazyFactory(make_loader), device, depth, consumers, shared.path)
    with listen(shared.path) as listener:
        keep_from_children(shared, listener)
        try:
            context = get_context(_START_METHOD)
            return Child(produce, listener, setup, context=context, name="stallfree-prefetch", leads=True)
        except OSError:
            raise  # no process can be started here
        except Exception as error:
            raise InputError(
                f"make_loader cannot be sent to a new process: {error}. Define it at the top level of a module (no "
                "lambda, no function within a function), and give what it needs by functools.partial"
            ) from error


def _describe_end(child: Child) -> str:
    """How the process ended, as far as this one can find out."""
    code = child.join(_ANSWER_SECONDS)
    if code is None:
        return ""
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"


def _end(child: Child, shared: SharedFolder) -> None:
    """End the process, and wait until it has ended."""
    child.end(time.monotonic() + END_SECONDS + _ANSWER_SECONDS)
    shared.close()
