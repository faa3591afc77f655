"""What the tests of the cache share: values that tell whose they are, and sizes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from stallfree.cache import MISS, SampleCache
from stallfree.cache.memory.layout import plan_layout
from stallfree.cache.policies import make_policy
from stallfree.errors import CapacityError
from stallfree.pipeline.codec import encode, record_size

PAGE = 4096


def capacity_for(
    blocks: int, num_ids: int, *, policy: str = "minio", example: Any = MISS, on_disk: bool = False
) -> int:
    """The smallest capacity, in whole pages, of which a cache makes `blocks` blocks or more."""
    structure, typical = None, 128 << 10
    if example is not MISS:
        structure, arrays = encode(example, allow_pickle=True)
        typical = record_size(structure, arrays)

    def enough(pages: int) -> bool:
        try:
            meta = plan_layout(
                num_ids,
                pages * PAGE,
                fingerprint="",
                policy=policy,
                scored=make_policy(policy).scored,
                on_disk=on_disk,
                structure=structure,
                typical=typical,
            )
        except CapacityError:
            return False
        return meta.num_blocks >= min(blocks, num_ids if meta.common else blocks)

    low, high = 0, 1
    while not enough(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high * PAGE


def make(num_ids: int, blocks: int, *, policy: str = "minio", example: Any = MISS, **arguments: Any) -> SampleCache:
    """A cache of about `blocks` blocks."""
    on_disk = arguments.get("store", "memory") != "memory"
    size = capacity_for(blocks, num_ids, policy=policy, example=example, on_disk=on_disk)
    arguments = {"capacity": size, "fingerprint": "data", **arguments}
    return SampleCache(num_ids, policy=policy, example=example, **arguments)


def signed(id: int, nonce: int, size: int = PAGE - 32) -> tuple[int, int, torch.Tensor]:
    """A value that says whose it is, and whose content can be checked: `nonce` makes each one different."""
    return id, nonce, torch.from_numpy(np.random.default_rng([id, nonce]).integers(0, 256, size, dtype=np.uint8))


def is_signed(id: int, value: Any) -> bool:
    """Whether `value` is whole and is one of `id`."""
    there, nonce, body = value
    return there == id and torch.equal(body, signed(id, nonce, len(body))[2])


def crc(value: Any) -> int:
    """A number that stands for the bytes of a value."""
    structure, arrays = encode(value, allow_pickle=True)
    return zlib.crc32(b"".join([structure.key, *(bytes(array) for array in arrays)]))
