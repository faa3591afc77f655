"""What the tests of the cache share: values that tell whose they are, and sizes."""

import zlib
from bisect import bisect_left
from typing import Any

import numpy as np
import torch

from stallfree.cache.layout import FREE_BLOCK, Field, plan_layout
from stallfree.cache.policies import make_policy
from stallfree.cache.records import MISS as MISS
from stallfree.cache.sample_cache import SampleCache as SampleCache
from stallfree.errors import CapacityError
from stallfree.pipeline.codec import encode, record_size

PAGE = 4096


def capacity_for(blocks: int, num_ids: int, policy: str = "minio", example: Any = MISS, on_disk: bool = False) -> int:
    """The smallest capacity, in whole pages, of which a cache makes `blocks` blocks or more."""
    options: dict[str, Any] = {"fingerprint": "", "policy": policy, "scored": make_policy(policy).scored}
    options |= {"on_disk": on_disk, "structure": None, "typical": 128 << 10}
    if example is not MISS:
        structure, arrays = encode(example, allow_pickle=True)
        options |= {"structure": structure, "typical": record_size(structure, arrays)}

    def enough(pages: int) -> bool:
        try:
            meta = plan_layout(num_ids, pages * PAGE, **options)
        except CapacityError:
            return False
        return meta.num_blocks >= min(blocks, num_ids if meta.common else blocks)

    return bisect_left(range(1 << 20), True, key=enough) * PAGE


def make(num_ids: int, blocks: int, *, policy: str = "minio", example: Any = MISS, **arguments: Any) -> SampleCache:
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


def read(cache: SampleCache, ids: Any) -> list[int]:
    """Return which samples are hits; each must be right."""
    ids = np.asarray(ids, np.int64)
    values = {at: value for at, value in enumerate(cache.get_many(ids)) if value is not MISS}
    assert [id for at, value in values.items() if not is_signed(id := int(ids[at]), value)] == []
    return ids[list(values)].tolist()  # type: ignore[no-any-return]


def gathered(cache: SampleCache, ids: Any) -> list[int]:
    """Return the same of a gather; none from a cache whose samples have no common structure."""
    if cache.structure is None:
        return []
    ids = np.asarray(ids, np.int64)
    outs = [np.zeros((len(ids), leaf.nbytes), np.uint8) for leaf in cache.structure.leaves]
    at = np.flatnonzero(cache.gather(ids, outs))
    for row in at.tolist():
        id, nonce, body = (out[row] for out in outs)
        assert is_signed(int(ids[row]), (id.view(np.int64)[0], nonce.view(np.int64)[0], torch.from_numpy(body)))
    return ids[at].tolist()  # type: ignore[no-any-return]


def hits(cache: SampleCache) -> list[int]:
    """Return which samples are stored, after reading all in both ways."""
    found = read(cache, range(cache.num_ids))
    assert set(gathered(cache, range(cache.num_ids))) <= set(found)
    assert found == np.flatnonzero(cache.resident(range(cache.num_ids))).tolist(), "what is damaged does not stay"
    return found


def crc(value: Any) -> int:
    """A number that stands for the bytes of a value."""
    structure, arrays = encode(value, allow_pickle=True)
    return zlib.crc32(b"".join([structure.key, *(bytes(array) for array in arrays)]))


def problems(cache: SampleCache, *, killed: bool = False) -> list[str]:
    """What is wrong with the bookkeeping of a cache, as sentences; none if all is well.

    With `killed`, after what the first process to attach does about blocks that dead processes had reserved on a disk.
    """
    with cache._changing("checking"):  # what a killed writer left is put in order
        if killed:
            cache._space.recover()
    index, block = cache._index, cache.meta.block
    header = index.header
    high, backed, stacked = (int(header[field]) for field in (Field.HIGH, Field.BACKED, Field.STACKED))
    counted = int(header[Field.RESIDENT])
    residents = np.flatnonzero(index.first)
    lengths = index.length[residents].astype(np.int64)
    used = index.chains(index.first[residents].astype(np.int64) - 1, index.blocks_of(lengths))
    free = np.flatnonzero(index.next[:high] == FREE_BLOCK)
    stack = index.free[:stacked]
    times = np.bincount(np.concatenate((used, free)), minlength=high)
    stored = int(np.where(lengths == 0, block, lengths).sum())
    found = {
        f"{high} blocks were in use, {backed} have memory behind them": high > backed,
        f"{backed} blocks have memory, {header[Field.LIMIT]} may": backed > header[Field.LIMIT],
        "blocks are used that never were handed out": len(times) > high,
        f"blocks {np.flatnonzero(times > 1)[:5]} are used more than once": bool((times > 1).any()),
        f"blocks {np.flatnonzero(times == 0)[:5]} are lost": bool((times == 0).any()),
        f"{len(free)} blocks are free, {header[Field.FREE]} counted": len(free) != header[Field.FREE],
        "the stack of free blocks holds others or some twice": len(np.intersect1d(stack, free)) != stacked,
        f"{len(residents)} records are there, {counted} counted": len(residents) != counted,
        f"{stored} bytes are there, {header[Field.RESIDENT_BYTES]} counted": stored != header[Field.RESIDENT_BYTES],
    }
    return [problem for problem, wrong in found.items() if wrong]
