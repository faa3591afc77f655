"""`RayWorkers`: prep on other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stallfree.errors import InputError, missing_extra
from stallfree.platform import need_linux

if TYPE_CHECKING:
    from stallfree.loader.executors import WorkerSetup
    from stallfree.loader.ring import Slots


AHEAD = 2
"""Batches in flight per worker: one is fetched while the other is prepared."""


@dataclass(frozen=True)
class RayWorkers:
    """Workers on a Ray cluster, as `workers=` of a `DataLoader`.

    They prepare batches in place of local worker processes, and yield the same batches bit for bit: a batch is a
    function of (seed, epoch, ids). A worker or node that is lost is replaced, and its batches are prepared again.

    The cluster is that of this process: call `ray.init` before, with the address of the cluster and the environment of
    the workers. Otherwise Ray itself starts one on this machine. stallfree and the modules of the data set must be
    importable on the nodes. The workers of a node share a sample cache of the data set's capacity there.

    Args:
        num_workers: number of workers, 1 or more. Each is a Ray actor.
        resources: what each worker requires, by Ray's names, such as `{"CPU": 2, "memory": 2**30}`; None: one CPU.

    Raises `InputError` for invalid arguments, and `MissingExtraError` if Ray is not installed.

    Example:
        ```python
        # needs Ray
        ray.init("auto")
        loader = sf.DataLoader(dataset, batch_size=64, workers=sf.RayWorkers(16))
        for images, labels in loader:
            train(images, labels)
        ```
    """

    num_workers: int
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        number, resources = self.num_workers, self.resources
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"num_workers={number!r} of RayWorkers: give an int of 1 or more")
        if resources is not None and (
            not isinstance(resources, Mapping)
            or not all(
                isinstance(name, str)
                and isinstance(amount, (int, float))
                and not isinstance(amount, bool)
                and amount >= 0
                for name, amount in resources.items()
            )
        ):
            raise InputError(f"resources={resources!r} of RayWorkers: give amounts by name, such as {{'CPU': 2}}")
        need_linux("RayWorkers", "use num_workers=0")
        if find_spec("ray") is None:
            raise missing_extra("ray", "ray", "RayWorkers")

    @property
    def ahead(self) -> int:
        """Batches in flight."""
        return AHEAD * self.num_workers

    def executor(self, setup: WorkerSetup, slots: Slots) -> Any:
        """Return the executor of these workers. Called by loaders."""
        executor = import_module("stallfree.ray.executor").RayExecutor  # which needs this module
        return executor(self.num_workers, self.resources or {}, setup, slots)
