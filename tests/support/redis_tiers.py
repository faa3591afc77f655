"""What the tests of tiers on servers share: samples that show whose they are, and how they are read and stored."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis

from redis_servers import Server
from stallfree.cache.records import MISS
from stallfree.cache.redis.store import RedisStore, RedisTier
from stallfree.pipeline.codec import encode, record_size, write_record

COUNT = 200
ALL = np.arange(COUNT)
PATIENT = 60.0  # seconds that a server may be silent where that is not what is tested


def sample(id: int, salt: int = 0) -> tuple[np.ndarray, int]:
    """A sample of one of several data sets, of a size of its own; every number shows whose it is."""
    return np.arange(20 + id * 7 % 300) + (salt << 48 | id << 16), id


def record(value: Any, **options: Any) -> np.ndarray:
    structure, arrays = encode(value, **options)
    out = np.empty(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, out)
    return out


def put(tier: RedisTier, ids: Sequence[int] | np.ndarray, salt: int = 0) -> np.ndarray:
    """Store samples; which are stored."""
    ids = np.asarray(ids)
    return tier.put_many(ids, [record(sample(id, salt)) for id in ids.tolist()])


def held(tier: RedisTier, ids: Sequence[int] | np.ndarray = ALL, salt: int = 0) -> list[int]:
    """The ids of which a tier has the samples. Fails for one that is not as it was made."""
    ids = np.asarray(ids)
    found = []
    for id, value in zip(ids.tolist(), tier.get_many(ids), strict=True):
        if value is not MISS:
            assert value[1] == id
            assert np.array_equal(value[0], sample(id, salt)[0])
            found.append(id)
    return found


def given(*servers: Any, **options: Any) -> RedisStore:
    return RedisStore([server.host for server in servers], **{"timeout": PATIENT, **options})


def tier_of(store: RedisStore, name: str = "train", fingerprint: str = "f", count: int = COUNT) -> RedisTier:
    return store.attach(count, fingerprint=fingerprint, name=name)


def admin(server: Server) -> redis.Redis:
    return redis.Redis.from_url(f"unix://{server.path}")
