"""Functions that run in the processes of the tests of `stallfree.ipc.process`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from stallfree.ipc.process import Child, Parent


def echo(parent: Parent, count: int) -> None:
    """Report in, and return the given number of messages; with a negative number, all until the end."""
    left, ended = [count], threading.Event()

    def take(message: bytearray | None) -> None:
        if message is not None and left[0]:
            left[0] -= 1
            parent.send(b"<", message, memoryview(b">"))
        if message is None or not left[0]:
            ended.set()

    parent.listen(take)
    parent.report()
    if count:
        ended.wait()


def identify(parent: Parent) -> None:
    """Send properties of this process."""
    interrupted = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ended = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    parent.send(repr((os.getpid(), os.getsid(0), interrupted, ended)).encode())


def flood(parent: Parent, size: int) -> None:
    """Send messages forever that the parent does not read."""
    parent.report()
    while True:
        parent.send(bytes(size))


def ignore(parent: Parent, file: Path | None = None) -> None:
    """Report in, and ignore all messages."""
    parent.report()
    if file is not None:
        file.write_text(str(os.getpid()))
    while True:
        signal.pause()


def lead(parent: Parent, file: Path) -> None:
    """Start a process that does not end by itself, and ignore all messages."""
    if os.fork() == 0:
        file.write_text(str(os.getpid()))
        while True:
            signal.pause()
    ignore(parent)


def hang(parent: Parent) -> None:
    """Do not report in."""
    while True:
        signal.pause()


def fail(parent: Parent) -> None:
    """Send a message instead of a report, or end."""
    parent.send(b"cannot begin")


def die(parent: Parent) -> None:
    """End at once."""
    os._exit(3)


def listen(parent: Parent, out: Path) -> None:
    """Write the received messages to a file, and end only on request."""
    ended = threading.Event()

    def take(message: bytearray | None) -> None:
        with out.open("a") as file:
            print(None if message is None else bytes(message).decode(), file=file, flush=True)
        if message is None:
            ended.set()

    parent.listen(take)
    parent.report()
    ended.wait()
    with out.open("a") as file:
        print("ended", file=file)


def busy(parent: Parent, file: Path) -> None:
    """Listen, and compute forever."""
    parent.listen(lambda _: None)
    file.write_text(str(os.getpid()))
    while True:
        time.sleep(0.001)


def step(parent: Parent, file: Path) -> None:
    """Work in small steps until the parent sends a message or ends."""
    file.write_text(str(os.getpid()))
    while not parent.wait(0.0):
        time.sleep(0.001)
    file.with_suffix(".end").touch()


def start_and_wait(main: Any, context: Any, file: Path) -> None:
    """Start a process, and wait to be killed."""
    child = Child(main, file, context=context, name="test")
    threading.Event().wait()
    child.end(0.0)
