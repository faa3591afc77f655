"""The changes that docs/extend.md shows apply to the code, and do what the page says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_tools import ROOT, blocks

SHOWN = {block.title: block.text for block in blocks(ROOT / "docs" / "extend.md", "diff")}

IMPORTS = """
import random
import numpy as np
import torch
import stallfree as sf
"""

PROGRAMS = {
    "A policy": """
# 1 leaves for 2 and 2 for 3, since 0 has a hit; then 0 for 4, since its last hit is older than that of 3
trace = [0, 1, 0, 2, 3, 0, 3, 4]
replays = {name: sf.replay(trace, policy=name, capacity=2, batch_size=1) for name in ("reused", "lru")}
assert {name: replay.total.hits for name, replay in replays.items()} == {"reused": 3, "lru": 2}
assert replays["reused"].resident.tolist() == [3, 4]
""",
    "A sampling plan": """
losses = np.random.default_rng(3).permutation(101).astype(np.float32)
sampler = sf.ImportanceSampler(101, plan="top", seed=0)
loader, epochs = sf.DataLoader(range(101), batch_size=8, sampler=sampler), []
for _ in range(2):
    epochs.append([])
    for batch in loader:
        sampler.update(batch.ids, losses[batch.ids])
        epochs[-1] += batch.data.tolist()
assert sorted(epochs[0]) == list(range(101))
assert sorted(epochs[1]) == np.flatnonzero(losses > 50).tolist() != epochs[1]
""",
    "A tier": """
from stallfree.cache.store import CompressedDiskTier
flat, used = [(torch.full((4096,), id % 256, dtype=torch.uint8), id) for id in range(300)], {}
for kind in (CompressedDiskTier, sf.DiskTier):
    with sf.CachedDataset(flat, capacity="256KiB", store=kind(kind.__name__, capacity="4MiB")) as cached:
        reads = []
        for epoch in range(2):
            for values, ids in sf.DataLoader(cached, batch_size=20, shuffle=True):
                assert values.shape == (len(ids), 4096) and (values == (ids % 256)[:, None]).all()
            cached.cache.tier.flush()
            reads.append(cached.stats().storage_reads)
        assert reads[0] == reads[1] and cached.stats().tier_hits > 0, "the second epoch has read from the data set"
        used[kind] = cached.tier.records.stats().resident_bytes
assert used[CompressedDiskTier] < used[sf.DiskTier] / 5, used
""",
    "An executor": """
import os
class Noisy:
    def __len__(self): return 30
    def __getitem__(self, id): return id + torch.rand(5), random.random(), len(os.sched_getaffinity(0))
def epochs(workers):
    loader = sf.DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, num_workers=workers)
    return [batch for _ in range(2) for batch in loader]
cpus = len(os.sched_getaffinity(0))
alone, many = epochs(1), epochs(cpus + 1)
for one, other in zip(alone, many, strict=True):
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
assert {int(count) for batch in alone for count in batch[2]} == {1}
assert {int(count) for batch in many for count in batch[2]} == {cpus}
""",
}


def change(folder: Path, title: str, *options: str) -> None:
    """Apply a change of the page to the code in a folder."""
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", *options, "-"]
    done = subprocess.run(command, cwd=folder, env=outside, input=SHOWN[title], capture_output=True, text=True)
    assert done.returncode == 0, f"{title}: {done.stderr}"


def test_all_four_changes_are_short_and_apply() -> None:
    assert list(SHOWN) == list(PROGRAMS)
    for title, text in SHOWN.items():
        assert len(text.splitlines()) < 40
        change(ROOT, title, "--check")


@pytest.mark.slow
@pytest.mark.parametrize("title", PROGRAMS)
def test_a_change_does_what_the_page_says(title: str, tmp_path: Path, store_root: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    change(tmp_path, title)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-c", IMPORTS + PROGRAMS[title]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert not list(store_root.iterdir()), "a cache was left behind"
