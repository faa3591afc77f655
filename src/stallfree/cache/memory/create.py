"""The files of a new sample cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stallfree.cache.checks import MISS
from stallfree.cache.memory.arena import Arena
from stallfree.cache.memory.index import Index
from stallfree.cache.memory.layout import plan_layout
from stallfree.cache.memory.limits import allowed_capacity
from stallfree.cache.policies import Policy
from stallfree.pipeline.codec import encode, record_size

_TYPICAL = 128 << 10
"""Bytes of a record when no example was given."""


def create_files(
    folder: Path,
    *,
    name: str,
    num_ids: int,
    size: int,
    fingerprint: str,
    policy: Policy,
    on_disk: bool,
    example: Any,
    allow_pickle: bool,
) -> None:
    """Create index, arena, lock and description of the cache `name` in `folder`; for the rest see `SampleCache`."""
    structure, typical = None, _TYPICAL
    if example is not MISS:
        structure, arrays = encode(example, allow_pickle=allow_pickle)
        typical = record_size(structure, arrays)
    meta = plan_layout(
        num_ids,
        allowed_capacity(size, folder, on_disk, name),
        fingerprint=fingerprint,
        policy=policy.name,
        scored=policy.scored,
        on_disk=on_disk,
        structure=structure,
        typical=typical,
    )
    Index.create(folder / "index", num_ids, meta.num_blocks, meta.block, **meta.kinds)
    Arena.create(folder / "data", meta.block, meta.num_blocks)
    (folder / "lock").touch(mode=0o600)
    meta.save(folder)
