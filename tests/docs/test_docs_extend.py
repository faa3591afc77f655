"""The changes that docs/extend.md shows apply to the code, and do what the page says."""

from __future__ import annotations

import json
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
from stallfree.cache.store import CompressedDiskTier

class Flat:
    made = 0

    def __len__(self):
        return 300

    def __getitem__(self, id):
        Flat.made += 1
        return torch.full((4096,), id % 256, dtype=torch.uint8), id

used = {}
for number, zlib in enumerate((True, False)):
    kind = CompressedDiskTier if zlib else sf.DiskTier
    with sf.CachedDataset(Flat(), capacity="256KiB", store=kind(f"disk-{number}", capacity="4MiB")) as cached:
        for epoch in range(2):
            for flat, ids in sf.DataLoader(cached, batch_size=20, shuffle=True):
                assert flat.shape == (len(ids), 4096) and (flat == (ids % 256)[:, None]).all()
            cached.cache.tier.flush()
            reads = cached.stats().storage_reads
            if epoch == 0:
                first, made = reads, Flat.made
        assert (reads, Flat.made) == (first, made), "the second epoch has read from the data set"
        assert cached.stats().tier_hits > 0
        used[zlib] = cached.tier.records.stats().resident_bytes
assert used[True] < used[False] / 5, used
"""

EXECUTOR = """
import random
import threading
import warnings
import torch
import stallfree as sf
from stallfree.loader import pool

pool.shares_memory = lambda: False  # as on a system without worker processes
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
alone = epochs(1)
threads = epochs(3)
assert names and all(name.startswith("stallfree-gather-") for name in names), names
assert len(threads) == len(alone) == 16
assert all(torch.equal(*pair) for one, other in zip(threads, alone) for pair in zip(one, other))
assert not any(torch.equal(one[0], other[0]) for one, other in zip(alone[:8], alone[8:]))
"""

PROGRAMS = {"A policy": POLICY, "A sampling plan": PLAN, "A tier": TIER, "An executor": EXECUTOR}


RUNNER = """
import json, os, sys, traceback
import numpy, torch, stallfree.shared
failed = {}
for title, program in json.load(sys.stdin).items():
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            exec(compile(program, title, "exec"), {"__name__": "__main__"})
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        sys.exit()
    os.close(write)
    with os.fdopen(read) as text:
        failed[title] = text.read()
    assert os.wait()[1] == 0, title
print(json.dumps(failed))
"""
"""Runs each program in a fork: imports take longer than the programs."""


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory, store_root: Path) -> dict[str, str]:
    """The traceback of each program, "" for none. The changes touch different files, so one copy serves all."""
    copy = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    for title, text in SHOWN.items():
        command = ["git", "apply", "-"]
        change = subprocess.run(command, cwd=copy, env=outside, input=text, capture_output=True, text=True, check=False)
        assert change.returncode == 0, f"{title}: {change.stderr}"
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        input=json.dumps(PROGRAMS),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(store_root.iterdir()), "a cache was left behind"
    failed: dict[str, str] = json.loads(done.stdout)
    return failed


def test_the_page_shows_all_four() -> None:
    assert list(SHOWN) == list(PROGRAMS)
    touched = [line for text in SHOWN.values() for line in text.splitlines() if line.startswith("+++ ")]
    assert len(set(touched)) == len(touched), "each change is one to the code as it is"


@pytest.mark.parametrize("title", PROGRAMS)
def test_the_change_is_short_and_works(title: str, came: dict[str, str]) -> None:
    assert len(SHOWN[title].splitlines()) < 60
    assert came[title] == "", came[title]
