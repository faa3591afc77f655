"""What `store=` accepts: opens the cache of a data set in memory or on a disk, with the tier behind it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stallfree.cache.policies import Policy
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.tier import TierClient, TierStore
from stallfree.errors import (
    InputError,
    MissingExtraError,
    MissingServerError,
    argument_conflict,
    capacity_too_small,
    text_of,
)
from stallfree.frames import users_level
from stallfree.platform import shares_memory
from stallfree.units import parse_size

Store = str | Path | TierStore


def open_cache(
    store: Store,
    num_ids: int,
    *,
    capacity: int,
    fingerprint: str,
    policy: Policy,
    name: str | None,
    persist: bool,
    example: Any,
) -> SampleCache:
    """Open the cache of a data set, and its tier as `SampleCache.tier`.

    Args:
        store: "memory", a folder, or a place for tiers (`DiskTier`, `RedisStore`).
        num_ids: number of samples of the data set.
        capacity: bytes of memory, or of the disk for a folder; 0 for no memory in front of a tier.
        name: None for one that follows from the fingerprint, the policy and the capacity.
        fingerprint, policy, persist, example: as for `SampleCache`.
    """
    if capacity == 0 and policy.evicts and not policy.given:
        raise argument_conflict(
            f"policy={policy.name!r} with capacity=0: tiers do not evict by a policy. Leave policy out, or give a "
            "capacity for the memory in front of the tier"
        )
    cache = SampleCache(
        num_ids,
        capacity=capacity,
        fingerprint=fingerprint,
        policy=policy,
        store="memory" if is_tier(store) else store,  # type: ignore[arg-type]
        name=name or derived_name(fingerprint, policy, capacity),
        persist=persist,
        example=example,
    )
    if is_tier(store):
        try:
            tier = store.attach(  # type: ignore[union-attr]
                num_ids + 1, fingerprint=fingerprint, name=name or fingerprint[:20], example=(0, example)
            )
            cache.tier = TierClient(tier, cache)
        except BaseException:
            cache.close()
            raise
    return cache


def derived_name(fingerprint: str, policy: Policy, capacity: int) -> str:
    """Return the name of a cache without a name of its own: jobs with equal data share it."""
    return f"{fingerprint[:20]}-{policy.name}-{capacity}"


def is_tier(store: Any) -> bool:
    """Return whether `store` is a place for tiers. Raises `InputError` for a list."""
    if isinstance(store, (list, tuple)):
        raise InputError(f"store={store!r:.80}: give one store, memory has at most one tier behind it")
    return hasattr(store, "attach")


def parse_capacity(capacity: Any, store: Store) -> int:
    """Return `capacity` in bytes; 0 only with a tier. Raises `CapacityError`."""
    size = parse_size(capacity, "capacity")
    if not size and not is_tier(store):
        raise capacity_too_small(f"capacity={capacity!r}: give the bytes of the cache; 0 is for a store with a tier")
    return size


def room_of(store: Store, capacity: int) -> int:
    """Return the bytes that samples may take, with `capacity` of memory: a tier holds those in memory too."""
    return max(capacity, int(getattr(store, "room", 0)) if is_tier(store) else 0)


def default_store(capacity: int, unknown: Sequence[str] = ()) -> tuple[Store, int]:
    """Return the store for `capacity` bytes per node, and the bytes of memory in front of it.

    In a job of several nodes with a server program these are a `RedisStore` and 0, unless the data set has `unknown`
    objects: without their fingerprint, nodes could not find each other's samples. Otherwise "memory" and `capacity`,
    with a warning in a job of several nodes.
    """
    from stallfree.cache.redis.launch import find_node
    from stallfree.cache.redis.store import RedisStore

    if not shares_memory() or find_node()[1] == 1:
        return "memory", capacity
    try:
        if not unknown:
            return RedisStore(capacity_per_node=capacity, name="auto"), 0
        why = f"{unknown[0]} has no fingerprint. To share samples, give name=, another name for each data set"
    except (MissingServerError, MissingExtraError) as error:
        why = text_of(error)
    warnings.warn(f"each node caches samples separately: {why}", RuntimeWarning, stacklevel=users_level())
    return "memory", capacity
