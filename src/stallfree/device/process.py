"""`ProcessPrefetcher`: a separate process loads batches and copies them to the device for the training processes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any, Generic

import torch
from typing_extensions import Self

from stallfree.device.backend import parse_device
from stallfree.device.consumer import Consumer
from stallfree.device.consumer_server import END_SECONDS
from stallfree.device.producer import LazyFactory, Setup, produce
from stallfree.device.slots import SharedCuda
from stallfree.errors import InputError, consumer_process, device_unknown, not_picklable, text_of
from stallfree.ipc.folders import SharedFolder, default_root, sweep
from stallfree.ipc.fork_guard import keep_from_children
from stallfree.ipc.process import Child, start_method
from stallfree.ipc.sockets import listen
from stallfree.platform import need_linux
from stallfree.typevars import BatchT_co

_START_METHOD = "spawn"  # a fork would inherit locked locks and an unusable device
_ANSWER_SECONDS = 1.0


class ProcessPrefetcher(Generic[BatchT_co]):
    """Loads batches and copies them to the device in a separate process.

    The loading process starts at once, by "spawn": scripts need the guard below. It calls `make_loader` and
    iterates the result once per epoch. It copies each batch to one of `depth` + 1 persistent slots in device memory.
    The training process maps the same memory (CUDA IPC) and receives only the number of the ready slot. Unlike in
    `DevicePrefetcher`, loading and staging do not compete with the training loop for one interpreter.

    A batch is valid until the next one is requested. Its slot is then returned, once the work submitted to the current
    stream so far is done; other streams must have finished their work on it by then. A batch may consist of anything
    that `DevicePrefetcher` supports; everything but its tensors is pickled for each batch. Tensors that are not plain
    (sparse ones, subclasses, tensors on a device) are pickled too, with one warning per type.

    On a CPU the slots are shared host memory; everything else is the same.

    **Several consumers.** Processes that use the same GPU can share the batches: each gets every batch of every epoch
    once, in order. Pass `prefetcher.consumer(k)` to the process that is consumer k, which iterates it. An epoch starts
    when all consumers have requested it. A slot is free when all have returned it: the slowest consumer limits the
    others to `depth` batches ahead. A consumer that leaves an epoch takes part again in the next one; one that is
    closed, no longer referenced or dead is not waited for. All consumers share the memory of a batch: do not change it
    in place. The GPU must have the same index in all processes.

    **Termination.** The process ends with `close`, with the process that created it, or when all consumers have
    connected and left; consumers then get `ProducerError`. It detects a death at once, by the end of a connection. The
    kernel kills the process if its loader does not return within 5 s.

    Args:
        make_loader: called without arguments in the new process; returns any iterable. It must be picklable: a function
            at the top level of a module, or a `functools.partial` of one.
        device: device such as "cuda", "cuda:1" or "cpu".
        depth: batches that are ready or in flight, besides the one in use. At least 1.
        consumers: number of processes that iterate. Consumer 0 is this process if it iterates the prefetcher itself.
        timeout: seconds that a consumer waits for a batch, or for the others to start an epoch, before `WaitError`,
            which names the cause. The first wait includes the start of the process.

    An exception of the loader is raised at its position in the order, with the traceback of the loading process as its
    cause; `next` then continues if the loader does. An exception of `make_loader` is raised in each epoch. Raises
    `InputError` for invalid arguments and for a missing device; `PlatformError` on systems other than Linux.

    Example:
        ```python
        # needs a script with a main guard
        def make_loader():
            return sf.DataLoader(dataset, batch_size=64, num_workers=4)

        if __name__ == "__main__":
            with sf.ProcessPrefetcher(make_loader, "cuda") as batches:
                for images, labels in batches:
                    train(images, labels)
        ```
    """

    def __init__(
        self,
        make_loader: Callable[[], Iterable[BatchT_co]],
        device: torch.device | str | int,
        depth: int = 2,
        *,
        consumers: int = 1,
        timeout: float = 300.0,
    ) -> None:
        need_linux("ProcessPrefetcher", "use DevicePrefetcher")
        where = _check(make_loader, device, depth, consumers, timeout)
        context = get_context(_START_METHOD)
        start_method(context)
        self.depth, self.consumers, self.timeout = depth, consumers, timeout
        sweep(default_root())  # folders left by killed processes
        shared = SharedFolder(f"prefetch-{os.getpid()}-{secrets.token_hex(6)}", initialize=lambda _: None)
        try:
            self._child = _start(context, shared, make_loader, where, depth, consumers)
        except BaseException:
            shared.close()
            raise
        self.device, self._folder = where, shared.path
        self._own: Consumer[BatchT_co] = self.consumer(0)
        self._own.describe_end = partial(_describe_end, self._child)
        # Finalize runs in this process only, at its exit before multiprocessing waits for its children.
        self._end = Finalize(self, _end, (self._child, shared), exitpriority=100)

    def __iter__(self) -> Iterator[BatchT_co]:
        started = iter(self._own)
        started.keepalive = self
        return started

    def __len__(self) -> int:
        """Number of batches per epoch, as reported by the loader."""
        return len(self._own)

    @property
    def pid(self) -> int:
        """PID of the loading process."""
        return self._child.pid

    def consumer(self, number: int) -> Consumer[BatchT_co]:
        """Return consumer `number`, from 0.

        Picklable, for any process of this user on this host.

        Raises `InputError` if there is no such number.

        Example:
            ```python
            # needs a script with a main guard
            batches = sf.ProcessPrefetcher(make_loader, "cuda", consumers=2)
            context = torch.multiprocessing.get_context("spawn")
            context.Process(target=train_one, args=(batches.consumer(1),)).start()
            ```
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.consumers:
            raise InputError(f"consumer({number!r}): give a number from 0 to {self.consumers - 1}, below consumers=")
        return Consumer(self._folder, number, self.consumers, self.device, self.timeout)

    def close(self) -> None:
        """End the process and wait for its exit. Idempotent."""
        self._own.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise consumer_process(
            "a ProcessPrefetcher belongs to the process that made it: give other processes its consumer(1), ..."
        )


def _check(make_loader: Any, device: Any, depth: Any, consumers: Any, timeout: Any) -> torch.device:
    """Validate the arguments and return the device."""
    if not callable(make_loader):
        raise InputError(
            f"make_loader={make_loader!r:.80}: give a function without arguments that returns the loader; the new "
            "process calls it"
        )
    for name, value in (("depth", depth), ("consumers", consumers)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r}: give a whole number, 1 or more")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InputError(f"timeout={timeout!r}: give the seconds to wait for a batch, more than 0")
    where = parse_device(device)
    if where.type == "cuda":
        return SharedCuda(where).device
    if where.type != "cpu":
        raise device_unknown(
            f"device={device!r}: processes share memory of 'cuda' and 'cpu' only. Use DevicePrefetcher"
        )
    return torch.device("cpu")


def _start(
    context: BaseContext,
    shared: SharedFolder,
    make_loader: Callable[[], Iterable[Any]],
    device: torch.device,
    depth: int,
    consumers: int,
) -> Child:
    """Start the loading process. Raises `InputError` if its arguments cannot be pickled."""
    setup = Setup(LazyFactory(make_loader), device, depth, consumers, shared.path)
    with listen(shared.path) as listener:
        keep_from_children(shared, listener)
        try:
            return Child(produce, listener, setup, context=context, name="stallfree-prefetch", leads=True)
        except OSError:
            raise  # no process can be started here
        except Exception as error:
            raise not_picklable(
                f"make_loader cannot be sent to a new process: {text_of(error)}. Define it at the top level of a "
                "module (no lambda, no function within a function), and pass its arguments by functools.partial"
            ) from error


def _describe_end(child: Child) -> str:
    """Return how the process ended, if known."""
    code = child.join(_ANSWER_SECONDS)
    if code is None:
        return ""
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"


def _end(child: Child, shared: SharedFolder) -> None:
    """End the process and wait for its exit."""
    child.end(time.monotonic() + END_SECONDS + _ANSWER_SECONDS)
    shared.close()
