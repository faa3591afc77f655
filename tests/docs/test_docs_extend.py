"""The changes that docs/extend.md shows apply to the code, and do what the page says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks

SHOWN = {block.title: block.text for block in blocks(ROOT / "docs" / "extend.md", "diff")}

POLICY = """
import random
import stallfree as sf

def model(trace, room):
    entered, hit, hits = {}, {}, 0  # times of entry, and of the last hit
    for now, id in enumerate(trace):
        if id in entered:
            hits, hit[id] = hits + 1, now
            continue
        if len(entered) == room:
            victim = min(entered, key=lambda id: (id in hit, hit.get(id, entered[id])))
            del entered[victim]
            hit.pop(victim, None)
        entered[id] = now
    return hits

draw = random.Random(5)
trace = [min(draw.randrange(40), draw.randrange(40)) for _ in range(2000)]
hits = {name: sf.replay(trace, policy=name, capacity=9, batch_size=1).epochs[0].hits for name in ("reused", "lru")}
assert hits["reused"] == model(trace, 9) != hits["lru"], hits
"""

PLAN = """
import numpy as np
import stallfree as sf

class Numbers:
    def __len__(self):
        return 101

    def __getitem__(self, id):
        return id

losses = np.random.default_rng(3).permutation(101).astype(np.float32)
sampler = sf.ImportanceSampler(101, plan="top", seed=0)
loader = sf.DataLoader(Numbers(), batch_size=8, sampler=sampler)
epochs = []
for _ in range(2):
    epochs.append([])
    for batch in loader:
        sampler.update(batch.ids, losses[batch.ids])
        epochs[-1] += batch.data.tolist()
assert sorted(epochs[0]) == list(range(101))
assert sorted(epochs[1]) == np.flatnonzero(losses > 50).tolist() and epochs[1] != sorted(epochs[1])
"""

TIER = """
import torch
import stallfree as sf

class Flat:
    made = 0

    def __len__(self):
        return 300

    def __getitem__(self, id):
        Flat.made += 1
        return torch.full((4096,), id % 256, dtype=torch.uint8), id

used = {}
for number, zlib in enumerate((True, False)):
    tier = sf.DiskTier(f"disk-{number}", capacity="4MiB", zlib=zlib)
    with sf.CachedDataset(Flat(), capacity="256KiB", store=tier) as cached:
        for epoch in range(2):
            for flat, ids in sf.DataLoader(cached, batch_size=20, shuffle=True):
                assert flat.shape == (len(ids), 4096) and (flat == (ids % 256)[:, None]).all()
            cached.cache.flush()
            reads = cached.stats().storage_reads
            if epoch == 0:
                first, made = reads, Flat.made
        assert (reads, Flat.made) == (first, made), "the second epoch has read from the data set"
        assert cached.stats().lower.hits > 0
        used[zlib] = cached.stats().lower.resident_bytes
assert used[True] < used[False] / 5, used
"""

EXECUTOR = """
import random
import threading
import warnings
import torch
import stallfree as sf
from stallfree.workers import worker_pool

worker_pool.shares_memory = lambda: False  # as on a system without worker processes
warnings.simplefilter("error")

class Noisy:
    def __len__(self):
        return 30

    def __getitem__(self, id):
        names.add(threading.current_thread().name)
        return torch.full((5,), float(id)) + torch.rand(5), random.random()

def epochs(workers):
    loader = sf.DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, num_workers=workers)
    torch.manual_seed(0)
    return [(noisy.clone(), draw, torch.rand(())) for _ in range(2) for noisy, draw in loader]  # the model draws too

names = set()
alone = epochs(0)
assert names == {"MainThread"}
names.clear()
threads = epochs(3)
assert names and all(name.startswith("stallfree-gather-") for name in names), names
assert len(threads) == len(alone) == 16
assert all(torch.equal(*pair) for one, other in zip(threads, alone) for pair in zip(one, other))
assert not any(torch.equal(one[0], other[0]) for one, other in zip(alone[:8], alone[8:]))
"""

PROGRAMS = {"A policy": POLICY, "A sampling plan": PLAN, "A tier": TIER, "An executor": EXECUTOR}


def test_the_page_shows_all_four() -> None:
    assert list(SHOWN) == list(PROGRAMS)


@pytest.mark.parametrize("title", PROGRAMS)
def test_the_change_applies_and_works(title: str, tmp_path: Path, store_root: Path) -> None:
    assert len(SHOWN[title].splitlines()) < 60
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    change = subprocess.run(
        ["git", "apply", "-"],
        cwd=tmp_path,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        input=SHOWN[title],
        capture_output=True,
        text=True,
        check=False,
    )
    assert change.returncode == 0, change.stderr
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[title]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(store_root.iterdir()), "a cache was left behind"
