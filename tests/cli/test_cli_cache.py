"""`stallfree cache ls`, `rm` and `gc`."""

import contextlib
import json
import os
import pty
import signal
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

import stallfree as sf
from children import Child
from redis_servers import needs_server
from stallfree.cache.redis import servers
from stallfree.cache.sample_cache import SampleCache
from stallfree.cli import app, cache
from stallfree.errors import InputError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], catch_exceptions=False, env={"COLUMNS": "120"})


def make_cache(name: str, *, store: str | Path = "memory", persist: bool = False) -> SampleCache:
    return SampleCache(100, capacity="4MiB", fingerprint="test", name=name, store=store, persist=persist)


def row_of(name: str, output: str) -> list[str]:
    return next(line for line in output.splitlines() if name in line).split()


@pytest.mark.parametrize("arguments", [(), ("--watch",)])
def test_ls_shows_what_is_there(store_root: Path, arguments: tuple[str, ...]) -> None:
    """With --watch it does so once, because the output is no terminal."""
    assert run("ls", *arguments).output == f"no caches in {store_root}\n"
    with closing(make_cache("pictures")) as cache:
        cache.put_many([7], [b"seven"])
        cache.get_many([7, 7, 8])
        row = row_of("pictures", run("ls", *arguments).output)
    assert row[:8] == ["pictures", "minio", "in", "use", "2", "1", "1", "100"]
    assert row[-2:] == ["4.0", "MiB"]


def watch(terminal: int) -> None:
    """The command in a terminal, in a process of its own."""
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    os.environ.update(COLUMNS="140", LINES="40", TERM="xterm")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cache._SECONDS = 0.02
    with open(1, "w", closefd=False) as sys.stdout:
        cache.ls(watch=True)


def test_watch_in_a_terminal() -> None:
    """It waits for caches, shows what changes, and ends with Ctrl-C."""
    ours, theirs = pty.openpty()
    process = Child(watch, theirs)
    os.close(theirs)
    shown = ""

    def read_until(*words: str) -> None:
        nonlocal shown
        while not all(word in shown for word in words):
            shown += os.read(ours, 4096).decode(errors="replace")

    try:
        read_until("no caches in")
        with closing(make_cache("pictures")) as pictures:
            read_until("pictures", "in use")
            pictures.put_many(range(87), [b"a picture"] * 87)
            pictures.get_many(range(91))
            read_until(" 87 ", " 4 ")
    finally:
        process.signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how a terminal reports its end
            while more := os.read(ours, 4096):
                shown += more.decode(errors="replace")
        code = process.wait()
        os.close(ours)
    assert code == 0
    assert "Traceback" not in shown


@needs_server
def test_a_server_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with sf.RedisStore(capacity_per_node="64MiB", name="shown", timeout=60.0):
        (server,) = [child for child in psutil.Process().children(recursive=True) if "-server" in child.name()]
        with monkeypatch.context() as patient:
            patient.setattr(servers, "PAUSE", 60.0)
            row = row_of("shown", run("ls").output)
        server.suspend()
        lost = row_of("shown", run("ls").output)
        server.resume()
    assert row[:6] == ["shown", "in", "use", "0", "0", "0"]
    assert row[-2:] == ["64.0", "MiB"]
    assert lost == ["shown", "lost", *"-----"]
    assert "shown" not in run("ls").output


def test_rm(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_cache(name, store=tmp_path, persist=True).close()
    store = ("--store", str(tmp_path))
    assert run("rm", "one", "two", *store).output == "removed one\nremoved two\n"
    assert run("gc", *store).output == "nothing to remove\n"
    assert row_of("three", run("ls", *store).output)[2] == "persistent"
    (cache,) = json.loads(run("ls", "--watch", *store, "--json").output)
    assert (cache["name"], cache["samples"], cache["persist"], cache["hits"]) == ("three", 100, True, 0)
    assert json.loads(run("gc", *store, "--json").output) == {"removed": []}
    assert json.loads(run("rm", "three", *store, "--json").output) == {"removed": ["three"]}
    with closing(make_cache("busy")), pytest.raises(InputError, match=r"busy.*in use"):
        run("rm", "busy")
    with pytest.raises(InputError, match="misspelt: there is no such folder"):
        run("ls", "--store", str(tmp_path / "misspelt"))
    assert not (tmp_path / "misspelt").exists()


def make_and_die() -> None:
    cache = make_cache("orphan")
    os.kill(os.getpid(), signal.SIGKILL)
    cache.close()


def test_gc_removes_what_killed_processes_left(store_root: Path) -> None:
    assert Child(make_and_die).wait() == -signal.SIGKILL
    assert "left behind" in run("ls").output
    (store_root / "orphan" / "meta.json").write_text("no json")
    assert row_of("orphan", run("ls").output) == ["orphan", "?", "left", "behind", *"??????"]
    assert run("gc").output == "removed orphan\n"
    assert not (store_root / "orphan").exists()
