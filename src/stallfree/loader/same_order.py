"""A shuffled loader in its own order is the same on each rank: every rank would train on every sample."""

from __future__ import annotations

import sys
import warnings

from stallfree.errors import InputError
from stallfree.loader.ranks import find_ranks
from stallfree.pipeline import StallfreeWarning

_ADVICE = (
    "Give sampler=torch.utils.data.DistributedSampler(dataset, num_replicas, rank) in place of shuffle=True, so that "
    "each sample is on one rank"
)


def check_same_order() -> None:
    """For a loader that is shuffled in its own order: speak up if there are several ranks.

    A `StallfreeWarning`; under `accelerate`, whose users leave it to `Accelerator.prepare` to give each rank its part,
    an `InputError`: that does so for torch's own loader only, and passes over this one without a word.
    """
    count = find_ranks().count
    if count == 1:
        return
    given = f"each of the {count} ranks gets all samples, in the same order"
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if getattr(state, "_shared_state", {}).get("num_processes", 1) > 1:
        raise InputError(f"{given}: Accelerator.prepare leaves a stallfree.DataLoader as it is. {_ADVICE}")
    warnings.warn(f"{given}. {_ADVICE}", StallfreeWarning, stacklevel=3)
