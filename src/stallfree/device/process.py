"""`ProcessPrefetcher`: a separate process loads batches and copies them to the device.

    loader ─▶ DevicePrefetcher ─▶ pickle without data ─▶ channel ─▶ the training loop
    (in the loading process)                           ◀─ begin, return, break, length

Memory passes through `torch.multiprocessing`, which counts its references in both processes. A message has a kind and
the number of the iteration that it belongs to.
"""

import contextlib
import pickle
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from multiprocessing import get_context, reduction, util
from queue import SimpleQueue
from typing import Any, Generic

import torch.multiprocessing  # registers how tensors are sent

from stallfree import errors
from stallfree.device.copies import Cuda, Device, Event, Stream, find_device, is_plain
from stallfree.device.prefetcher import DevicePrefetcher
from stallfree.ipc.channel import pack_error, unpack_error
from stallfree.ipc.process import Child, Owner, Parent, end_all
from stallfree.pipeline.randomness import draw_seed
from stallfree.platform import how_it_ended, need_linux
from stallfree.pytree import take_apart
from stallfree.raising import raisable, short_traceback
from stallfree.typevars import BatchT_co, Closing
from stallfree.units import parse_whole

_START_METHOD = "spawn"  # a fork would inherit locked locks and an unusable device
_END_SECONDS = 6.0  # for the loader to return when the process must end
_ANSWER_SECONDS = 1.0

_HEAD = struct.Struct("<BQ")
_BEGIN, _RETURN, _BREAK, _LENGTH, _BATCH, _FAILED, _END = range(7)


class ProcessPrefetcher(Closing, Generic[BatchT_co]):
    """Loads batches and copies them to the device in a separate process.

    The loading process starts at once, by "spawn": scripts need the guard below. It calls `make_loader` and iterates
    the result by a `DevicePrefetcher`. The training process receives the memory of the batches, not their data (CUDA
    IPC). So loading and copying do not compete with the training loop for one interpreter.

    A batch may be kept as long as the prefetcher is open. It may consist of anything that `DevicePrefetcher` supports;
    everything but its tensors is pickled. On a CPU the tensors are in shared memory. An iteration that is begun ends
    the one before.

    The process ends with `close`, with the process that created it, or when the prefetcher is freed. It is killed if
    its loader does not return within 6 s.

    Args:
        make_loader: called without arguments in the new process; returns any iterable. It must be picklable: a function
            at the top level of a module, or a `functools.partial` of one.
        device: device such as "cuda", "cuda:1" or "cpu".
        depth: batches that are ready, besides the one in use. At least 1.
        timeout: seconds to wait for a batch before `WaitError`. The first wait includes the start of the process.

    Attributes:
        pid: PID of the loading process.

    An exception of the loader is raised at its position in the order, with the traceback of the loading process as its
    cause; `next` then continues if the loader does. An exception of `make_loader` is raised in each epoch. Raises
    `InputError` for invalid arguments and for a missing device; `ProducerError` if the process has ended;
    `PlatformError` on systems other than Linux.

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

    @short_traceback
    def __init__(
        self, make_loader: Callable[[], Iterable[BatchT_co]], device: Device, depth: int = 2, *, timeout: float = 300.0
    ) -> None:
        need_linux("ProcessPrefetcher", "use DevicePrefetcher")
        if not callable(make_loader):
            raise errors.InputError(
                f"make_loader={make_loader!r:.80}: give a function without arguments that returns the loader; the new "
                "process calls it"
            )
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise errors.InputError(f"timeout={timeout!r}: give the seconds to wait for a batch, more than 0")
        self.depth, self.timeout = parse_whole(depth, "depth", 1), timeout
        self.device, self._backend = find_device(device)
        if self.device.type not in ("cuda", "cpu"):
            raise errors.device_unknown(
                f"device={device!r}: processes share memory of 'cuda' and 'cpu' only. Use DevicePrefetcher"
            )
        self._owner = Owner()
        try:
            self._child = Child(
                *(_produce, _Factory(make_loader), self.device, self.depth),
                context=get_context(_START_METHOD),
                name="stallfree-prefetch",
                leads=True,
            )
        except (OSError, errors.StallfreeError):
            raise  # no process can be started here
        except Exception as error:
            raise errors.not_picklable(
                f"make_loader cannot be sent to a new process: {errors.text_of(error)}. Define it at the top level of "
                "a module (no lambda, no function within a function), and pass its arguments by functools.partial"
            ) from error
        self.pid = self._child.pid
        self._inbox: deque[tuple[int, memoryview]] = deque()  # of the iteration of number `_passes`
        self._lengths: deque[memoryview] = deque()
        self._passes = 0
        self._pass: weakref.ref[_Pass] | None = None
        # `Finalize` runs in this process only, at its exit before multiprocessing waits for its children.
        self._end = util.Finalize(self, end_all, ([self._child], _END_SECONDS), exitpriority=100)

    @short_traceback
    def __iter__(self) -> Iterator[BatchT_co]:
        self._check_process()
        self._end_pass()
        self._passes += 1
        while self._inbox:
            _drop(self._inbox.popleft()[1])
        self._send(_BEGIN, self._passes)
        started = _Pass(self, self._passes)
        self._pass = weakref.ref(started)
        return started

    def __len__(self) -> int:
        """Number of batches per epoch, as reported by the loader. Waits until the loader exists."""
        self._check_process()
        self._send(_LENGTH, self._passes)
        body = self._receive(self._lengths, "the length of the loader")
        if len(body) > 8:
            raise raisable(unpack_error(body))
        return int.from_bytes(body, "little")

    def close(self) -> None:
        """End the process and wait for its exit. Idempotent.

        Its batches must not be used any more.
        """
        if self._owner.is_here:
            self._end_pass()
            self._end()

    def _end_pass(self) -> None:
        last = None if self._pass is None else self._pass()
        if last is not None:
            last.close()

    def __reduce__(self) -> Any:
        raise errors.prefetcher_process(
            "a ProcessPrefetcher belongs to the process that made it: make one in each process"
        )

    # -- messages -----------------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if not self._owner.is_here:
            raise errors.prefetcher_process(
                f"this ProcessPrefetcher belongs to process {self._owner.pid}, and this process is a child of it: "
                "make one here"
            )
        if not self._end.still_active():
            raise self._end_error()

    def _send(self, kind: int, number: int) -> None:
        self._child.send(_HEAD.pack(kind, number))

    def _receive(self, queue: deque[Any], what: str) -> Any:
        """Return the next item of `_inbox` or `_lengths`. Raises `ProducerError` and `WaitError`."""
        deadline = time.monotonic() + self.timeout
        while not queue:
            try:
                message = self._child.receive_by(deadline)
            except EOFError:
                raise self._end_error() from None
            if message is None:
                raise errors.batch_timeout(
                    f"the ProcessPrefetcher has waited {self.timeout:g} s for {what}. Give a larger timeout if it "
                    "takes so long"
                )
            kind, number = _HEAD.unpack_from(message)
            body = memoryview(message)[_HEAD.size :]
            if kind == _LENGTH:
                self._lengths.append(body)
            elif number == self._passes:
                self._inbox.append((kind, body))
            elif kind == _BATCH:
                _drop(body)
        return queue.popleft()

    def _end_error(self) -> errors.ProducerError:
        how = how_it_ended(self._child.join(_ANSWER_SECONDS))
        return errors.ProducerError(
            f"the loading process (process {self.pid}) has ended, or was closed: {how}. Make a new ProcessPrefetcher. "
            "Its output shows the cause; a script that makes one needs `if __name__ == '__main__':`"
        )


class _Pass(Iterator[Any]):
    """One iteration. Ends when it is exhausted, closed or no longer referenced.

    torch synchronises the current stream when the last reference to received memory is dropped. To spare the training
    loop that wait, the leaves of a batch are kept until the work on them is done, and dropped in a stream without work.
    """

    def __init__(self, prefetcher: ProcessPrefetcher[Any], serial: int) -> None:
        self._prefetcher, self._backend, self._serial = prefetcher, prefetcher._backend, serial
        self._closed = self._exhausted = False
        self._number = 0
        self._out: tuple[Any, Stream] | None = None  # the leaves of the last batch, and the stream that waited for it
        self._used: deque[tuple[Event, Any]] = deque()  # those of earlier ones, and the event that ends their use
        self._idle: Stream = None if self._backend is None else self._backend.new_stream()

    @short_traceback
    def __next__(self) -> Any:
        prefetcher = self._prefetcher
        if self._closed and not self._exhausted and prefetcher._passes > self._serial:
            raise errors.iteration_over(
                "this iteration is over: the ProcessPrefetcher was iterated again, and its process loads for one "
                "iteration at a time. Make one for each loop that runs at the same time"
            )
        if self._closed:
            raise StopIteration
        prefetcher._check_process()
        self._release_batch()
        kind, body = prefetcher._receive(prefetcher._inbox, f"batch {self._number} of the epoch")
        if kind == _END:
            self._exhausted = True
            self.close()
            raise StopIteration
        self._number += 1
        if kind == _FAILED:
            prefetcher._send(_RETURN, self._serial)
            raise raisable(unpack_error(body))
        try:
            batch = pickle.loads(body)
        except (OSError, EOFError, RuntimeError):  # the memory is gone with the process
            if prefetcher._child.join(_ANSWER_SECONDS) is None:
                raise
            raise prefetcher._end_error() from None
        self._out = take_apart(batch)[0], None if self._backend is None else self._backend.current_stream()
        return batch

    def _release_batch(self) -> None:
        """Release the batch yielded last: work submitted to the device from now on does not use it."""
        if self._out is None:
            return
        (leaves, stream), self._out = self._out, None
        if self._backend is None:
            self._prefetcher._send(_RETURN, self._serial)
            return
        event, current = self._backend.new_event(), self._backend.current_stream()
        event.record(stream)
        if stream != current:
            current.wait_event(event)
            event.record(current)
        self._used.append((event, leaves))
        del leaves
        self._drop_used(self._backend, self._prefetcher.depth)

    def _drop_used(self, backend: Cuda, most: int) -> None:
        """Drop the batches whose use has ended; wait for the oldest ones if there are more than `most`."""
        while self._used and (len(self._used) > most or self._used[0][0].query()):
            self._used[0][0].synchronize()
            with backend.using(self._idle):
                self._used.popleft()
            self._prefetcher._send(_RETURN, self._serial)

    def close(self) -> None:
        """End the pass. Idempotent."""
        if self._closed or not self._prefetcher._owner.is_here:
            return
        self._closed = True
        self._release_batch()
        if self._backend is not None:
            self._drop_used(self._backend, 0)
        self._prefetcher._send(_BREAK, self._serial)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _drop(body: memoryview) -> None:
    """Open a batch that is not used, so that its memory is freed in the loading process."""
    with contextlib.suppress(Exception):
        pickle.loads(body)


# -- in the loading process -------------------------------------------------------------------------------------------


class _Factory:
    """Makes the loader. It is unpickled when it is called in the new process: errors of both are handled alike."""

    def __init__(self, make_loader: Callable[[], Iterable[Any]]) -> None:
        self._make_loader = make_loader

    def __reduce__(self) -> Any:
        return partial, (_make_loader, bytes(reduction.ForkingPickler.dumps(self._make_loader)), draw_seed())


def _make_loader(pickled: bytes, seed: int) -> Iterable[Any]:
    """Seed torch's generator with a number drawn in the training process, and make the loader."""
    torch.manual_seed(seed)
    return pickle.loads(pickled)()  # type: ignore[no-any-return]


def _produce(parent: Parent, make_loader: Callable[[], Iterable[Any]], device: torch.device, depth: int) -> None:
    """Run the loading process."""
    with contextlib.suppress(OSError):  # the parent has ended
        parent.report()
    if device.type == "cuda":
        # Depending on the version of torch, expandable segments cannot be shared with all processes, or not at all.
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        change("expandable_segments:False")
        torch.cuda.set_device(device)
    producer = _Producer(parent, make_loader, device, depth)
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        producer.run()
    with contextlib.suppress(Exception):
        producer.batches.close()
        producer.batches.loader.close()


class _Producer:
    """Serves the requests of the training process, which a thread receives: it ends this process with that one."""

    def __init__(
        self, parent: Parent, make_loader: Callable[[], Iterable[Any]], device: torch.device, depth: int
    ) -> None:
        self._parent, self._make_loader, self._device, self._depth = parent, make_loader, device, depth
        self._requests: SimpleQueue[bytearray | None] = SimpleQueue()
        parent.listen(self._requests.put)

    @cached_property
    def batches(self) -> Any:
        """The batches on the device; the loader is made when it is used, and again if that failed."""
        return DevicePrefetcher(self._make_loader(), self._device, 1)

    def run(self) -> None:
        """Serve until the end is requested. Raises `EOFError` then, or `OSError`."""
        with contextlib.suppress(BaseException):
            _ = self.batches  # while the training process starts
        kind, number = self._receive()
        while True:
            kind, number = self._run_epoch(number) if kind == _BEGIN else self._receive()

    def _receive(self) -> tuple[int, int]:
        """Return the kind and the number of the next request; one for the length is answered here."""
        message = self._requests.get()
        if message is None:
            raise EOFError
        kind, number = _HEAD.unpack(message)
        if kind == _LENGTH:
            try:
                body = len(self.batches).to_bytes(8, "little")
            except BaseException as error:
                body = pack_error(error)  # which is longer
            self._parent.send(_HEAD.pack(_LENGTH, number), body)
        return kind, number

    def _run_epoch(self, number: int) -> tuple[int, int]:
        """Send the batches of an iteration; returns the last request."""
        iterator: Any = None
        unreturned = 0
        try:
            while True:
                while unreturned > self._depth or not self._requests.empty():
                    request = self._receive()
                    if request[0] == _BEGIN or request == (_BREAK, number):
                        return request
                    unreturned -= request == (_RETURN, number)
                try:
                    iterator = iterator or iter(self.batches)
                    kind, body = _BATCH, self._pack(next(iterator))
                except StopIteration:
                    break
                except BaseException as error:
                    kind, body = _FAILED, pack_error(error)
                self._parent.send(_HEAD.pack(kind, number), body)
                unreturned += 1
                if iterator is None:
                    break
            self._parent.send(_HEAD.pack(_END, number))
            return _END, number
        finally:
            getattr(iterator, "close", int)()

    def _pack(self, batch: Any) -> memoryview | bytes:
        """Return the batch as a message, once its copies are done: the event of a killed process is never reached."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            torch.cuda.ipc_collect()  # frees what the training process has dropped
        leaves, rebuild = take_apart(batch)
        # torch sends neither tensors with a history nor whether one is conjugate
        plain = [leaf.detach().resolve_conj().resolve_neg() if is_plain(leaf) else leaf for leaf in leaves]
        return reduction.ForkingPickler.dumps(rebuild(plain))
