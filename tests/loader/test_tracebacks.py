"""What a user sees of an error: their own frames, the sample, one sentence. No frame of this package."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from loader_data import Made
from stallfree.errors import DOCUMENTATION
from warm import Interpreter

PACKAGE = str(Path(sf.__file__).parent)
WRAPPER = [f"{PACKAGE}/frames.py"] if sys.version_info < (3, 11) else []
"""The frames of this package that remain. On 3.10, `raise` ignores that the first entry was taken out."""


def ours(text: str) -> list[str]:
    """The files of this package that `text` names."""
    return re.findall(re.escape(PACKAGE) + r'[^"\s]*', text)


def read(id: int) -> Any:
    return open("/no/such/file")


class Data:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, id: int) -> Any:
        return read(id) if id == 5 else torch.tensor(id)


def cached() -> sf.CachedDataset:
    return sf.CachedDataset(Data(), capacity="1MiB")


MAKE: dict[str, Callable[[], Any]] = {
    "here": lambda: sf.DataLoader(Data()),
    "workers": lambda: sf.DataLoader(Data(), num_workers=2),
    "cached, workers": lambda: sf.DataLoader(cached(), num_workers=2),
    "cached, by itself": cached,
    "windowed": lambda: sf.DataLoader(sf.SmartCacheDataset(Data(), cache_num=8, replace_rate=0)),
    "group": lambda: sf.SharedLoader(Data(), group="short"),
    "prefetched": lambda: sf.DataLoader(Data(), device="cpu"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_bad_sample(kind: str) -> None:
    data = MAKE[kind]()
    with data, pytest.raises(sf.SampleError) as caught:
        for _ in data:
            pass
    text = "".join(traceback.format_exception(caught.value))
    lines = text.strip().splitlines()
    assert len(lines) <= 20, text
    assert ours(text) == WRAPPER
    assert lines[-2].startswith("stallfree.errors.SampleError: fetching sample 5 failed: FileNotFoundError: ")
    assert lines[-1] == f"{DOCUMENTATION}errors/sample-failed/"
    assert "in read" in text
    assert "in __getitem__" in text
    if hasattr(inner := getattr(data, "dataset", None), "close"):
        inner.close()


PROGRAM = """
import os, signal, stallfree as sf, torch
class Data:
    def __len__(self):
        return 8
    def __getitem__(self, id):
        if id == 5:
            {workers} or os.killpg(0, signal.SIGINT)
        return torch.tensor(id)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.setpgid(0, 0)
for sample in sf.DataLoader(Data(), num_workers={workers}):
    if {workers} and sample == 3:
        os.killpg(0, signal.SIGINT)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt(workers: int, interpreter: Interpreter) -> None:
    """The signal goes to the whole group of processes, as from a terminal; without workers, while a sample is read."""
    done = interpreter.run(PROGRAM.format(workers=workers))
    lines = done.err.strip().splitlines()
    assert lines[-1] == "KeyboardInterrupt"
    assert len(lines) <= 12, done.err
    assert done.err.count("Traceback") == 1
    assert ours(done.err) == (WRAPPER if workers == 0 else [])


def frames(error: BaseException) -> list[str]:
    return [entry.filename for entry in traceback.extract_tb(error.__traceback__)]


def test_an_open_that_fails_after_reads_were_recorded(tmp_path: Path) -> None:
    """`open` is replaced from then on. The innermost frame is still that of the user."""
    (path := tmp_path / "file").write_text("1")

    class Files(Data):
        def __getitem__(self, id: int) -> Any:
            return read(id) if id == 5 else torch.tensor(int(path.read_text()))

    with sf.CachedDataset(Files(), capacity="1MiB", form="reads") as data:
        for loader in (sf.DataLoader(data), sf.DataLoader(Data())):
            with loader, pytest.raises(FileNotFoundError) as caught:
                list(loader)
            assert ours("".join(traceback.format_exception(caught.value))) == WRAPPER


def test_the_cause_stays() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        list(sf.DataLoader(Made(4, read)))
    cause = caught.value.__cause__
    assert type(cause) is FileNotFoundError
    assert cause.__traceback__ is not None
    assert __file__ in frames(cause)
    for error, expected in ((caught.value, WRAPPER), (cause, [])):
        assert [file for file in frames(error) if file.startswith(PACKAGE)] == expected


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
    assert [file for file in frames(caught.value) if file.startswith(PACKAGE)] == WRAPPER


def test_a_fault_of_this_package_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stallfree.batches.batch_builder.collate_default", None)
    cached = sf.CachedDataset(Made(4, lambda id: "text"), capacity="1MiB")
    with cached, pytest.raises(TypeError) as caught:
        list(sf.DataLoader(cached))
    assert [Path(file).name for file in frames(caught.value)][-1] == "batch_builder.py"


def test_interrupts_wait_only_in_this_thread() -> None:
    from stallfree.platform import interrupts_later

    with interrupts_later("fork"):
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with interrupts_later("forkserver"):
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
