"""The examples of distributed training under torchrun: each sample on one rank in each epoch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(ranks: int, example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(EXAMPLES / example), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, timeout=200, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.slow
def test_each_sample_on_one_rank(tmp_path: Path, store_root: Path) -> None:
    done = torchrun(2, "ddp.py", tmp_path)
    orders = set()
    for epoch in range(3):
        ranks = [[int(id) for id in (tmp_path / f"epoch-{epoch}-rank-{rank}").read_text().split()] for rank in range(2)]
        assert [len(ids) for ids in ranks] == [48, 48]
        assert sorted(ranks[0] + ranks[1]) == list(range(96))
        orders.add(tuple(ranks[0]))
    assert len(orders) == 3
    reads = [int(count) for count in re.findall(r"48 of 96 samples on this rank, (\d+) read for all", done.stdout)]
    assert 96 <= reads[0] <= 96 + 2 * 8  # each rank looks at eight samples first
    assert reads == reads[:1] * 3  # and the cache has all for both
    assert not list(store_root.iterdir())


@pytest.mark.slow
def test_an_epoch_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """30 of 90 samples by 2 ranks, the other 60 by 3: each once."""
    assert "30 of 90 samples used so far, 0 twice" in torchrun(2, "elastic.py", tmp_path, 3).stdout
    assert "90 of 90 samples used so far, 0 twice" in torchrun(3, "elastic.py", tmp_path).stdout
    used = [int(id) for file in tmp_path.glob("samples-*") for id in file.read_text().split()]
    assert sorted(used) == list(range(90))
    assert len(list(tmp_path.glob("samples-*"))) == 5
