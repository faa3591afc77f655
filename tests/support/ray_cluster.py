"""A Ray cluster of several nodes on this machine, in a process of its own: tests, and what they fork, import no Ray.

As a program, it runs the cluster: at each line of its standard input it replaces a node, and answers with a line of
JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

STORE = 200 << 20
"""Bytes of the object store of a node."""


class RayCluster:
    """A cluster with a head and `nodes` - 1 other nodes, each with four CPUs."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # inherited by the workers
        self._log = (folder / "cluster.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        answer = self._answer()
        self.address: str = answer["address"]
        self._pid: int = answer["pid"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError(f"the cluster ended: {Path(self._log.name).read_text()[-3000:]}")

    def replace_node(self) -> None:
        """Kill a node that is not the head, and add another one."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._answer()

    def workers(self) -> list[psutil.Process]:
        """The processes of the actors of stallfree."""
        found = []
        for process in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "RayWorker" in "".join(process.cmdline()[:1]):
                    found.append(process)
        return found

    def close(self) -> None:
        """End all processes of the cluster."""
        cluster = psutil.Process(self._pid)
        processes = [cluster, *cluster.children(recursive=True)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        psutil.wait_procs([cluster], 60)
        self._process.stdout.close()
        self._process.wait()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, 10)
        self._log.close()


def main(nodes: int) -> None:
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 4, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**sizes)
    answer = json.dumps({"address": cluster.address, "pid": os.getpid()})
    print(answer, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        cluster.add_node(**sizes)
        print(answer, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # Ray's processes are no descendants of the test's, in which no test may leave any
    main(int(sys.argv[1]))
