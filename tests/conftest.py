"""What all tests share: a store of their own, and a fixture that fails a test which leaves anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from stallfree.datasets import probe
from stallfree.ipc import process
from stallfree.sources import cached_files, file_opens
from stallfree.vision import crops
from warm import Interpreter

# The threads of one parallel computation would spin while they wait for each other, on cores that other tests need too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Python's default from 3.14 on, "forkserver", is tried where a test names it, and by scripts in `test_install.py`.
multiprocessing.set_start_method("fork", force=True)

crops.library()  # before any module of tests imports torchvision 0.19, which has another libjpeg of the same name

# Examples have no time limits, which another test on the same cores could break.
settings.register_profile(
    "everyday", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("everyday")

SHARED_MEMORY = Path("/dev/shm")
PATIENCE = 5.0  # seconds that what is just ending gets to end
MTIME_STEP = 100_000_000  # ns, more than between two times that the kernel gives to files
_failed = pytest.StashKey[bool]()
Held = dict[tuple[str, str, Any], Any]
"""The resources that a process holds, by kind, name, and what is not soon used again."""

Found = Iterator[tuple[tuple[str, str, Any], Any]]
_known = pytest.StashKey[Held | None]()  # what was held at the end of the last test
_unmapped_since: int | None = None  # when the store was last changed, if nothing of it was mapped after that


@pytest.fixture(scope="session", autouse=True)
def signals_and_times() -> None:
    """A shell ignores SIGINT for what it starts in the background, and that is inherited; tests send it. Files that a
    test has just written do not count as perhaps written by the data set that reads them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    file_opens.TICK = 0
    process.REPORT_SECONDS, probe._SECONDS, cached_files._SECONDS = 10.0, 60.0, 60.0


@pytest.fixture(scope="session", autouse=True)
def warm_forkserver() -> None:
    """The server of "forkserver" imports once what its processes need: such tests are nearly as quick as of "fork"."""
    modules = ("analysis.analyze", "clara", "device.process", "shared.shared_loader")  # which import all the others
    used_by_tests = ("hypothesis.stateful", "psutil", "pytest")
    multiprocessing.set_forkserver_preload([*(f"stallfree.{module}" for module in modules), *used_by_tests])


@pytest.fixture(scope="session")
def interpreter(
    pytestconfig: pytest.Config, store_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Interpreter]:
    """Another interpreter, which runs programs."""
    warm = Interpreter(tmp_path_factory.mktemp("programs"))
    pytestconfig.stash[_known] = None  # pytest calls the hook below for no fixture of the whole session
    yield warm
    warm.close()


@pytest.fixture(scope="session", autouse=True)
def store_root() -> Iterator[Path]:
    """The folder in which the caches of this test session live, instead of the user's own."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="stallfree-test-", dir=parent))
    below = root / f"stallfree-{os.getuid()}"
    below.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STALLFREE_ROOT", str(root))
        yield below
    shutil.rmtree(root, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that import large libraries come last: all processes that are forked after them take twice as long."""
    items.sort(key=lambda item: item.get_closest_marker("libraries") is not None)


def pytest_collection_finish() -> None:
    """What the modules made stays to the end: full collections, of which tests ask for many, need not look at it.
    Torch's loggers that do not propagate would each get pytest's handlers for every test.
    """
    gc.collect()
    gc.freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[object]:
    """What a fixture of several tests makes is no leak of the first one."""
    try:
        return (yield)
    finally:
        pytest_fixture_post_finalizer(fixturedef, request)


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """What it has taken away may not be left behind by another test."""
    if fixturedef.scope != "function":
        request.config.stash[_known] = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remembers that the body of a test failed: its traceback keeps objects alive, so leaks say nothing then."""
    report = yield
    if report.when == "call" and report.failed:
        item.stash[_failed] = True
    return report


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Gives memory that a module's tests have freed back to the system: forking takes as long as there is memory."""
    if nextitem is not None and nextitem.path != item.path:
        with contextlib.suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, store_root: Path) -> Iterator[None]:
    """Fails a test that leaves processes, threads, descriptors, mappings or files of a store behind."""
    yield from watched(request, store_root)


def watched(request: pytest.FixtureRequest, store_root: Path) -> Iterator[None]:
    stash = request.config.stash
    before = stash.get(_known, None) or held(store_root)
    yield
    failed = request.node.stash.get(_failed, False)
    now, left = _left_after(before, store_root, seconds=PATIENCE / 10 if failed else PATIENCE)
    shown = "\n".join(f"  {kind} {name} {key} {_command(thing)}" for (kind, name, key), thing in left.items())
    _remove(left)
    stash[_known] = None if left else now
    if left and not failed:
        pytest.fail(f"the test left behind:\n{shown}", pytrace=False)


def held(store_root: Path) -> Held:
    """What this process holds at this instant."""
    return dict(chain(_processes(), _threads(), _descriptors(), _mappings(store_root), _files(store_root)))


def _remove(left: Held) -> None:
    """Ends processes and deletes files, so that one leak does not fail the tests that follow; beside the store none."""
    for (kind, *_), thing in left.items():
        if kind == "process":
            with contextlib.suppress(psutil.Error):
                thing.kill()
        elif kind == "file" and not (thing.parent == SHARED_MEMORY and thing.name.startswith("stallfree-")):
            shutil.rmtree(thing, ignore_errors=True)
            with contextlib.suppress(OSError):
                thing.unlink()


def _left_after(before: Held, store_root: Path, seconds: float) -> tuple[Held, Held]:
    """What is held, and what of it goes beyond `before`, once everything has ended or `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while True:
        now = held(store_root)
        left = {key: thing for key, thing in now.items() if key not in before}
        if not left or time.monotonic() > deadline:
            return now, left
        gc.collect()
        time.sleep(0.002)


def _processes() -> Found:
    """Every descendant but the helpers that `multiprocessing` keeps for the life of an interpreter."""
    kept: Any = {getattr(forkserver._forkserver, "_forkserver_pid", None)}
    for pid in {*_descendants(os.getpid())} - kept - {getattr(resource_tracker._resource_tracker, "_pid", None)}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                yield ("process", str(pid), process.create_time()), process


def _descendants(pid: int) -> Iterator[int]:
    """The processes below a process, as the kernel lists them; `psutil` would look at all processes there are."""
    with contextlib.suppress(OSError):  # it has ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _threads() -> Found:
    """Every thread that Python code started, but the event loop that `fsspec` keeps for the life of an interpreter."""
    for thread in threading.enumerate():
        if thread.name != "fsspecIO" and not isinstance(thread, threading._DummyThread):
            yield ("thread", thread.name, id(thread)), thread


def _descriptors() -> Found:
    """The open descriptors but those that the standard library and `fsspec` keep for the life of an interpreter."""
    kept = {getattr(forkserver._forkserver, "_forkserver_alive_fd", None)}
    kept |= {getattr(resource_tracker._resource_tracker, "_fd", None)}
    asyn = sys.modules.get("fsspec.asyn")
    if loop := asyn and asyn.loop[0]:
        kept |= {loop._selector.fileno(), loop._ssock.fileno(), loop._csock.fileno()}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing is gone by now
            target = os.readlink(f"/proc/self/fd/{name}")  # the second is the heap of multiprocessing
            if int(name) not in kept and not target.startswith(("/dev/null", "/dev/shm/pym-", "/dev/urandom")):
                yield ("descriptor", name, target), None


def _mappings(store_root: Path) -> Found:
    """The files of the store that are mapped, deleted ones included. An empty store is not listed, which takes long."""
    global _unmapped_since
    changed = store_root.stat().st_mtime_ns if store_root.is_dir() else None
    if changed is not None and changed == _unmapped_since and not any(store_root.iterdir()):
        return
    _unmapped_since = changed if changed is not None and time.time_ns() - changed > MTIME_STEP else None
    mark = os.fsencode(f" {store_root}/")
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        if mark in line:
            _unmapped_since = None
            yield ("mapping", "of", os.fsdecode(line.split(maxsplit=5)[-1])), None


def _files(store_root: Path) -> Found:
    """The contents of the tests' store, and entries of shared memory that should have been in it."""
    ours = [*store_root.iterdir()] if store_root.is_dir() else []
    for path in (*ours, *SHARED_MEMORY.glob("stallfree-*"), *SHARED_MEMORY.glob(f"torch_{os.getpid()}_*")):
        if path.name != f"stallfree-{os.getuid()}" and not path.name.startswith("stallfree-test-"):
            yield ("file", "", str(path)), path


def _command(thing: Any) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(thing.cmdline())[:200] if isinstance(thing, psutil.Process) else ""
    return "gone by now"
