"""A shuffled loader on several ranks is spoken of, and refused where a library was trusted to deal samples out."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

from stallfree.errors import InputError
from stallfree.loader.same_order import check_same_order
from stallfree.pipeline import StallfreeWarning


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of 4."""
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(variable, value)


def accelerated(monkeypatch: pytest.MonkeyPatch, state: dict[str, int]) -> None:
    stand_in = SimpleNamespace(PartialState=type("PartialState", (), {"_shared_state": state}))
    monkeypatch.setitem(sys.modules, "accelerate.state", stand_in)  # type: ignore[arg-type]


def test_one_rank() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same_order()


@pytest.mark.usefixtures("ranks")
def test_several_ranks() -> None:
    with pytest.warns(StallfreeWarning, match="each of the 4 ranks gets all samples.*sampler=.*DistributedSampler"):
        check_same_order()


@pytest.mark.usefixtures("ranks")
def test_under_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerated(monkeypatch, {"num_processes": 4})
    with pytest.raises(InputError, match=r"Accelerator\.prepare leaves a stallfree\.DataLoader as it is.*Distributed"):
        check_same_order()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("state", [{}, {"num_processes": 1}])
def test_accelerate_without_processes(monkeypatch: pytest.MonkeyPatch, state: dict[str, int]) -> None:
    accelerated(monkeypatch, state)
    with pytest.warns(StallfreeWarning, match="4 ranks"):
        check_same_order()
