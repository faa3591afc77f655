"""The fixture that looks for leaks finds them. A test of tests: if it were blind, nothing else would notice."""

import mmap
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest


def test_each_leak_is_found(request: pytest.FixtureRequest, store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conftest: Any = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    monkeypatch.setattr(conftest, "PATIENCE", 0.2)
    watched, end, path = conftest.watched(request, store_root), threading.Event(), store_root / "segment"
    next(watched)
    path.write_bytes(bytes(4096))
    thread, process = threading.Thread(target=end.wait), subprocess.Popen(["sleep", "60"])
    thread.start()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096), pytest.raises(pytest.fail.Exception) as failed:
        next(watched)
    end.set(), thread.join(), process.wait()
    seen = {line.split()[0] for line in str(failed.value).splitlines()[1:]}
    assert seen == {"descriptor", "file", "mapping", "process", "thread"}
    assert not path.exists(), "one leak does not fail the tests that follow"
    monkeypatch.undo()
    watched = conftest.watched(request, store_root)
    next(watched)
    threading.Thread(target=threading.Event().wait, args=(0.05,)).start()  # ends by itself
    assert next(watched, None) is None
