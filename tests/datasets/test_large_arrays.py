"""A data set or a step over a large array or mapping: its bytes are neither read nor copied beyond what samples use."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from children import Child

SIZE, MIB = 128 << 20, 1 << 20
COUNT = 128


class Tokens(torch.utils.data.Dataset[Any]):
    """Windows of a long array, all within its first MiB."""

    def __init__(self, data: Any, transform: Any = None) -> None:
        self.data, self.transform = data, transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        window = torch.from_numpy(self.data[4000 * id : 4000 * id + 256].astype(np.int64))
        return window if self.transform is None else self.transform(window)


class Lookup:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self, window: torch.Tensor) -> torch.Tensor:
        return window + int(self.data[int(window[0])])


cached = partial(sf.CachedDataset, capacity="8MiB")
CASES: dict[str, Callable[[Any], Any]] = {
    "no cache": lambda data: sf.DataLoader(Tokens(data), 8),
    "CachedDataset": lambda data: sf.DataLoader(cached(Tokens(data)), 8, num_workers=1),
    "auto": lambda data: sf.DataLoader(Tokens(data), 8, cache="auto", capacity="8MiB"),
    "auto, an attribute": lambda data: sf.DataLoader(Tokens(data, Lookup(data)), 8, cache="auto", capacity="8MiB"),
    "SharedLoader": lambda data: sf.SharedLoader(Tokens(data), group="large", batch_size=32, num_workers=1),
    "SmartCacheDataset": lambda data: sf.DataLoader(sf.SmartCacheDataset(Tokens(data), cache_num=64), 8),
    "a step": lambda data: sf.DataLoader(cached(Tokens(data), transform=Lookup(data)), 8),
}


def mapped(path: Path) -> int:
    """Bytes of a file that this process has in memory."""
    found = re.findall(rf"{re.escape(str(path))}\n.*?Rss:\s+(\d+)", Path("/proc/self/smaps").read_text(), re.DOTALL)
    return 1024 * sum(map(int, found))


def peak() -> int:
    """The most memory of this process since it was cleared."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def use(make: Callable[[Any], Any], path: Path, in_memory: bool) -> None:
    data: Any = np.memmap(path, np.uint16, "r")
    if in_memory:
        data = np.ones(SIZE // 2, np.uint16)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    loader = make(data)
    for _ in range(2):
        assert sum(1 for _ in loader) > 1
    loader.close()
    if hasattr(loader.dataset, "close"):
        loader.dataset.close()
    assert mapped(path) < SIZE / 4
    assert peak() - before < SIZE / 2


@pytest.mark.parametrize(
    ("case", "in_memory"), [*((case, False) for case in CASES), ("no cache", True), ("CachedDataset", True)]
)
def test_the_bytes_of_a_large_array_are_left_alone(case: str, in_memory: bool, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with open(path, "wb") as file:
        file.truncate(SIZE)
    assert Child(use, CASES[case], path, in_memory).wait() == 0
