"""Functions that run in the processes of the tests of `stallfree.ipc.process`."""

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
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    parent.send(repr((os.getpid(), os.getsid(0), handlers == [signal.SIG_IGN, signal.SIG_DFL])).encode())


def flood(parent: Parent, size: int) -> None:
    """Send messages forever that the parent does not read."""
    parent.report()
    while True:
        parent.send(bytes(size))


def hang(parent: Parent, file: Path | None = None) -> None:
    """Do not report in, and ignore all messages."""
    if file is not None:
        file.write_text(str(os.getpid()))
    while True:
        signal.pause()


def lead(parent: Parent, file: Path) -> None:
    """Start a process that does not end by itself, and ignore all messages."""
    if os.fork():
        parent.report()
        hang(parent)
    hang(parent, file)


def fail(parent: Parent, code: int = 0) -> None:
    """Send a message instead of a report; or end with an exit code."""
    if code:
        os._exit(code)
    parent.send(b"cannot begin")


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


def start_and_wait(context: Any, *mains: Any) -> None:
    """Start processes, each given by its function and a file, and wait to be killed."""
    children = [Child(main, file, context=context, name="test") for main, file in mains]
    threading.Event().wait()
    assert children
