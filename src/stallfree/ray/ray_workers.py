"""`RayWorkers`: prep on other machines, and what the training process and its bridge to Ray say to each other."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stallfree.errors import InputError, missing_extra
from stallfree.platform import need_linux

DEPTH = 8
"""Maximum batches in flight per Ray worker. The measured round trip decides how many there are: 2 or more."""

AUTO_MOST = 64
"""Maximum number of workers with `num_workers="auto"`."""

HEAD = struct.Struct("<iii52x")
"""Head of a message of the bridge: kind, and the number of the worker or of usable workers, and the capacity.

Its 64 bytes keep the alignment of the memory that follows.
"""

RESULT, STATE, PROBLEM, REASON = 0, 1, 2, 3
"""Kinds: a packed result; the state of the workers; an error, as there are no workers; text, why none may get ready."""


@dataclass(frozen=True)
class GroupTerms:
    """A group of loaders on several hosts.

    Attributes:
        name: of the group.
        same: what all hosts must give alike, as text for messages.
    """

    name: str
    same: dict[str, str]


@dataclass(frozen=True)
class RayWorkers:
    """Workers on a Ray cluster, as `workers=` of a `DataLoader` or `SharedLoader`.

    They prepare batches like local worker processes, and yield the same batches bit for bit: a batch is a function of
    (seed, epoch, ids). Local workers (`num_workers`) and Ray workers may be used together. A worker or node that is
    lost is replaced, and its batches are prepared again. If no Ray worker is left, local workers continue, with a
    `RuntimeWarning`: as many as `num_workers`, or one per CPU if that is 0. They also begin if no Ray worker is ready
    after 10 s.

    stallfree and the modules of the data set must be importable on the nodes; `runtime_env` can send them there. The
    workers of a node share a sample cache of the data set's capacity there.

    Args:
        num_workers: number of workers, 1 or more. Each is a Ray actor with one process. "auto", for a `DataLoader`: as
            many as end the wait for prep, by the measured times of a batch and of a training step; at most 64, and at
            most what the cluster has. Workers that are not needed are ended.
        resources: what each worker requires, by Ray's names, such as `{"CPU": 2, "memory": 2**30}`; None: one CPU.
        address: of the cluster, as for `ray.init`: "auto", "host:port" or "ray://host:port". None: the cluster that
            this process uses already, or that the variable `RAY_ADDRESS` names, else a new one on this machine.
        runtime_env: environment of the workers, as for `ray.init`, such as `{"working_dir": "."}`.

    Raises `InputError` for invalid arguments, and `MissingExtraError` if Ray is not installed. While iterating, a
    cluster that cannot be reached at the start is a `WorkerError`.

    Example:
        ```python
        # needs Ray
        loader = sf.DataLoader(dataset, batch_size=64, workers=sf.RayWorkers(16, address="auto"))
        for images, labels in loader:
            train(images, labels)
        ```
    """

    num_workers: int | str
    resources: Mapping[str, float] | None = None
    address: str | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        number, resources = self.num_workers, self.resources
        if number != "auto" and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InputError(f"num_workers={number!r} of RayWorkers: give an int of 1 or more, or 'auto'")
        if resources is not None and (
            not isinstance(resources, Mapping)
            or not all(isinstance(name, str) and _is_amount(amount) for name, amount in resources.items())
        ):
            raise InputError(f"resources={resources!r} of RayWorkers: give amounts by name, such as {{'CPU': 2}}")
        if self.address is not None and not isinstance(self.address, str):
            raise InputError(f"address={self.address!r} of RayWorkers: give a string such as 'host:6379', or None")
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise InputError(f"runtime_env={self.runtime_env!r} of RayWorkers: give a dictionary, or None")
        need_linux("RayWorkers", "use num_workers=0")
        if find_spec("ray") is None:
            raise missing_extra("ray", "ray", "RayWorkers")

    def executor(self, *arguments: Any) -> Any:
        """Return the executor of these workers: see `ray_executor.RayExecutor`. Called by loaders."""
        return import_module("stallfree.ray.ray_executor").RayExecutor(self, *arguments)  # which needs this module

    @property
    def most(self) -> int:
        """Maximum number of workers."""
        return AUTO_MOST if isinstance(self.num_workers, str) else self.num_workers

    @property
    def most_ahead(self) -> int:
        """Maximum number of batches in flight."""
        return DEPTH * self.most

    @property
    def first(self) -> int:
        """Number of workers at the start."""
        return 1 if isinstance(self.num_workers, str) else self.num_workers


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
