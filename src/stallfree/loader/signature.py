"""Arguments of the loaders for type checkers, whose overloads infer what a loader yields. Not used at run time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, TypedDict

import torch

from stallfree.pipeline.compose import Transform
from stallfree.workers.ray_workers import RayWorkers


class _Positional(TypedDict, total=False):
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None


class _Keywords(TypedDict, total=False):
    prefetch_factor: int | None
    seed: int | None
    on_error: str
    staging: int | str | None
    workers: RayWorkers | None


class LoaderKeywords(_Keywords, total=False):
    """Arguments of `DataLoader` that are given by name and do not change what it yields."""

    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    device: torch.device | str | int | None
    cache: str | None
    capacity: int | str | None
    transform: Transform | None
    event_log: str | os.PathLike[str] | None
    ranks: tuple[int, int] | str | None


class LoaderArguments(LoaderKeywords, _Positional, total=False):
    """All arguments of `DataLoader` but those that its overloads have themselves."""

    batch_sampler: Iterable[Any] | None
    num_workers: int | None
    collate_fn: Callable[[Any], Any] | None
    generator: torch.Generator | None


class SharedArguments(_Keywords, _Positional, total=False):
    """All arguments of `SharedLoader` but those that its overloads have themselves."""

    batch_size: int
    shuffle: bool
    num_workers: int
    chunk_size: int | None
    join: str
    on_lag: str
