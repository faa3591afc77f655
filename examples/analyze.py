"""Find out why a job waits, and what would help.

From the command line, with a function that returns (dataset, loader_arguments, step) in a file of your own:

    stallfree analyze my_job.py:build --json report.json --html report.html
    stallfree predict report.json --cache 50% --cpus 24
"""

import tempfile
import time
from pathlib import Path

import torch

import stallfree as sf


def prepare(data: bytes) -> torch.Tensor:
    """Stands for decoding and augmentation."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).float() / 255 + torch.rand(1)


def step(batch: object) -> None:
    """Stands for training."""
    time.sleep(0.004)


with tempfile.TemporaryDirectory() as folder:
    paths = [Path(folder, f"{id}.bin") for id in range(256)]
    for path in paths:
        path.write_bytes(bytes(5_000))
    data = sf.FileDataset(paths, list(range(256)), sf.mark_random(prepare))
    slow = sf.testing.ThrottledSource(data, bandwidth="5MB/s")  # stands for a network file system

    report = sf.analyze(slow, step, batch_size=16, num_workers=1, seconds=1.0, progress=False)
    print(report)
    print(report.predict(cache="50%"))
