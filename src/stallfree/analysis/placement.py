"""Prep on the CPUs or on the device: the rates of both placements, for a step that can run on either."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import torch

from stallfree.device.prefetcher import DevicePrefetcher
from stallfree.pipeline.compose import Compose, OnItem


@dataclass(frozen=True)
class Placement:
    """The rates of both placements, samples/s.

    Attributes:
        on_device: whether the job has its prep on the device now.
        cpu_prep: P with prep on the CPUs.
        device_prep: P of what remains for the CPUs with prep on the device.
        step: G.
        step_and_prep: steps while the device prepares the next batches, which is at most G.
    """

    on_device: bool
    cpu_prep: float
    device_prep: float
    step: float
    step_and_prep: float

    @property
    def takes(self) -> float:
        """The share by which the steps are slower while the device prepares the next batches."""
        return max(0.0, 1 - self.step_and_prep / self.step)

    def speeds(self, fetch: float) -> tuple[float, float]:
        """min(F, P, G) with prep on the CPUs and on the device, for this fetch rate."""
        return min(fetch, self.cpu_prep, self.step), min(fetch, self.device_prep, self.step_and_prep)

    def times(self, prep: float = 1.0, step: float = 1.0) -> Placement:
        """Return the placement with other CPUs or devices: the rates times these factors."""
        return Placement(
            self.on_device,
            self.cpu_prep * prep,
            self.device_prep * prep,
            self.step * step,
            self.step_and_prep * step,
        )

    def json(self) -> dict[str, Any]:
        """The placement for the report."""
        return asdict(self)


def both_places(steps: Compose, device: torch.device) -> tuple[Compose, Compose] | None:
    """Return the steps with their prep on the CPUs and on the device; None if they have only one place."""
    if not _decodes(device) or not any(hasattr(_inner(step), "on_device") for step in steps):
        return None
    here, there = ([_placed(step, on_device) for step in steps] for on_device in (False, True))
    return Compose(here), Compose(there)


def _decodes(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("torchvision") is not None


def is_on_device(steps: Compose) -> bool:
    """Return whether one of the steps leaves its work to the device."""
    return any(getattr(_inner(step), "on_device", False) for step in steps)


def _inner(step: Any) -> Any:
    return step.transform if isinstance(step, OnItem) else step


def _placed(step: Any, on_device: bool) -> Any:
    """Return `step` with its work in that place."""
    inner = copy.copy(_inner(step))
    if hasattr(inner, "on_device"):
        inner.on_device = on_device
    return OnItem(step.key, inner) if isinstance(step, OnItem) else inner


def steps_beside_prep(
    batches: Sequence[Any], device: torch.device, train: Callable[[Any], object], size: int
) -> Iterator[int]:
    """Train on `batches` again and again while the device prepares the next ones; yields the size of each batch."""
    for batch in DevicePrefetcher(cycle(batches), device):
        train(batch)
        yield size
