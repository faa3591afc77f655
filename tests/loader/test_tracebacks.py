"""What a user sees of an error: its type and text, their own frames, the sample."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from warm import Interpreter


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
    "process": lambda: sf.DataLoader(Data(), num_workers=1, device="cpu"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_bad_sample(kind: str) -> None:
    data = MAKE[kind]()
    with data, pytest.raises(FileNotFoundError) as caught:
        for _ in data:
            pass
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("FileNotFoundError: ") == 1, text  # no chain of errors
    assert text.count("stallfree: fetching sample 5") == 1
    assert text.count("in read\n") == 1
    assert caught.value.__cause__ is caught.value.__context__ is None
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
    assert done.err.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert done.err.count("Traceback") == 1, done.err


def test_an_open_that_fails_while_files_are_cached(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_text("1")

    class Files(Data):
        def __getitem__(self, id: int) -> Any:
            return read(id) if id == 5 else torch.tensor(int(path.read_text()))

    with sf.CachedDataset(Files(), capacity="1MiB", form="files") as data:
        for loader in (sf.DataLoader(data), sf.DataLoader(Data())):
            with loader, pytest.raises(FileNotFoundError, match="fetching sample 5") as caught:
                list(loader)
            assert caught.value.filename == "/no/such/file"


def test_interrupts_wait_only_in_this_thread() -> None:
    from stallfree.platform import interrupts_later

    with interrupts_later("fork"):
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with interrupts_later("forkserver"):
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
