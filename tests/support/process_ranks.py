"""Ranks of one job, each a forked process."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from children import Child

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)


def join(rank: int, count: int, folder: Path) -> None:
    """Join the process group of the ranks.

    It ends with the processes: `destroy_process_group` of torch 2.4 may wait for a thread that needs the GIL.
    """
    where, limit = f"file://{folder / 'meet'}", timedelta(seconds=30)
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=count, timeout=limit)


def in_ranks(count: int, folder: Path, run: Callable[[int], Any]) -> list[Any]:
    """What `run(rank)` gives in each rank, fit for JSON. The ranks know neither each other nor their number."""

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        for variable in VARIABLES:
            os.environ.pop(variable, None)
        (folder / f"{rank}.json").write_text(json.dumps(run(rank)))

    assert [child.wait() for child in [Child(main, rank) for rank in range(count)]] == [0] * count
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
