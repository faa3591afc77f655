"""Stands in for Ray: each actor is a forked process with a thread per call, so jobs and lost actors need no cluster."""

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
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
    """An actor: a process that calls its method `run`."""

    living: ClassVar[list["Handle"]] = []
    stillborn = 0  # so many of the next processes die before they are ready

    def __init__(self, made: type, threads: int, *arguments: Any) -> None:
        class Manager(BaseManager):
            """The process. It has a thread for each thread that calls it."""

        Manager.register("actor", made, exposed=["run"])
        self._manager: Any = Manager(ctx=get_context("fork"))
        self._manager.start(os.environ.update, ({"RAY_JOB_ID": "fake"},))
        self.process = self._manager._process
        given = (each.result() if isinstance(each, Reference) else each for each in arguments)
        self._actor = self._manager.actor(*given)
        self._pool = ThreadPoolExecutor(threads)
        self.run = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._run))
        self.__ray_terminate__ = SimpleNamespace(remote=self.end)
        ready = Reference() if Handle.stillborn > 0 else put(None)
        self.__ray_ready__ = SimpleNamespace(remote=lambda: ready)
        if Handle.stillborn > 0:
            Handle.stillborn -= 1
            os.kill(self.process.pid, signal.SIGKILL)
        Handle.living.append(self)

    def _run(self, argument: Any) -> tuple[Reference, Reference]:
        head, memory = Reference(), Reference()

        def call() -> None:
            try:
                result, batch = self._actor.run(argument)
            except Exception as error:  # the process has died
                head.set_exception(error)
            else:
                memory.set_result(batch)
                head.set_result(result)

        self._pool.submit(call)
        return head, memory

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._pool.shutdown(wait=False)
        self._manager.shutdown()
        Handle.living.remove(self)


def remote(made: type) -> Any:
    return SimpleNamespace(
        options=lambda max_concurrency, **_: SimpleNamespace(remote=partial(Handle, made, max_concurrency))
    )


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
