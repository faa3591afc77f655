"""`stallfree cache ls`, `rm` and `gc`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stallfree.cache import SampleCache
from stallfree.cli import app
from stallfree.errors import InputError
from warm import Interpreter


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], catch_exceptions=False, env={"COLUMNS": "120"})


def make_cache(name: str, *, store: str | Path = "memory", persist: bool = False) -> SampleCache:
    return SampleCache(100, capacity="4MiB", fingerprint="test", name=name, store=store, persist=persist)


@contextmanager
def killed(name: str, store_root: Path, interpreter: Interpreter) -> Iterator[Path]:
    """The folder of a cache whose only process was killed."""
    program = (
        "import os, signal; from stallfree.cache import SampleCache\n"
        f"cache = SampleCache(100, capacity='4MiB', fingerprint='test', name={name!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert interpreter.run(program).code == -signal.SIGKILL
    assert (store_root / name).is_dir()
    yield store_root / name
    assert not (store_root / name).exists()


def test_no_caches(store_root: Path) -> None:
    assert run("ls").output == f"no caches in {store_root}\n"


def test_ls_shows_what_is_there() -> None:
    with closing(make_cache("pictures")) as cache:
        cache.put(7, b"seven")
        row = next(line for line in run("ls").output.splitlines() if "pictures" in line)
    assert row.split()[:3] == ["pictures", "1", "100"]
    assert "4.0 MiB" in row
    assert "minio" in row
    assert "in use" in row


def test_ls_of_a_folder_on_a_disk(tmp_path: Path) -> None:
    make_cache("kept", store=tmp_path, persist=True).close()
    output = run("ls", "--store", str(tmp_path)).output
    assert "kept" in output
    assert "persistent" in output
    assert "kept" not in run("ls").output


def test_ls_of_a_cache_that_cannot_be_read(store_root: Path, interpreter: Interpreter) -> None:
    with killed("broken", store_root, interpreter) as folder:
        (folder / "meta.json").write_text("no json")
        row = next(line for line in run("ls").output.splitlines() if "broken" in line)
        assert "?" in row
        assert "left behind" in row
        run("gc")


def test_rm(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_cache(name, store=tmp_path, persist=True).close()
    assert run("rm", "one", "two", "--store", str(tmp_path)).output == "removed one\nremoved two\n"
    output = run("ls", "--store", str(tmp_path)).output
    assert "three" in output
    assert "one" not in output


def test_rm_of_what_is_not_there() -> None:
    with pytest.raises(InputError, match="no cache 'nobody'"):
        run("rm", "nobody")


def test_rm_leaves_a_cache_in_use_alone() -> None:
    with closing(make_cache("busy")) as cache:
        with pytest.raises(InputError, match=r"busy.*in use"):
            run("rm", "busy")
        cache.put(1, b"still works")
        assert cache.get_many([1]) == [b"still works"]


def test_gc_removes_what_killed_processes_left(store_root: Path, interpreter: Interpreter) -> None:
    with killed("orphan", store_root, interpreter):
        assert "left behind" in run("ls").output
        assert run("gc").output == "removed orphan\n"


def test_gc_keeps_what_is_in_use_or_persistent(tmp_path: Path) -> None:
    make_cache("kept", store=tmp_path, persist=True).close()
    with closing(make_cache("busy")):
        assert run("gc").output == "nothing to remove\n"
        assert run("gc", "--store", str(tmp_path)).output == "nothing to remove\n"
        assert "busy" in run("ls").output
    assert "kept" in run("ls", "--store", str(tmp_path)).output


def test_gc_when_nothing_was_ever_cached(tmp_path: Path) -> None:
    assert run("gc", "--store", str(tmp_path)).output == "nothing to remove\n"


@pytest.mark.parametrize("command", [["ls"], ["gc"], ["rm", "photos"]])
def test_a_folder_that_is_not_there(command: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="misspelt: there is no such folder"):
        run(*command, "--store", str(tmp_path / "misspelt"))
    assert not (tmp_path / "misspelt").exists()
