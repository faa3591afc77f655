"""Epochs of two nodes behind slow storage: one store for both, or a cache of its own on each."""

from __future__ import annotations

from typing import Any

import stallfree as sf
from benchmarks import store_team as team

NODES = 2
BATCH = 64


class Kind:
    """One way to cache, on one node.

    Args:
        name: "servers" (no memory tier), "tiered" (a memory tier and smaller servers), "local" (as "servers", with a
            `LocalSampler`), "own" (a cache of this node alone) or "whole" (one that holds all).
        number: of the node.
        source: behind slow storage.
        share: of the data that this node has room for.
        server_room: for the records of a server.
    """

    def __init__(self, name: str, number: int, source: Any, share: float, server_room: team.ServerRoom) -> None:
        count = len(source)
        in_servers = {"servers": share, "local": share, "tiered": 1 / NODES}.get(name, 0)
        in_memory = {"own": share, "whole": 1.0, "tiered": share - 1 / NODES}.get(name, 0)
        capacity = team.room_for(round(in_memory * count), source.source) if in_memory else 0
        options: team.Json = {"capacity": capacity, "form": "fetched", "name": name}
        self._store = None
        if in_servers:
            room = server_room(round(in_servers * count)) + team.CONNECTIONS
            self._store = options["store"] = sf.RedisStore(capacity_per_node=room, timeout=team.PATIENT, name=name)
        self.data = sf.CachedDataset(source, **options)
        # The same data on storage that is not slow, for the epochs that fill the cache.
        self.quick = sf.CachedDataset(source.source, **options)
        mine = team.share_of(self.data, NODES, number)
        sampler = sf.LocalSampler(self.data) if name == "local" else mine
        self._fills = self._loader(self.quick, mine if in_servers else range(count))
        self._runs = self._loader(self.data, sampler)

    def _loader(self, data: Any, sampler: Any) -> sf.DataLoader:
        return sf.DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=1)

    def fill(self) -> None:
        for _ in self._fills:
            pass

    def run(self) -> team.Epoch:
        return team.run_epoch(self._runs)

    def close(self) -> None:
        del self._runs, self._fills
        self.quick.close()
        self.data.close()
        if self._store is not None:
            self._store.close()


def as_node(
    number: int, meet: team.Meet, source: Any, server_room: team.ServerRoom, given: team.Json
) -> list[team.Json]:
    """What each kind took, round by round."""
    found: list[team.Json] = []
    kinds = {name: Kind(name, number, source, given["share"], server_room) for name in given["kinds"]}
    meet()
    for name, kind in kinds.items():
        for _ in range(given["fills"]):
            kind.fill()
            meet()
        if name == "own" and kind.data.stats().resident_items != round(given["share"] * len(source)):
            raise AssertionError(f"{kind.data.stats().resident_items} samples fill the cache of one node")
    for _ in range(given["rounds"]):
        turn: team.Json = {}
        for name, kind in kinds.items():
            meet()
            before, was = source.bytes, kind.data.stats()
            meet()
            epoch = kind.run()
            meet()
            now = kind.data.stats()
            turn[name] = {
                "seconds": epoch.seconds,
                "ids": epoch.ids,
                "bytes": source.bytes - before,
                "hits": now.hits - was.hits,
                "tier_hits": now.tier_hits - was.tier_hits,
            }
        found.append(turn)
    for kind in kinds.values():
        kind.close()
    return found


def main() -> None:
    given = team.read_task()
    source = sf.testing.ThrottledSource(team.Records(given["samples"], given["size"]), bandwidth=given["bandwidth"])
    with team.Nodes(NODES, as_node, source, team.ServerRoom(source.source), given) as nodes:
        each = nodes.results()
    source.close()
    rounds = []
    for number in range(given["rounds"]):
        turn: team.Json = {}
        for name in given["kinds"]:
            here = [node[number][name] for node in each]
            team.check_epoch([team.Epoch(one["seconds"], one["ids"]) for one in here], given["samples"])
            sums = {key: sum(one[key] for one in here) for key in ("hits", "tier_hits")}
            turn[name] = {"seconds": max(one["seconds"] for one in here), "bytes": here[0]["bytes"], **sums}
        rounds.append(turn)
    team.print_found({"rounds": rounds})


if __name__ == "__main__":
    main()
