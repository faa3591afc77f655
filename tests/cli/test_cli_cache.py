"""`stallfree cache ls`, `rm` and `gc`."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from children import Child
from stallfree.cache import SampleCache
from stallfree.cli import app
from stallfree.errors import InputError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], catch_exceptions=False, env={"COLUMNS": "120"})


def make_cache(name: str, *, store: str | Path = "memory", persist: bool = False) -> SampleCache:
    return SampleCache(100, capacity="4MiB", fingerprint="test", name=name, store=store, persist=persist)


def test_no_caches(store_root: Path) -> None:
    assert run("ls").output == f"no caches in {store_root}\n"


def test_ls_shows_what_is_there() -> None:
    with closing(make_cache("pictures")) as cache:
        cache.put_many([7], [b"seven"])
        row = next(line for line in run("ls").output.splitlines() if "pictures" in line)
    assert row.split()[:6] == ["pictures", "minio", "in", "use", "1", "100"]
    assert "4.0 MiB" in row


def test_rm(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_cache(name, store=tmp_path, persist=True).close()
    assert run("rm", "one", "two", "--store", str(tmp_path)).output == "removed one\nremoved two\n"
    output = run("ls", "--store", str(tmp_path)).output
    assert "three" in output
    assert "persistent" in output
    assert "one" not in output


def test_rm_leaves_a_cache_in_use_alone() -> None:
    with closing(make_cache("busy")) as cache:
        with pytest.raises(InputError, match=r"busy.*in use"):
            run("rm", "busy")
        cache.put_many([1], [b"still works"])
        assert cache.get_many([1]) == [b"still works"]


def make_and_die() -> None:
    cache = make_cache("orphan")
    os.kill(os.getpid(), signal.SIGKILL)
    cache.close()


def test_gc_removes_what_killed_processes_left(store_root: Path) -> None:
    assert Child(make_and_die).wait() == -signal.SIGKILL
    assert "left behind" in run("ls").output
    (store_root / "orphan" / "meta.json").write_text("no json")
    row = next(line for line in run("ls").output.splitlines() if "orphan" in line)
    assert row.split() == ["orphan", "?", "left", "behind", *"????"]
    assert run("gc").output == "removed orphan\n"
    assert not (store_root / "orphan").exists()


def test_gc_keeps_what_is_in_use_or_persistent(tmp_path: Path) -> None:
    make_cache("kept", store=tmp_path, persist=True).close()
    with closing(make_cache("busy")):
        assert run("gc").output == "nothing to remove\n"
        assert run("gc", "--store", str(tmp_path)).output == "nothing to remove\n"
        assert "busy" in run("ls").output
    assert "kept" in run("ls", "--store", str(tmp_path)).output


@pytest.mark.parametrize("command", [["ls"], ["gc"], ["rm", "photos"]])
def test_a_folder_that_is_not_there(command: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="misspelt: there is no such folder"):
        run(*command, "--store", str(tmp_path / "misspelt"))
    assert not (tmp_path / "misspelt").exists()


def test_json(tmp_path: Path) -> None:
    assert json.loads(run("ls", "--json").output) == []
    make_cache("kept", store=tmp_path, persist=True).close()
    store = ("--store", str(tmp_path), "--json")
    (found,) = json.loads(run("ls", *store).output)
    assert (found["name"], found["samples"], found["persist"]) == ("kept", 100, True)
    assert json.loads(run("gc", *store).output) == {"removed": []}
    assert json.loads(run("rm", "kept", *store).output) == {"removed": ["kept"]}
