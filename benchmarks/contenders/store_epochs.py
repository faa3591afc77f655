"""Epochs of two nodes with one store: what they read from storage, and how long the first one takes."""

from __future__ import annotations

import time
from typing import Any

import stallfree as sf
from benchmarks import store_team as team

NODES = 2
BATCH = 64

# -- reads, counted ---------------------------------------------------------------------------------------------------


def count_reads(number: int, meet: team.Meet, source: Any, room: int, epochs: int) -> team.Json:
    """Epochs with a server of `room` bytes on each node. What was read is that of all nodes."""
    records: team.Records = source.source
    with sf.RedisStore(capacity_per_node=room, timeout=team.PATIENT) as store:
        cached = sf.CachedDataset(source, capacity=0, store=store, form="fetched", name="counted")
        loader = team.make_loader(cached, NODES, number, BATCH)
        meet()
        looked = records.reads.copy()
        meet()
        found: list[team.Json] = []
        ran: list[team.Epoch] = []
        for _ in range(epochs):
            before, read = cached.stats(), (source.requests, source.bytes)
            meet()
            ran.append(team.run_epoch(loader))
            meet()
            after = cached.stats()
            found.append(
                {
                    "requests": source.requests - read[0],
                    "bytes": source.bytes - read[1],
                    **{name: getattr(after, name) - getattr(before, name) for name in ("hits", "misses", "rejected")},
                }
            )
            meet()
        reads = records.reads
        fresh = looked == 0
        result = {
            "epochs": found,
            "ran": [(epoch.seconds, epoch.ids) for epoch in ran],
            "keys": team.servers_of(cached).num_keys() if number == 0 else 0,
            "used": [server.used_bytes for server in team.servers_of(cached).status()] if number == 0 else [],
            "looked": int(looked.sum()),
            "not_once": int((reads[fresh] != 1).sum()),
            "most": int(reads.max()),
        }
        meet()
        del loader
        cached.close()
    return result


def all_reads(given: team.Json) -> team.Json:
    """For each share: reads and bytes from storage by epoch, hits, and how often single samples were read."""
    found: team.Json = {}
    room = team.ServerRoom(team.Records(given["samples"], given["size"]))
    for share in given["shares"]:
        source = sf.testing.ThrottledSource(team.Records(given["samples"], given["size"]))  # counts, and is not slow
        half = round(share * given["samples"] / NODES)
        granted = room(half) + (team.CONNECTIONS if share == 1 else 0)
        with team.Nodes(NODES, count_reads, source, granted, given["epochs"]) as nodes:
            each = nodes.results()
        source.close()
        epochs = []
        for number in range(given["epochs"]):
            ran = [team.Epoch(*node["ran"][number]) for node in each]
            team.check_epoch(ran, given["samples"])
            sums = {name: sum(node["epochs"][number][name] for node in each) for name in ("hits", "misses", "rejected")}
            first = each[0]["epochs"][number]
            epochs.append({"requests": first["requests"], "bytes": first["bytes"], **sums})
        found[str(share)] = {
            "epochs": epochs,
            "room": granted,
            **{name: each[0][name] for name in ("keys", "used", "looked", "not_once", "most")},
        }
    return {"shares": found, "record": room.record, "empty": room.empty}


# -- the first epoch --------------------------------------------------------------------------------------------------


def first_epochs(number: int, meet: team.Meet, source: Any, form: str, rounds: int) -> list[team.Json]:
    """The first epoch of a new cache, and one without cache, in turns."""
    found = []
    with sf.RedisStore(capacity_per_node="4GiB", timeout=team.PATIENT) as store:
        for turn in range(rounds):
            seconds: team.Json = {}
            for kind in ("cached", "plain") if turn % 2 else ("plain", "cached"):
                data: Any = source
                if kind == "cached":
                    data = sf.CachedDataset(source, capacity=0, store=store, form=form, name=f"first-{turn}")
                loader = team.make_loader(data, NODES, number, BATCH)
                meet()
                seconds[kind] = team.run_epoch(loader).seconds
                meet()
                del loader
                if kind == "cached":
                    _wait_until_stored(data, len(source))
                    meet()
                    if number == 0:
                        team.servers_of(data).clear()
                    meet()
                    data.close()
            found.append(seconds)
    return found


def _wait_until_stored(cached: sf.CachedDataset, count: int) -> None:
    """All samples of the epoch are in the servers, or on their way."""
    deadline = time.monotonic() + 30.0
    while (found := team.servers_of(cached).num_keys()) < count:
        if time.monotonic() > deadline:
            raise AssertionError(f"{found} of {count} samples are in the servers")
        time.sleep(0.01)


def overhead(given: team.Json) -> team.Json:
    """Seconds of both kinds of epochs, round by round: the slower node's."""
    found: team.Json = {}
    for name, case in given["cases"].items():
        records = team.Records(case["samples"], given["size"], case.get("prep", 0.0))
        source: Any = records
        if "bandwidth" in case:
            source = sf.testing.ThrottledSource(records, bandwidth=case["bandwidth"])
        with team.Nodes(NODES, first_epochs, source, case["form"], given["rounds"]) as nodes:
            each = nodes.results()
        if source is not records:
            source.close()
        found[name] = [
            {kind: max(node[turn][kind] for node in each) for kind in ("cached", "plain")}
            for turn in range(given["rounds"])
        ]
    return found


def main() -> None:
    given = team.read_task()
    found = all_reads(given) if given["what"] == "reads" else overhead(given)
    team.print_found({"found": found})


if __name__ == "__main__":
    main()
