"""Processes that make a store at once, and what is left when all of them are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from importlib.metadata import version
from pathlib import Path

import stallfree as sf
from benchmarks.store_team import Json, Meet, Nodes, node_root, print_found, read_task

LIMIT = 60.0
"""Seconds until what has not ended counts as left for ever."""


def as_process(number: int, meet: Meet, ranks: int) -> None:
    """Make a store, say which server it found, and wait to be killed."""
    meet()
    begun = time.perf_counter()
    store = sf.RedisStore(capacity_per_node="64MiB")
    ready = time.perf_counter()
    node = store._server
    assert node is not None
    address = node.address()
    assert address is not None
    with address.client(LIMIT) as client:
        server = client.info("server")["process_id"]
    found = {"begun": begun, "ready": ready, "server": server, "started": node.started, "folder": str(node.folder)}
    (node_root(number // ranks) / f"found-{number}.json").write_text(json.dumps(found))
    meet()
    time.sleep(LIMIT)


def below(folder: Path) -> list[int]:
    """Processes whose working directory lies in `folder`, or did: supervisors and servers."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                here = os.readlink(f"/proc/{entry}/cwd")
            except OSError:
                continue
            if here.startswith(f"{folder}/"):
                found.append(int(entry))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def count_servers(pids: list[int]) -> int:
    names = []
    for pid in pids:
        try:
            names.append(os.path.basename(os.readlink(f"/proc/{pid}/exe")))
        except OSError:
            continue
    return sum("redis" in name or "valkey" in name for name in names)


def once(count: int, ranks: int) -> Json:
    """Start `ranks` processes on each of `count` nodes, and kill them all."""
    roots = [node_root(node) for node in range(count)]
    with Nodes(count, as_process, ranks, ranks=ranks, watched=True) as nodes:
        nodes.meet()
        nodes.meet()
        found = []
        for root in roots:
            for file in sorted(root.glob("found-*.json")):
                found.append(json.loads(file.read_text()))
                file.unlink()
        folders = sorted({Path(each["folder"]) for each in found})
        pids = [pid for root in roots for pid in below(root)]
        servers = count_servers(pids)
        begun = time.perf_counter()
        for process, _ in nodes._jobs:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        while any(map(is_alive, pids)) or any(folder.exists() for folder in folders):
            if time.perf_counter() > begun + LIMIT:
                raise AssertionError(f"left after {LIMIT:.0f} s: {[pid for pid in pids if is_alive(pid)]}, {folders}")
            time.sleep(0.002)
        gone = time.perf_counter() - begun
    return {
        "ready": max(each["ready"] for each in found) - min(each["begun"] for each in found),
        "first": min(each["ready"] - each["begun"] for each in found),
        "servers": servers,
        "found": len({each["server"] for each in found}),
        "started": sum(each["started"] for each in found),
        "processes": len(found),
        "gone": gone,
    }


def main() -> None:
    given = read_task()
    found = [once(given["nodes"], given["ranks"]) for _ in range(given["times"])]
    print_found({"found": found}, redis_py=version("redis"))


if __name__ == "__main__":
    main()
