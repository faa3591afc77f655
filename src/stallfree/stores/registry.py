"""Which parts of data sets a node holds: the node's clerk finds them here, and the store counts their capacity.

In the node's folder, `data/KEY.json` says where the part of one data set is. An entry whose cache is gone means
nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stallfree.cache import SampleCache, visit
from stallfree.cache.policies import make_policy
from stallfree.errors import StallfreeError
from stallfree.folders import in_use
from stallfree.stores.values import DataKey

_DATA = "data"


def register(folder: Path, key: DataKey, cache: SampleCache) -> None:
    """Let the clerk of the node whose folder is `folder` know this node's part of a data set."""
    data = folder / _DATA
    data.mkdir(mode=0o700, exist_ok=True)
    making = data / f"{key.hex()}.{os.getpid()}.new"
    given = {
        "root": str(cache.path.parent),
        "name": cache.name,
        "policy": cache.policy.name,
        "allow_pickle": cache.allow_pickle,
        "capacity": cache.meta.capacity,
    }
    making.write_text(json.dumps(given))
    os.replace(making, data / f"{key.hex()}.json")


def registered_bytes(folder: Path, *, but: DataKey) -> int:
    """The capacity of all data sets that are in use on the node, but that of the data set `but`."""
    total = 0
    for file in (folder / _DATA).glob("*.json"):
        given = _read(file)
        if given is not None and file.stem != but.hex() and in_use(Path(given["root"]) / given["name"]):
            total += int(given["capacity"])
    return total


def visit_registered(folder: Path, key: DataKey) -> SampleCache | None:
    """The node's part of a data set, for a look and a word; None if it holds none of it."""
    given = _read(folder / _DATA / f"{key.hex()}.json")
    if given is None:
        return None
    try:
        return visit(Path(given["root"]), given["name"], make_policy(given["policy"]), bool(given["allow_pickle"]))
    except (OSError, StallfreeError):
        return None


def _read(file: Path) -> dict[str, Any] | None:
    try:
        given: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return given
