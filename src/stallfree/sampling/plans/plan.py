"""The plan of an epoch as a pure function of (seed, epoch)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Plan:
    """The ids of an epoch, in order.

    Attributes:
        ids: int64, one per draw.
        weights: float32 of the same length, or None where all are 1.
        epoch: which epoch it is.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None
    epoch: int


def make_plan(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Plan:
    """Every sample once: in order, or in an order that (seed, epoch) decides.

    Any process that knows the two integers computes the same plan, so a resume needs no more than them.
    """
    if not shuffle:
        return Plan(np.arange(num_samples, dtype=np.int64), None, epoch)
    sequence = np.random.SeedSequence([seed & (2**64 - 1), epoch])
    return Plan(np.random.Generator(np.random.PCG64(sequence)).permutation(num_samples), None, epoch)
