"""Losses come in by id, in order, from any device, and the training loop never waits for them."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stallfree as sf
from stallfree.importance import losses as module
from stallfree.importance.losses import Losses

to_host = module._to_host


class Event:
    """Something that a device does. Nobody may wait for it but where `allowed`."""

    allowed = done = recorded = False

    def __init__(self, copies: list[Any]) -> None:
        self.copies = copies

    def record(self, stream: object) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded
        return self.done

    def synchronize(self) -> None:
        assert self.allowed, "somebody waits for the device"
        self.finish()

    def finish(self) -> None:
        for host, values in self.copies:
            host.copy_(values)
        self.done = True


def where(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Copies:
    """A device of which a test decides what it has done. Its tensors have no values: those are kept here."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.waiting: list[Any] = []
        self.events: list[Event] = []

    def put(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        there = torch.empty(len(values), dtype=dtype, device="meta")
        self.values[where(there)] = torch.as_tensor(values, dtype=dtype), there
        return there

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return to_host(tensor)
        host = torch.full(tensor.shape, -1, dtype=tensor.dtype)  # nothing has arrived yet
        self.waiting.append((host, self.values[where(tensor)][0]))
        return host

    def event(self) -> Event:
        self.events.append(Event(self.waiting))
        self.waiting = []
        return self.events[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Copies:
    copies = Copies()
    monkeypatch.setattr(module, "_to_host", copies.to_host)
    module_of_device = SimpleNamespace(Event=copies.event, current_stream=lambda device: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module_of_device)
    return copies


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("ids_too", [False, True])
def test_update_on_a_gpu(ids_too: bool) -> None:
    """CUDA itself says whether something waits."""
    sampler = sf.ImportanceSampler(6400)
    told = torch.rand(6400)
    parts = [(ids.cuda() if ids_too else ids, told[ids].cuda()) for ids in torch.arange(6400).split(64)]
    sampler.update(*parts[0])
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids, losses in parts:
            sampler.update(ids, losses)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    sampler.plan(0)
    assert sampler.losses.last.tolist() == told.tolist()


def test_a_wrong_id_on_the_device_is_found_later_and_harms_nothing_else(device: Copies) -> None:
    losses = Losses(5)
    losses.add(device.put([1, 5], torch.int64), device.put([1.0, 1.0], torch.float32))
    losses.add(device.put([2], torch.int64), device.put([2.0], torch.float32))
    device.events[0].finish(), device.events[1].finish()
    with pytest.raises(sf.InputError, match="the id 5: ids are 0 to 4"):
        losses.collect()
    losses.collect()
    assert losses.last[2] == 2.0
    assert np.isinf(losses.last[[0, 1, 3, 4]]).all()


def test_update_does_not_wait_for_the_device_and_the_last_loss_counts_in_the_order_of_the_steps(device: Copies) -> None:
    losses, ids = Losses(5), torch.arange(2)
    losses.add(ids, device.put([1.0, 1.0], torch.float32))
    ids += 3  # a copy was taken
    losses.add([1, 2], [2.0, 2.0])  # on the CPU, and has to queue up all the same
    losses.add(device.put([2, 3], torch.int64), device.put([3.0, 3.0], torch.float32))
    device.events[1].finish()
    losses.collect(wait=False)
    assert np.isinf(losses.last).all()
    device.events[0].finish()
    losses.collect(wait=False)
    assert losses.last.tolist() == [1.0, 2.0, 3.0, 3.0, np.inf]


def test_a_state_has_what_is_still_under_way(device: Copies) -> None:
    sampler = sf.ImportanceSampler(20)
    sampler.update(device.put(range(20), torch.int64), device.put([3.0] * 20, torch.float32))
    device.events[0].allowed = True
    other = sf.ImportanceSampler(20)
    other.load_state_dict(sampler.state_dict())
    assert set(other.losses.last.tolist()) == {3.0}


@pytest.mark.filterwarnings("ignore:update was given NaN")
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(width=32)), max_size=30), st.integers(1, 5))
def test_the_table_holds_the_last_loss_of_each(told: list[tuple[int, float]], size: int) -> None:
    losses, model = Losses(10), [np.inf] * 10
    for at in range(0, len(told), size):
        ids, values = zip(*told[at : at + size], strict=True)
        losses.add(list(ids), list(values))
        for id, value in zip(ids, values, strict=True):
            model[id] = value if np.isfinite(value) else model[id]
    assert losses.last.tolist() == model
    known = {id for id, value in told if np.isfinite(value)}
    assert losses.fresh.tolist() == [id in known for id in range(10)]


KINDS: dict[str, Callable[[list[float]], Any]] = {
    "bfloat16": lambda values: torch.tensor(values, dtype=torch.bfloat16),
    "with a gradient": lambda values: torch.tensor(values, requires_grad=True) * 1,
    "numpy, read-only": lambda values: np.broadcast_to(np.array(values), len(values)),
    "tensors": lambda values: [torch.tensor(value, requires_grad=True) for value in values],
    "a part of a tensor": lambda values: torch.tensor([values, values]).T[:, 0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_any_kind(kind: str) -> None:
    sampler = sf.ImportanceSampler(6)
    sampler.update(torch.tensor([5, 0, 3]), KINDS[kind]([4.0, 2.0, 7.0]))
    assert sampler.losses.last.tolist() == [2.0, np.inf, np.inf, 7.0, np.inf, 4.0]
    assert sampler.losses.last.dtype == np.float32


def test_a_loss_that_is_no_number_is_left_out() -> None:
    """A step in half precision may overflow: the sample keeps the loss it had, and training goes on."""
    sampler = sf.ImportanceSampler(6, plan="icache")
    sampler.update(np.arange(6), np.arange(6.0))
    with pytest.warns(sf.StallfreeWarning, match=r"NaN or infinite losses, first those of the samples 2: these"):
        sampler.update([1, 2, 3], [7.0, np.inf, 9.0])
    with warnings.catch_warnings(action="error"):
        sampler.update([2], [np.nan])
    assert sampler.losses.last.tolist() == [0.0, 7.0, 2.0, 9.0, 4.0, 5.0]
    assert len(sampler.plan(1).ids) > 0
