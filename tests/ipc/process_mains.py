"""What processes do that the tests of `stallfree.ipc.process` start."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from stallfree.ipc.process import Child, Parent


def echo(parent: Parent, count: int) -> None:
    """Report in, and send back so many messages, or all until it shall end."""
    parent.report()
    while count and (message := parent.receive()) is not None:
        parent.send(b"<", message, memoryview(b">"))
        count -= 1


def identify(parent: Parent) -> None:
    """Send what this process is."""
    interrupted = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ended = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    parent.send(repr((os.getpid(), os.getsid(0), interrupted, ended)).encode())


def flood(parent: Parent, size: int) -> None:
    """Send without end what is not read."""
    parent.report()
    while True:
        parent.send(bytes(size))


def ignore(parent: Parent, file: Path | None = None) -> None:
    """Report in, and do nothing that it is asked for."""
    parent.report()
    if file is not None:
        file.write_text(str(os.getpid()))
    while True:
        signal.pause()


def lead(parent: Parent, file: Path) -> None:
    """Start a process that does not end by itself, and ignore everything."""
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
    """Send a message in the place of a report, or end."""
    parent.send(b"cannot begin")


def die(parent: Parent) -> None:
    """End at once."""
    os._exit(3)


def listen(parent: Parent, out: Path) -> None:
    """Listen, and write down what was received; then end if asked to, and not sooner."""
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
    """Listen, and be busy for ever."""
    parent.listen(lambda _: None)
    file.write_text(str(os.getpid()))
    while True:
        time.sleep(0.001)


def step(parent: Parent, file: Path) -> None:
    """Do small steps until the parent has something to say, or is gone."""
    file.write_text(str(os.getpid()))
    while not parent.wait(0.0):
        time.sleep(0.001)
    file.with_suffix(".end").touch()


def start_and_wait(main: Any, context: Any, file: Path) -> None:
    """Start a process, and wait to be killed."""
    child = Child(main, file, context=context, name="test")
    threading.Event().wait()
    child.end(0.0)
