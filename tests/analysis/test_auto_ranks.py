"""`cache="auto"` decides once for the ranks of a host: the first one measures, and the others wait for it."""

import json
import os
import time
from pathlib import Path

import numpy as np

import stallfree as sf
from children import Child

RANKS, SAMPLES, BATCH = 3, 600, 8


class Slow:
    """Samples of 4 KB that take 2 ms each, on a storage that notes which rank asks."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> np.ndarray:
        with open(self.log, "a") as log:
            log.write(f"{os.environ['RANK']}\n")
        time.sleep(0.002)
        return np.full(1000, id, np.float32)


def train(rank: int, folder: Path) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4733", "TORCHELASTIC_RUN_ID": "auto"}
    log = folder / "log"
    loader = sf.DataLoader(
        Slow(log), BATCH, shuffle=True, cache="auto", capacity="8MiB", num_workers=0, ranks=(rank, RANKS), seed=1
    )
    batches = iter(loader)
    next(batches)
    before = log.read_text().split().count(str(rank))
    del batches
    (folder / f"{rank}.part").write_text(json.dumps([before, loader.decision.split(";")[0]]))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    while len(list(folder.glob("*.json"))) < RANKS:  # ranks of a job live at the same time
        time.sleep(0.01)
    loader.close()


def test_one_rank_measures_for_all(tmp_path: Path) -> None:
    children = [Child(train, rank, tmp_path) for rank in range(RANKS)]
    assert [child.wait() for child in children] == [0] * RANKS
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert len({decision for _, decision in found}) == 1, "one decision"
    fetches = sorted(before for before, _ in found)
    assert fetches[-2] <= 4 * BATCH, "all but one fetch no more than their first batches"
