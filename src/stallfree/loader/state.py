"""Checks of the state of a loader."""

from __future__ import annotations

from typing import Any

from stallfree.errors import InputError

STATE_VERSION = 1


def check_state(state: Any, order: dict[str, Any], seed: int | None, *, window: bool, importance: bool) -> None:
    """Raise `InputError` unless `state` is one that a loader can go on with.

    Args:
        state: as `state_dict()` returned it.
        order: of the loader, as it describes itself.
        seed: that the loader was given; None if it takes any.
        window: whether its data set is a `SmartCacheDataset`.
        importance: whether it has an `ImportanceSampler`.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if version != STATE_VERSION:
        raise InputError(
            f"the state has version {version!r}, expected {STATE_VERSION}: give what state_dict() of this "
            "release returned"
        )
    missing = {"epoch", "seed", "order", "batches", "rest"} - state.keys()
    if missing:
        raise InputError(f"the state lacks {', '.join(sorted(missing))}: give what state_dict() returned")
    if None not in (seed, state["seed"]) and seed != state["seed"]:
        raise InputError(
            f"the state was taken with seed={state['seed']}, this loader has seed={seed}: give the same, or none"
        )
    if state["order"] != order:
        raise InputError(f"the state was taken with {state['order']}, this loader has {order}: give the same")
    if window and "window" not in state:
        raise InputError(
            "the state has no window: it was taken with a data set that is no SmartCacheDataset. Give the same data set"
        )
    if importance and "importance" not in state:
        raise InputError("the state has no losses: it was taken without an ImportanceSampler. Leave that out here too")
