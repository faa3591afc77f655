"""Stands in for Ray: each actor is a forked process with a pipe, so jobs and lost actors need no cluster."""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest


class Reference(Future[Any]):
    """A value in the object store, or one that will be there."""

    def future(self) -> Future[Any]:
        return self


def put(value: Any) -> Reference:
    made = Reference()
    made.set_result(value)
    return made


class Handle:
    """An actor: a process that calls its method `run` in threads."""

    living: ClassVar[list["Handle"]] = []

    def __init__(self, made: type, threads: int, arguments: list[Any]) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=self._serve, args=(theirs, made, threads, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._calls: dict[int, tuple[Reference, Reference]] = {}
        self._lock, self._dead = threading.Lock(), False
        Handle.living.append(self)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.run = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._run))
        self.__ray_terminate__ = SimpleNamespace(remote=self.end)

    def _serve(self, pipe: Any, made: type, threads: int, arguments: list[Any]) -> None:
        os.environ["RAY_JOB_ID"] = "fake"
        self._pipe.close()
        for other in Handle.living:  # which would keep the ends of others open
            other._pipe.close()
        actor, lock = made(*arguments), threading.Lock()

        def answer(number: int, argument: Any) -> None:
            result = actor.run(argument)
            with lock:
                pipe.send((number, result))

        with suppress(EOFError), ThreadPoolExecutor(threads) as pool:
            while True:
                pool.submit(answer, *pipe.recv())
        os._exit(0)

    def _run(self, argument: Any) -> tuple[Reference, Reference]:
        head, memory = Reference(), Reference()
        with self._lock:
            self._calls[id(head)] = head, memory
            with suppress(OSError):
                self._pipe.send((id(head), argument))
            dead = self._dead
        if dead:
            head.set_exception(RuntimeError("the actor is dead"))
        return head, memory

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, (head, memory) = self._pipe.recv()
                futures = self._calls.pop(number)
                futures[1].set_result(memory)
                futures[0].set_result(head)
        with self._lock:
            self._dead, lost = True, list(self._calls.values())
        for first, _ in lost:
            first.set_exception(RuntimeError("the actor died"))

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._pipe.close()
        Handle.living.remove(self)


def remote(made: type) -> Any:
    def options(max_concurrency: int, **_: Any) -> Any:
        def start(*given: Any) -> Handle:
            arguments = [each.result() if isinstance(each, Reference) else each for each in given]
            return Handle(made, max_concurrency, arguments)

        return SimpleNamespace(remote=start)

    return SimpleNamespace(options=options)


class Pickler(pickle.Pickler):
    def reducer_override(self, _: Any) -> Any:
        return NotImplemented


@contextmanager
def installed() -> Iterator[list[Handle]]:
    """In this context, `import ray` gives this; yields the living actors."""
    ray: Any = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)
    ray.put, ray.remote, ray.get, ray.kill = put, remote, Future.result, lambda handle: handle.end()
    ray.cloudpickle = SimpleNamespace(Pickler=Pickler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", ray)
        patch.setitem(sys.modules, "ray.cloudpickle", ray.cloudpickle)
        yield Handle.living
