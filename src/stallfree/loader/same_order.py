"""Warnings for a loader whose samples are the same on each rank: every rank would train on every sample."""

from __future__ import annotations

import sys
import warnings

from stallfree.errors import InputError
from stallfree.frames import users_level
from stallfree.loader.ranks import find_ranks
from stallfree.pipeline import StallfreeWarning


def check_same_order(*, sampler: bool) -> None:
    """Warn if there are several ranks, for a loader that gives each of them all samples, as its `sampler` or itself."""
    count = find_ranks().count
    if count > 1:
        cure = (
            "Give torch.utils.data.DistributedSampler in place of the sampler, or leave it out and give ranks='auto', "
            "for a part of them on each rank"
            if sampler
            else "Give ranks='auto' for a part of them on each rank"
        )
        warnings.warn(
            f"each of the {count} ranks gets all samples. {cure}; or add ranks=(0, 1) if each rank is to have all",
            StallfreeWarning,
            stacklevel=users_level(),
        )


def check_same_window() -> None:
    """The same for a `SmartCacheDataset`, whose window the ranks of one host share."""
    count = find_ranks().here
    if count > 1:
        warnings.warn(
            f"each of the {count} ranks of this host gets all samples of the window. Give "
            "sampler=dataset.rank_sampler() for a part of them on each rank",
            StallfreeWarning,
            stacklevel=users_level(),
        )


def check_prepared(*, knows_ranks: bool) -> None:
    """For a loader that is given to `Accelerator.prepare`, which deals out the samples of torch's loader only.

    Raises `InputError` if there are several processes, and the loader gives each of them all samples.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    count = getattr(state, "_shared_state", {}).get("num_processes", 1)
    if count > 1 and not knows_ranks:
        raise InputError(
            f"Accelerator.prepare would give each of the {count} processes all samples of a stallfree.DataLoader. Use "
            "stallfree.integrations.accelerate.prepare(accelerator, loader), which deals them out as for torch's loader"
        )
