"""Groups on several hosts that share one preparation on a Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import stallfree as sf
from loader_data import Made
from ray_cluster import RayCluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

SAMPLES, EPOCHS = 160, 3

JOB = """
import json, os, sys, time
import torch
import stallfree as sf

class Counted(torch.utils.data.Dataset):
    def __init__(self, ledger):
        self.ledger = ledger
    def __len__(self):
        return {samples}
    def __getitem__(self, id):
        with open(self.ledger, "a") as file:
            file.write(f"{{id}} {{os.getpid()}}\\n")
        time.sleep(0.002)
        return torch.rand(20000) + id, id

address, ledger = sys.argv[1:]
workers = sf.RayWorkers(2, address=address)
with sf.SharedLoader(Counted(ledger), group="hosts", batch_size=8, shuffle=True, seed=3, workers=workers) as loader:
    epochs = []
    for _ in range({epochs}):
        iterator = iter(loader)
        epochs.append((loader.epoch, [(float(values.double().sum()), ids.tolist()) for values, ids in iterator]))
print(json.dumps(epochs))
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    running = RayCluster(tmp_path, nodes=2)
    yield running
    running.close()


@pytest.mark.slow
def test_two_hosts_with_two_jobs_each_prepare_each_sample_once_per_epoch(cluster: RayCluster, tmp_path: Path) -> None:
    """A host is a separate root of shared memory. A job that joins late begins with the next epoch."""
    ledger = tmp_path / "ledger"
    program = JOB.format(samples=SAMPLES, epochs=EPOCHS)
    jobs = []
    roots = [Path(os.environ["STALLFREE_ROOT"]) / f"host-{host}" for host in "ab"]
    for root in roots:
        root.mkdir(mode=0o700)
        for _ in range(2):
            path = os.pathsep.join(filter(None, sys.path))
            environment = {**os.environ, "STALLFREE_ROOT": str(root), "PYTHONPATH": path}
            arguments = [sys.executable, "-c", program, cluster.address, str(ledger)]
            jobs.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True))
    lines = [job.communicate(timeout=200)[0].splitlines() for job in jobs]  # Ray may print a warning there, too
    results = [json.loads(next(line for line in printed if line.startswith("[["))) for printed in lines]
    for root in roots:
        shutil.rmtree(root)
    with sf.DataLoader(Made(SAMPLES, _sample), batch_size=8, shuffle=True, seed=3) as plain:
        expected = [[[float(values.double().sum()), ids.tolist()] for values, ids in plain] for _ in range(2 * EPOCHS)]
    assert all(batches == expected[epoch] for result in results for epoch, batches in result)
    epochs = {epoch for result in results for epoch, _ in result}
    prepared = Counter(int(line.split()[0]) for line in ledger.read_text().splitlines())
    assert set(prepared) == set(range(SAMPLES))
    assert sum(prepared.values()) == SAMPLES * len(epochs)


def _sample(id: int) -> object:
    import torch

    return torch.rand(20000) + id, id


def test_a_group_over_hosts_needs_a_seed() -> None:
    with pytest.raises(sf.InputError, match="seed"):
        sf.SharedLoader(Made(8, _sample), group="hosts", workers=sf.RayWorkers(1))
