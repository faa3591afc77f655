"""What a user sees of an error: their own frames, the sample, one sentence. No frame of this package."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from loader_data import Made
from warm import Interpreter

MOST_LINES = 24
"""Of which up to 5 are of the tests' own interpreter."""

PACKAGE = str(Path(sf.__file__).parent)

DATA = """
import os, signal, stallfree as sf, torch
class Data:
    def __len__(self):
        return 8
    def __getitem__(self, id):
        if id == 5:
            return read(id)
        return torch.tensor(id)
def read(id):
    return open("/no/such/file")
"""

BAD = {
    "here": "sf.DataLoader(Data())",
    "workers": "sf.DataLoader(Data(), num_workers=2)",
    "cached": "sf.DataLoader(sf.CachedDataset(Data(), capacity='1MiB'))",
    "cached, workers": "sf.DataLoader(sf.CachedDataset(Data(), capacity='1MiB'), num_workers=2)",
    "cached, by itself": "sf.CachedDataset(Data(), capacity='1MiB')",
    "windowed": "sf.DataLoader(sf.SmartCacheDataset(Data(), cache_num=8, replace_rate=0))",
    "group": "sf.SharedLoader(Data(), group='short')",
    "prefetched": "sf.DataLoader(Data(), device='cpu')",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample(kind: str, interpreter: Interpreter) -> None:
    done = interpreter.run(f"{DATA}\ndata = {BAD[kind]}\nwith data:\n    for sample in data:\n        pass\n")
    assert done.code == 1
    lines = done.err.strip().splitlines()
    assert len(lines) <= MOST_LINES, done.err
    assert PACKAGE not in done.err
    assert lines[-1].startswith("stallfree.errors.SampleError: fetching sample 5 failed: FileNotFoundError: ")
    assert "in read" in done.err
    assert "in __getitem__" in done.err


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt(workers: int, interpreter: Interpreter) -> None:
    """The signal goes to the whole group of processes, as from a terminal; without workers, while a sample is read."""
    program = DATA.replace("            return read(id)\n", f"            {workers} or os.killpg(0, signal.SIGINT)\n")
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\nos.setpgid(0, 0)\n"
    program += f"for sample in sf.DataLoader(Data(), num_workers={workers}):\n"
    program += "    if sample == 3:\n        os.killpg(0, signal.SIGINT)\n" if workers else "    pass\n"
    done = interpreter.run(program)
    lines = done.err.strip().splitlines()
    assert lines[-1] == "KeyboardInterrupt"
    assert len(lines) <= 12, done.err
    assert done.err.count("Traceback") == 1
    assert PACKAGE not in done.err


def frames(error: BaseException) -> list[str]:
    return [entry.filename for entry in traceback.extract_tb(error.__traceback__)]


def missing(id: int) -> Any:
    return Path("/no/such/file").read_bytes()


def test_the_cause_stays() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        list(sf.DataLoader(Made(4, missing)))
    cause = caught.value.__cause__
    assert type(cause) is FileNotFoundError
    assert cause.__traceback__ is not None
    assert __file__ in frames(cause)
    for error in (caught.value, cause):
        assert not [file for file in frames(error) if file.startswith(PACKAGE)]


def bad_collate(samples: list[Any]) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "call",
    [
        lambda: sf.DataLoader(Made(4, int), batch_size=0),
        lambda: sf.CachedDataset(Made(4, int), capacity="much"),
        lambda: sf.CachedDataset(Made(4, int), capacity="1MiB", store="redis://localhost"),
        lambda: sf.SmartCacheDataset(Made(4, int), cache_num=0),
        lambda: sf.SharedLoader(Made(4, int), group=""),
        lambda: sf.DataLoader("/data"),
        lambda: sf.DevicePrefetcher([], "gpu"),
        lambda: sf.ImportanceSampler(4).update([9], [1.0]),
        lambda: list(sf.DataLoader(Made(4, int), sampler=[9])),
        lambda: list(sf.DataLoader(Made(4, int), collate_fn=bad_collate)),
    ],
)
def test_wrong_arguments(call: Callable[[], Any]) -> None:
    with pytest.raises((sf.InputError, ZeroDivisionError)) as caught:
        call()
    ours = [file for file in frames(caught.value) if file.startswith(PACKAGE)]
    assert ours == []


def test_a_fault_of_this_package_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stallfree.batches.batch_builder.collate_default", None)
    with pytest.raises(TypeError) as caught:
        list(sf.DataLoader(Made(4, lambda id: "text")))
    assert [Path(file).name for file in frames(caught.value)][-1] == "batch_builder.py"


def test_interrupts_wait_only_in_this_thread() -> None:
    from stallfree.platform import interrupts_later

    with interrupts_later("fork"):
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with interrupts_later("forkserver"):
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
