"""What a user sees of an error: its type and text, their own frames, the sample."""

from __future__ import annotations

import signal

import pytest

from warm import Interpreter

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


def test_interrupts_wait_only_in_this_thread() -> None:
    from stallfree.platform import interrupts_later

    with interrupts_later("fork"):
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with interrupts_later("forkserver"):
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
