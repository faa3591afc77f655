"""Everyday training code on a GPU, with stallfree in the place of torch's loader. Nothing here runs without a GPU."""

from __future__ import annotations

import gc
import io
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from process_tools import PATIENCE, gone, wait_for
from torch import nn
from torch.utils.data import RandomSampler

import stallfree as sf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(90),
]

SAMPLES, BATCH = 192, 32

IN_ORDER = [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]
"""Numbers of the samples of an epoch that is not shuffled."""

LARGE = 300_000
"""Elements of a tensor that has a copy of its own."""

MILLISECOND = 1_000_000
"""Cycles of `torch.cuda._sleep`, about."""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Replaces the fixture of all tests: the driver opens descriptors and keeps them."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("stallfree"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"the test left the thread {thread.name} behind"


class Pictures(torch.utils.data.Dataset[Any]):
    """Pictures filled with their number, and that number. The pictures of a batch have a copy of their own."""

    def __init__(self, count: int = SAMPLES, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        if id == self.bad:
            raise FileNotFoundError(2, f"no picture {id}")
        return torch.full((3, 64, 64), id % 251, dtype=torch.uint8), id


def wrong(pictures: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Whether a batch on the GPU has wrong values; the answer stays there. Needs memory for one more batch."""
    return torch.any(pictures != (ids % 251).to(pictures.dtype).view(-1, 1, 1, 1))


def ids_of(batches: Iterable[Any], end: int | None = None) -> list[list[int]]:
    """Return the numbers of each batch, which must be on the GPU and complete; break after `end` batches."""
    found: list[list[int]] = []
    for pictures, ids in batches:
        assert pictures.device.type == ids.device.type == "cuda"
        assert wrong(pictures, ids).item() == 0
        found.append(ids.tolist())
        if len(found) == end:
            break
    return found


def each_once(*batches: list[int], count: int = SAMPLES) -> bool:
    """Whether each sample is in the batches once."""
    return sorted(itertools.chain(*batches)) == list(range(count))


def output_of(program: str, **environment: str) -> list[str]:
    """Return the words that a program prints."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# -- in the place of torch's loader -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_training_loop_sends_the_batches(workers: int, pin: bool) -> None:
    """The copies run late, when the loop has no reference to the host's batch."""
    ours = sf.DataLoader(Pictures(), BATCH, num_workers=workers, pin_memory=pin)
    theirs = torch.utils.data.DataLoader(Pictures(), BATCH, num_workers=workers, pin_memory=pin)
    sent = []
    for batch, other in zip(ours, theirs, strict=True):
        assert type(batch) is type(other)
        assert [part.is_pinned() for part in batch] == [part.is_pinned() for part in other] == [pin, pin]
        torch.cuda._sleep(10 * MILLISECOND)
        sent.append([part.to("cuda", non_blocking=True) for part in batch])
        del batch
    assert ids_of(sent) == IN_ORDER


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_workers_are_forked_after_the_gpu_was_used(device: str | None, persistent: bool) -> None:
    assert torch.ones(8, device="cuda").sum().item() == 8
    options: dict[str, Any] = {"persistent_workers": persistent, "multiprocessing_context": "fork", "pin_memory": True}
    with sf.DataLoader(Pictures(), BATCH, num_workers=2, device=device, **options) as loader:
        for _ in range(4):
            assert ids_of([part.to("cuda") for part in batch] for batch in loader) == IN_ORDER


class Numbers(torch.utils.data.Dataset[Any]):
    """Inputs and targets of a regression."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.inputs, self.targets = torch.randn(512, 64, generator=rng), torch.randn(512, 1, generator=rng)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[id], self.targets[id]


def train(batches: Iterable[Any]) -> torch.Tensor:
    """Train a network with dropout for two epochs; returns its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 1)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs.to("cuda")), targets.to("cuda"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("workers", [0, 2])
def test_losses_are_those_of_torchs_loader(workers: int) -> None:
    """The random numbers of dropout are the same, too. The order is that of torch's sampler."""
    data = Numbers()
    samplers = [RandomSampler(data, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    theirs = train(torch.utils.data.DataLoader(data, BATCH, sampler=samplers[0], num_workers=workers))
    with sf.DataLoader(data, BATCH, sampler=samplers[1], num_workers=workers, device="cuda") as loader:
        ours = train(loader)
    assert len(ours) == 2 * 512 // BATCH
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_shuffled_epochs_are_complete_and_follow_from_the_generator() -> None:
    def epochs() -> list[list[list[int]]]:
        seed = torch.Generator().manual_seed(5)
        options: dict[str, Any] = {"shuffle": True, "generator": seed, "device": "cuda"}
        with sf.DataLoader(Pictures(), BATCH, num_workers=2, **options) as loader:
            return [ids_of(loader) for _ in range(2)]

    first, second = epochs()
    assert each_once(*first)
    assert each_once(*second)
    assert first != second
    assert epochs() == [first, second]


class Pair(NamedTuple):
    """A part of a sample."""

    input: Any
    name: Any


def nested(id: int) -> dict[str, Any]:
    """Return a sample with parts of many types."""
    pair = Pair(torch.full((3,), id, dtype=torch.int16), f"sample {id}")
    inner = {"weight": id / 4, "list": [id, torch.tensor(id % 2 == 0)], "empty": torch.empty(0)}
    return {"id": id, "pair": pair, "inner": inner, "tuple": (b"bytes", torch.full((64, 64), float(id)))}


def collated(samples: list[Any]) -> tuple[Any, ...]:
    """Return a batch with values that are no tensors."""
    batch = torch.utils.data.default_collate([{**sample, "tuple": sample["tuple"][1]} for sample in samples])
    return batch, len(samples), None, "text", {"ids": [sample["id"] for sample in samples]}


def check_alike(ours: Any, theirs: Any) -> None:
    """Compare a batch on the GPU with one of torch's loader."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.device.type, ours.stride()) == ("cuda", theirs.stride())
        torch.testing.assert_close(ours, theirs.to("cuda"), rtol=0, atol=0)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        check_alike(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, list | tuple):
        for part, other in zip(ours, theirs, strict=True):
            check_alike(part, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("collate", [None, collated])
@pytest.mark.parametrize("workers", [0, 2])
def test_nested_batches_are_those_of_torchs_loader(workers: int, collate: Any) -> None:
    data = [nested(id) for id in range(50)]
    theirs: Any = torch.utils.data.DataLoader(data, 8, collate_fn=collate)  # type: ignore[arg-type]
    with sf.DataLoader(data, 8, collate_fn=collate, num_workers=workers, device="cuda") as loader:
        for ours, other in zip(loader, theirs, strict=True):
            check_alike(ours, other)


# -- the model --------------------------------------------------------------------------------------------------------


def test_mixed_precision_and_batches_that_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, SAMPLES))
    model.to("cuda")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cuda")
    kept, losses = [], []
    with sf.DataLoader(Pictures(), BATCH, num_workers=2, device="cuda", persistent_workers=True) as loader:
        for _ in range(4):
            for pictures, ids in loader:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(pictures.float() / 255), ids)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.detach())
                kept.append((pictures, ids))
    assert ids_of(kept) == 4 * IN_ORDER
    assert torch.stack(losses).isfinite().all()


def test_labels_may_be_changed_before_the_backward_pass() -> None:
    """Small images and labels share memory on the GPU, but not the counter of changes that autograd checks."""
    batches = [(torch.full((4, 3, 8, 8), float(number)), torch.full((4,), number)) for number in range(50)]
    for number, (images, labels) in enumerate(sf.DevicePrefetcher(batches, "cuda")):
        weight = torch.ones(3, 1, 1, device="cuda", requires_grad=True)
        loss = (images * weight).sum()
        labels += 1
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.flatten().tolist() == 3 * [4.0 * 64 * number]
        assert labels.tolist() == 4 * [number + 1]


def test_a_validation_in_inference_mode_precedes_training() -> None:
    loader = sf.DataLoader(Numbers(), BATCH, num_workers=2)
    prefetcher = sf.DevicePrefetcher(loader, "cuda")
    with torch.inference_mode():
        total = sum(float(targets.double().sum()) for _, targets in prefetcher)
    assert total == pytest.approx(float(Numbers().targets.double().sum()))
    assert train(prefetcher).isfinite().all()
    prefetcher.close()


def test_a_validation_in_mid_epoch() -> None:
    validation = Pictures(80)
    with (
        sf.DataLoader(Pictures(), BATCH, num_workers=2, device="cuda") as loader,
        sf.DataLoader(validation, BATCH, num_workers=2, device="cuda", persistent_workers=True) as other,
    ):
        found = []
        for batch in loader:
            torch.cuda._sleep(MILLISECOND)
            assert each_once(*ids_of(other), count=80)
            found += ids_of([batch])
    assert found == IN_ORDER


def test_a_graph_is_captured_while_batches_are_copied() -> None:
    captures, asked = threading.Event(), []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(12):
            asked.append(number)
            yield torch.full((LARGE,), float(number))
            captures.wait(10)

    static = torch.zeros(LARGE, device="cuda")
    (static * 2).sum()  # loads the kernels
    iteration = iter(sf.DevicePrefetcher(batches(), "cuda", depth=8))
    first = next(iteration)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captures.set()
        doubled = static * 2
        wait_for(lambda: len(asked) > 5, "batches 1 to 4 to be copied")
        total = doubled.sum()
    sums = []
    for batch in itertools.chain([first], iteration):
        static.copy_(batch)
        graph.replay()
        sums.append(total.clone())
    assert torch.stack(sums).tolist() == [2.0 * LARGE * number for number in range(12)]


def test_the_allocator_of_the_driver() -> None:
    program = """
    import torch, stallfree as sf
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    batches = [{"x": torch.full((300_000,), i % 251, dtype=torch.uint8), "y": torch.full((64,), i)} for i in range(300)]
    for _ in range(2):
        bad, kept = torch.zeros((), dtype=torch.int64, device="cuda"), []
        both = lambda b: b | {"z": b["x"].float()}
        for i, batch in enumerate(sf.DevicePrefetcher(batches, "cuda", transform_on_device=both)):
            torch.cuda._sleep(50_000)
            bad += (batch["x"] != i % 251).sum() + (batch["y"] != i).sum() + (batch["z"] != i % 251).sum()
            kept = [*kept, (i, batch)][-20:]
        for i, batch in kept:
            bad += (batch["x"] != i % 251).sum() + (batch["y"] != i).sum() + (batch["z"] != i % 251).sum()
        print(int(bad), i)
    """
    assert output_of(program, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync") == ["0", "299", "0", "299"]


# -- epochs that do not go to their end -------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_that_are_broken_off_leave_no_memory(persistent: bool) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with sf.DataLoader(Pictures(), BATCH, num_workers=2, device="cuda", persistent_workers=persistent) as loader:
        for end in [1, 2, 3, 5] * 5:
            assert ids_of(loader, end) == IN_ORDER[:end]
        assert ids_of(loader) == IN_ORDER
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 10 * BATCH * 3 * 64 * 64


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_sample_has_its_type_and_the_epoch_goes_on(workers: int) -> None:
    with sf.DataLoader(Pictures(bad=70), BATCH, num_workers=workers, device="cuda") as loader:
        for _ in range(2):
            iteration = iter(loader)
            assert ids_of(iteration, 2) == IN_ORDER[:2]
            with pytest.raises(FileNotFoundError, match="no picture 70") as caught:
                next(iteration)
            assert "sample 70" in caught.value.__notes__[0]
            assert ids_of(iteration) == IN_ORDER[3:]
            del caught


def test_an_error_of_the_transform_on_the_device_has_its_type_and_the_epoch_goes_on() -> None:
    broken = True

    def transform(batch: Any) -> Any:
        pictures, ids = batch
        if broken and ids[0].item() == IN_ORDER[2][0]:
            raise ValueError("no such layer")
        return pictures.float(), ids

    with sf.DataLoader(Pictures(), BATCH, num_workers=2) as loader:
        prefetcher = sf.DevicePrefetcher(loader, "cuda", transform_on_device=transform)
        iteration = iter(prefetcher)
        assert ids_of(iteration, 2) == IN_ORDER[:2]
        with pytest.raises(ValueError, match="no such layer"):
            next(iteration)
        assert ids_of(iteration) == IN_ORDER[3:]
        broken = False
        assert ids_of(prefetcher) == IN_ORDER
        prefetcher.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_mid_epoch_leaves_the_rest_of_the_samples(workers: int) -> None:
    def make() -> sf.DataLoader[Any]:
        return sf.DataLoader(Pictures(), BATCH, shuffle=True, num_workers=workers, device="cuda")

    file = io.BytesIO()
    with make() as loader, make() as other:
        iteration = iter(loader)
        before = ids_of(iteration, 2)
        torch.save(loader.state_dict(), file)
        after = ids_of(iteration)
        file.seek(0)
        other.load_state_dict(torch.load(file))
        assert ids_of(other) == after
        assert ids_of(other) == ids_of(loader)  # the next epoch
    assert len(before) == 2
    assert each_once(*before, *after)


# -- caches and several processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_later_epochs_come_from_a_cache(workers: int) -> None:
    with (
        sf.CachedDataset(Pictures(), capacity="32MiB") as cached,
        sf.DataLoader(cached, BATCH, shuffle=True, num_workers=workers, device="cuda") as loader,
    ):
        reads, hits = [], []
        for _ in range(3):
            assert each_once(*ids_of(loader))
            reads.append(cached.stats().storage_reads)
            hits.append(cached.stats().hits)
    assert reads[1:] == [reads[0], reads[0]]
    assert hits[2] - hits[0] == 2 * SAMPLES


def take_shared() -> list[list[list[int]]]:
    """Return three epochs of a group."""
    with sf.SharedLoader(Pictures(), group="gpu", batch_size=BATCH, shuffle=True, num_workers=2, seed=3) as loader:
        prefetcher = sf.DevicePrefetcher(loader, "cuda")
        epochs = [ids_of(prefetcher) for _ in range(3)]
        prefetcher.close()
    return epochs


def answer_shared(connection: Connection) -> None:
    """The main function of the second job."""
    torch.ones(8, device="cuda").sum().item()
    connection.send("ready")
    connection.send(take_shared())


def test_two_jobs_share_a_loader_and_a_gpu() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    other = context.Process(target=answer_shared, args=(theirs,))
    other.start()
    theirs.close()
    assert ours.recv() == "ready"
    for epoch in take_shared() + ours.recv():
        assert each_once(*epoch)
    other.join(PATIENCE)
    assert other.exitcode == 0
    ours.close()


def make_loader() -> Any:
    """The loader of a separate process."""
    return sf.DataLoader(Pictures(9600), BATCH, num_workers=2, multiprocessing_context="fork")


def test_the_process_that_loads_is_killed() -> None:
    with sf.ProcessPrefetcher(make_loader, "cuda") as prefetcher:
        iteration = iter(prefetcher)
        assert ids_of(iteration, 3) == IN_ORDER[:3]
        workers = psutil.Process(prefetcher.pid).children()
        os.kill(prefetcher.pid, signal.SIGKILL)
        wait_for(lambda: gone(prefetcher.pid), "the process to die")
        begun = time.monotonic()
        with pytest.raises(sf.ProducerError, match="has ended by signal 9"):
            deque(iteration, 0)
        assert time.monotonic() - begun < 10
        wait_for(lambda: all(gone(worker.pid) for worker in workers), "its workers to end")
        assert len(workers) == 2
    assert torch.ones(8, device="cuda").sum().item() == 8


def test_the_process_that_loads_is_closed_while_the_gpu_works() -> None:
    with sf.ProcessPrefetcher(make_loader, "cuda") as prefetcher:
        iteration = iter(prefetcher)
        assert ids_of(iteration, 3) == IN_ORDER[:3]
        pictures, ids = next(iteration)
        torch.cuda._sleep(500 * MILLISECOND)
        bad = wrong(pictures, ids)
        begun = time.monotonic()
        prefetcher.close()
        assert time.monotonic() - begun < 10
        assert bad.item() == 0
        assert gone(prefetcher.pid)
    assert torch.ones(8, device="cuda").sum().item() == 8


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="there is no NCCL")
def test_a_job_of_one_rank_with_nccl(tmp_path: Path) -> None:
    program = f"""
    import torch, torch.distributed as dist, stallfree as sf
    from torch.utils.data import DataLoader, DistributedSampler
    dist.init_process_group("nccl", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
    torch.cuda.set_device(0)
    dist.all_reduce(torch.ones(1, device="cuda"))  # makes the communicator
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1).to("cuda"))
    data, common = list(range(100)), dict(num_workers=2, device="cuda", multiprocessing_context="fork")
    sampler = DistributedSampler(data)
    with sf.DataLoader(data, 8, sampler=sampler, **common) as ours:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected = [batch.tolist() for batch in DataLoader(data, 8, sampler=sampler)]
            found = []
            for batch in ours:
                model(batch.view(-1, 1).float()).sum().backward()
                found.append(batch.tolist())
            assert found == expected
    with sf.DataLoader(data, 8, shuffle=True, ranks="auto", **common) as ours:
        for epoch in range(2):
            assert sorted(id for batch in ours for id in batch.tolist()) == data
    print("ended")
    """
    assert output_of(program) == ["ended"]


# -- measurements -----------------------------------------------------------------------------------------------------


def test_the_analysis_of_a_job_that_the_gpu_limits() -> None:
    def step(batch: Any) -> None:
        torch.cuda._sleep(30 * MILLISECOND)
        batch[0].to("cuda")

    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(10):
        torch.cuda._sleep(30 * MILLISECOND)
    torch.cuda.synchronize()
    seconds = (time.monotonic() - begun) / 10
    options: dict[str, Any] = {"device": "cuda", "seconds": 0.4, "progress": False}
    report = sf.analyze(Pictures(), step, batch_size=BATCH, num_workers=2, **options)
    assert report.data["rates"]["G"]["value"] == pytest.approx(BATCH / seconds, rel=0.3)
    shares = report.data["shares"]["warm"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["compute"] > 0.5
    assert "copy" in report.data["rates"]
    assert str(report)


def test_a_script_that_the_gpu_limits_is_timed(tmp_path: Path) -> None:
    program = """
    import torch, stallfree as sf
    loader = sf.DataLoader(list(range(320)), 8, device="cuda")
    for batch in loader:
        torch.cuda._sleep(20_000_000)
        batch.sum().item()
    """
    script, waits = tmp_path / "train.py", tmp_path / "waits.json"
    script.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "stallfree", "run", "--json", str(waits), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found = json.loads(waits.read_text())
    (row,) = found["loaders"]
    assert (row["batches"], row["samples"]) == (40, 320)
    assert 0 <= row["stall_share"] < 0.5
