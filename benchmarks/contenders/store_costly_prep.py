"""Epochs of costly prep, with a store and without a cache, on one node or two."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.shared_team import Meet
from benchmarks.store_team import (
    CONNECTIONS,
    PATIENT,
    Epoch,
    Nodes,
    Records,
    ServerRoom,
    check_epoch,
    run_epoch,
    share_of,
)

Json = dict[str, Any]


def as_node(number: int, meet: Meet, room: int, given: Json) -> list[Json]:
    """The epochs of one node: without cache, then with a store, whose first epoch fills it."""
    nodes = given["nodes"]
    source = Records(given["samples"], given["size"], given["prep"])
    found: list[Json] = []
    with sf.RedisStore(capacity_per_node=room, timeout=PATIENT) as store:
        cached = sf.CachedDataset(source, capacity=0, store=store, form="prepared", name="costly")
        for name, data in (("plain", source), ("store", cached)):
            sampler = share_of(data, nodes, number)
            loader = sf.DataLoader(
                data, batch_size=given["batch"], sampler=sampler, num_workers=1, persistent_workers=True
            )
            for turn in range(3):
                meet()
                epoch = run_epoch(loader)
                meet()
                found.append({"kind": name, "epoch": turn + 1, "seconds": epoch.seconds, "ids": epoch.ids})
            del loader
        meet()
        cached.close()
    return found


def main() -> None:
    given = json.loads(sys.argv[1])
    room = ServerRoom(Records(given["samples"], given["size"]))(given["samples"] // given["nodes"]) + CONNECTIONS
    with Nodes(given["nodes"], as_node, room, given) as nodes:
        each = nodes.results()
    seconds: Json = {"plain": [], "store": []}
    for turn in zip(*each, strict=True):
        check_epoch([Epoch(node["seconds"], node["ids"]) for node in turn], given["samples"])
        seconds[turn[0]["kind"]].append(max(node["seconds"] for node in turn))
    emit({"seconds": seconds}, stallfree=version("stallfree"), torch=torch.__version__)


if __name__ == "__main__":
    main()
