"""Epochs of costly prep, with a store and without a cache, on one node or two."""

from __future__ import annotations

import stallfree as sf
from benchmarks import store_team as team


def as_node(number: int, meet: team.Meet, room: int, given: team.Json) -> list[team.Json]:
    """The epochs of one node: without cache, then with a store, whose first epoch fills it."""
    nodes = given["nodes"]
    source = team.Records(given["samples"], given["size"], given["prep"])
    found: list[team.Json] = []
    with sf.RedisStore(capacity_per_node=room, timeout=team.PATIENT) as store:
        cached = sf.CachedDataset(source, capacity=0, store=store, form="prepared", name="costly")
        for name, data in (("plain", source), ("store", cached)):
            loader = team.make_loader(data, nodes, number, given["batch"])
            for turn in range(3):
                meet()
                epoch = team.run_epoch(loader)
                meet()
                found.append({"kind": name, "epoch": turn + 1, "seconds": epoch.seconds, "ids": epoch.ids})
            del loader
        meet()
        cached.close()
    return found


def main() -> None:
    given = team.read_task()
    room_for = team.ServerRoom(team.Records(given["samples"], given["size"]))
    room = room_for(given["samples"] // given["nodes"]) + team.CONNECTIONS
    with team.Nodes(given["nodes"], as_node, room, given) as nodes:
        each = nodes.results()
    seconds: team.Json = {"plain": [], "store": []}
    for turn in zip(*each, strict=True):
        team.check_epoch([team.Epoch(node["seconds"], node["ids"]) for node in turn], given["samples"])
        seconds[turn[0]["kind"]].append(max(node["seconds"] for node in turn))
    team.print_found({"seconds": seconds})


if __name__ == "__main__":
    main()
