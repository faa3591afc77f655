"""Scripts without `if __name__ == "__main__":`, whose processes import them again: one message, soon, and no hang.

Each script runs as a program. It would do what it does again in each process that "spawn" or "forkserver" starts.
`test_process.py` checks every day what the library notices; here the slow tests run the scripts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PATIENCE = 100.0
"""Seconds after which a program counts as hung: each of its processes imports torch."""

MOST_LINES = 50  # the frames of this package are shown
GUARD = "under `if __name__ == '__main__':`"

LOADER = """
loader = sf.DataLoader(list(range(6)), batch_size=2, num_workers=2, multiprocessing_context=method)
print(sorted(int(x) for batch in loader for x in batch))
"""
LARGE = """
loader = sf.DataLoader(list(range(300_000)), batch_size=2, num_workers=1, multiprocessing_context=method)
next(iter(loader))
"""
SCRIPTS = {
    "loader": LOADER,
    "large data": LARGE,
    "shared loader": """
loader = sf.SharedLoader(list(range(6)), group="unguarded", batch_size=2, multiprocessing_context=method, timeout=50)
print(sorted(int(x) for batch in loader for x in batch))
""",
    "Smart Cache": """
import time
data = sf.SmartCacheDataset(list(range(40)), float, cache_num=10, replace_rate=0.3, multiprocessing_context=method)
with sf.DataLoader(data, batch_size=2) as loader:
    while True:
        list(loader)
        time.sleep(0.1)
""",
    "process prefetcher": """
def make():
    return [1, 2, 3]
print(list(sf.ProcessPrefetcher(make, "cpu")))
""",
}
methods = pytest.mark.parametrize("method", ["forkserver", "spawn"])


def run(folder: Path, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text("import sys\nimport stallfree as sf\nmethod = sys.argv[1]\n" + program)
    command, environment = [sys.executable, str(script), *arguments], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, cwd=folder)


@methods
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_a_guard_is_told_so_once(name: str, method: str, tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPTS[name], method)
    assert done.returncode == 1
    assert done.stderr.count("__main__") == 1, done.stderr
    assert "__name__ == '__main__'" in done.stderr.splitlines()[-2]
    assert len(done.stderr.splitlines()) < MOST_LINES, done.stderr


@methods
@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("from torch.utils.data import DataLoader as L; iter(L([1], num_workers=1, multiprocessing_context=method))",
         "before the\n        current process has finished"),
        ("raise RuntimeError('not here')", "RuntimeError: not here"),
    ],
)  # fmt: skip
def test_a_process_that_cannot_import_the_script_is_started_once(
    start: str, why: str, method: str, tmp_path: Path
) -> None:
    """Others would end in the same way. Its output says why."""
    done = run(tmp_path, f"if __name__ != '__main__':\n    {start}\n{LARGE}", method)
    assert done.returncode == 1
    assert done.stderr.count(why) == 1, done.stderr
    assert "train.py again: put what is to run once" in done.stderr.splitlines()[-2]


def test_a_fork_server_that_imports_the_script(tmp_path: Path) -> None:
    """As those of Python 3.14 do, before they have started any process."""
    (tmp_path / "as_in_3_14.py").write_text(
        "import os\nfrom multiprocessing import process, spawn\n"
        "process.current_process()._inheriting = True\n"
        "spawn.import_main_path(os.environ['SCRIPT'])\n"
    )
    program = "import multiprocessing\nmultiprocessing.set_forkserver_preload(['as_in_3_14'])\n" + LOADER
    places = {"SCRIPT": str(tmp_path / "train.py"), "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    done = run(tmp_path, program, "forkserver", **places)
    assert done.returncode == 1
    assert GUARD in done.stderr.splitlines()[-2], done.stderr


@methods
def test_with_a_guard_much_is_sent(method: str, tmp_path: Path) -> None:
    """More than one process may receive at a time."""
    program = """
import torch
class Data:
    def __init__(self): self.values = torch.arange(20_000_000)
    def __len__(self): return 8
    def __getitem__(self, id): return self.values[id]
if __name__ == "__main__":
    for workers in (1, 2):
        loader = sf.DataLoader(Data(), batch_size=2, num_workers=workers, multiprocessing_context=method)
        assert [int(x) for batch in loader for x in batch] == list(range(8))
    loader = sf.SharedLoader(Data(), group="guarded", batch_size=2, multiprocessing_context=method)
    assert [int(x) for batch in loader for x in batch] == list(range(8))
"""
    done = run(tmp_path, program, method)
    assert (done.returncode, done.stderr) == (0, "")
