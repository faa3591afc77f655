"""The fixture that looks for leaks finds them. A test of tests: if it were blind, nothing else would notice."""

import mmap
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

LEAKS = """
import mmap, os, pathlib, subprocess, sys, threading

end = threading.Event()
kept = []
store = lambda: pathlib.Path(os.environ["STALLFREE_ROOT"]) / f"stallfree-{os.getuid()}"

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_thread():
    threading.Thread(target=end.wait, name="forgotten", daemon=True).start()

def test_descriptor(tmp_path):
    kept.append(open(tmp_path / "left open", "w"))

def test_file():
    (store() / "cache").mkdir()

def test_mapping():
    (store() / "segment").write_bytes(bytes(4096))
    with open(store() / "segment", "r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 4096))
    (store() / "segment").unlink()

def test_clean():
    assert list(store().iterdir()) == []
    threading.Thread(target=end.wait, args=(0.05,)).start()  # ends by itself
"""


def test_leaks_are_seen(request: pytest.FixtureRequest, store_root: Path) -> None:
    conftest: Any = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    before, end, path = conftest.Held.now(store_root), threading.Event(), store_root / "segment"
    path.write_bytes(bytes(4096))
    thread, process = threading.Thread(target=end.wait), subprocess.Popen(["sleep", "60"])
    thread.start()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        seen = str(conftest.Held.now(store_root).since(before))
    end.set(), thread.join(), process.kill(), process.wait(), path.unlink()
    assert [kind for kind in ("process", "thread", "descriptor", "file", "mapping") if f"  {kind} " not in seen] == []


@pytest.mark.slow
def test_each_leak_fails_the_test_that_made_it(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("PATIENCE = 5.0", "PATIENCE = 0.2"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parent / 'support'}\n")
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-rE", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "6 passed, 5 errors" in done.stdout, done.stdout
    for kind in ("process", "thread", "descriptor", "file", "mapping"):
        report = done.stdout.split(f"ERROR at teardown of test_{kind} ")[1].split("ERROR at teardown")[0]
        assert "the test left behind" in report
        assert f"  {kind} " in report
