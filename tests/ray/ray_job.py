"""Training jobs on Ray, and as a program, `python ray_job.py NAME`, one on a cluster of three nodes on this machine."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

import stallfree as sf
from children import until
from loader_data import Made, labels_of, picture
from torch_batches import digest

SAMPLES = 96


def noisy(id: int) -> tuple[torch.Tensor, int, dict[str, Any]]:
    return torch.rand(300) + id, id, {"name": str(id), "large": torch.full((64, 64), id)}


def slow(id: int) -> tuple[torch.Tensor, int]:
    time.sleep(0.003)
    return torch.rand(30) + id, id


def fails(id: int) -> torch.Tensor:
    if id == 7:
        raise ValueError("the file is damaged")
    return torch.tensor(int("RAY_JOB_ID" in os.environ))


def dies(id: int) -> torch.Tensor:
    if id == 7 and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.tensor(id)


def loader(dataset: Any, workers: int = 2, **options: Any) -> sf.DataLoader:
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5, "persistent_workers": True, **options}
    return sf.DataLoader(dataset, workers=sf.RayWorkers(workers), **arguments)


def equal() -> None:
    """Batches, early ends and errors are those of local workers; a sample of each node's cache is a hit."""
    dataset = Made(SAMPLES, noisy)
    with sf.DataLoader(dataset, batch_size=8, shuffle=True, seed=5, num_workers=1) as plain:
        expected = [[digest(batch) for batch in plain] for _ in range(3)]
    with loader(dataset) as remote:
        assert [digest(batch) for batch in remote] == expected[0]
        for number, batch in enumerate(remote):
            assert digest(batch) == expected[1][number]
            if number == 3:
                break
        assert [digest(batch) for batch in remote] == expected[2]
        assert remote.stats().workers_replaced == 0
    with loader(Made(16, fails), shuffle=False, on_error="skip") as remote:
        assert [flag for batch in remote for flag in batch.tolist()] == [1] * 15, "samples are made on the cluster"
    damaged = pytest.raises(ValueError, match=r"the file is damaged\n.*sample 7")
    with loader(Made(16, fails), shuffle=False) as remote, damaged:
        list(remote)
    with sf.CachedDataset(Made(SAMPLES, picture), capacity="8MiB") as cached, loader(cached) as remote:
        for epoch in range(2):
            hits = remote.stats().hits
            assert sorted(labels_of(list(remote))) == list(range(SAMPLES))
            assert not epoch or remote.stats().hits - hits == SAMPLES


def pickles() -> None:
    """What cannot be sent is one error, which names it."""
    lock = threading.Lock()

    def locks(_: object, held: Any) -> None:
        held.acquire()

    wrong = partial(locks, held=lock)
    for name, dataset, options in (
        ("collate_fn", Made(16, noisy), {"collate_fn": wrong}),
        ("worker_init_fn", Made(16, noisy), {"worker_init_fn": wrong}), ("the data set", Made(16, wrong), {}),
    ):  # fmt: skip
        with loader(dataset, **options) as remote:
            with pytest.raises(sf.InputError, match=f"^{name} cannot be sent to Ray workers: ") as caught:
                next(iter(remote))
            assert caught.value.page == "not-picklable"


def deadly() -> None:
    """A batch that kills three workers is an error with its ids; the others come."""
    with loader(Made(SAMPLES, dies), shuffle=False) as remote:
        with pytest.raises(sf.WorkerError, match="lost one after the other") as caught:
            list(remote)
        assert 7 in caught.value.ids


def kills(cluster: Any) -> None:
    """Epochs in a thread until a hundred actors and nodes have been killed."""
    chance, over = random.Random(int(os.environ.get("STALLFREE_SEED", "1"))), threading.Event()
    dataset, begun = Made(40 * 64, slow), threading.Event()
    with sf.DataLoader(dataset, batch_size=64, shuffle=True, seed=5, num_workers=1) as plain:
        expected = [[digest(batch) for batch in plain] for _ in range(3)]

    def train() -> None:
        epoch = 0
        with loader(dataset, 4, batch_size=64) as remote:
            while not over.is_set():
                remote.set_epoch(epoch % 3)
                assert [digest(batch) for batch in remote] == expected[epoch % 3]
                epoch += 1
                begun.set()
            print(f"{epoch} epochs, {remote.stats().workers_replaced} replaced", flush=True)

    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(train)
        training.add_done_callback(lambda _: begun.set())
        begun.wait()
        for number in range(100):
            time.sleep(chance.random() * 2)
            assert not training.done(), training.result()
            if number % 5 == 0:
                cluster.remove_node(chance.choice([*cluster.worker_nodes]), allow_graceful=False)
                cluster.add_node(**NODE)
            elif victims := actors():
                with contextlib.suppress(psutil.Error):
                    chance.choice(victims).kill()
        over.set()
        training.result()


NODE = {"num_cpus": 4, "object_store_memory": 200 << 20}


def actors() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayWorker" in "".join(process.cmdline()[:1]):
                found.append(process)
    return found


def main(name: str) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False, namespace="test")
    globals()[name](*[cluster] * (name == "kills"))
    until(lambda: not actors(), "the actors have ended")
    ray.shutdown()
    cluster.shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
