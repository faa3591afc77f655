"""A loader that gives all samples to each of several ranks says so, and others do not."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import stallfree as sf
from stallfree import StallfreeWarning

DATA: Any = range(8)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of 4."""
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("MASTER_PORT", "4716")):
        monkeypatch.setenv(variable, value)


def windowed() -> sf.SmartCacheDataset:
    return sf.SmartCacheDataset(DATA, None, cache_num=4, replace_rate=0.5)


ALL_TO_EACH: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "in order": (dict, r"ranks='auto'.*ranks=\(0, 1\)"),
    "shuffled": (lambda: {"shuffle": True}, r"ranks='auto'.*ranks=\(0, 1\)"),
    "RandomSampler": (lambda: {"sampler": RandomSampler(DATA)}, "DistributedSampler in place of the sampler"),
    "BatchSampler": (lambda: {"batch_sampler": BatchSampler(SequentialSampler(DATA), 2, False)}, "DistributedSampler"),
    "window": (lambda: {"dataset": windowed()}, r"all samples of the window.*sampler=dataset\.rank_sampler\(\)"),
}
DEALT: dict[str, Callable[[], dict[str, Any]]] = {
    "ranks": lambda: {"ranks": "auto", "seed": 1},
    "all are meant": lambda: {"ranks": (0, 1)},
    "all are meant, with a sampler": lambda: {"ranks": (0, 1), "sampler": RandomSampler(DATA)},
    "DistributedSampler": lambda: {"sampler": DistributedSampler(DATA, 4, 1)},
    "in a BatchSampler": lambda: {"batch_sampler": BatchSampler(DistributedSampler(DATA, 4, 1), 2, False)},
    "ids of the user's own": lambda: {"sampler": [4, 5]},
    "ImportanceSampler": lambda: {"sampler": sf.ImportanceSampler(len(DATA)), "batch_size": 2},
    "window": lambda: {"dataset": (data := windowed()), "sampler": data.rank_sampler()},
}


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("case", ALL_TO_EACH)
def test_a_warning_names_the_cure(case: str) -> None:
    make, cure = ALL_TO_EACH[case]
    options = {"dataset": DATA, **make()}
    with (
        sf.DataLoader(**options) as loader,
        pytest.warns(StallfreeWarning, match=f"each of the 4 ranks.*{cure}") as seen,
    ):
        iter(loader)
    assert seen[0].filename == __file__
    close(options)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("case", DEALT)
def test_no_false_warning(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "ImportanceSampler":  # knows its ranks by torch.distributed
        monkeypatch.delenv("RANK"), monkeypatch.delenv("WORLD_SIZE"), monkeypatch.delenv("LOCAL_WORLD_SIZE")
    options = {"dataset": DATA, **DEALT[case]()}
    with warnings.catch_warnings(), sf.DataLoader(**options) as loader:
        warnings.simplefilter("error", StallfreeWarning)
        assert list(loader)
    close(options)


def test_one_rank() -> None:
    with warnings.catch_warnings(), sf.DataLoader(DATA, shuffle=True) as loader:
        warnings.simplefilter("error")
        assert len(list(loader)) == len(DATA)


def close(options: dict[str, Any]) -> None:
    if isinstance(options["dataset"], sf.SmartCacheDataset):
        options["dataset"].close()


def test_without_accelerate_a_loader_needs_no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.accelerator", raising=False)
    assert sf.DataLoader(DATA)._is_accelerate_prepared
