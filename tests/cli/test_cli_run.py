"""`stallfree run`: a script behaves as under `python`, and its loaders are timed."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stallfree.cli.run import run
from stallfree.errors import InputError

HEAD = "waited for data"

Done = subprocess.CompletedProcess[str]


def start(folder: Path, *commands: list[str]) -> list[Done]:
    """Run all of them at once, in `folder`, to the end."""
    pipe = subprocess.PIPE
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True}
    processes = [subprocess.Popen(command, cwd=folder, **options) for command in commands]
    try:
        printed = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Done(process.args, process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]


def plain(*arguments: str) -> list[str]:
    """The command `python` with these arguments."""
    return [sys.executable, *arguments]


def watching(*arguments: str) -> list[str]:
    """The command `stallfree run` with these arguments."""
    return [sys.executable, "-m", "stallfree", "run", *arguments]


def watching_script(folder: Path) -> list[str]:
    """What `stallfree run --json out.json train.py` replaces itself by."""
    return plain("-m", "stallfree.analysis.run", str(folder / "out.json"), "", "script", "train.py")


SAME = """
import sys
print({"torch", "numpy", "typer", "rich"} & set(sys.modules), sys.flags, sys.argv[1:])
print({k: v for k, v in globals().items() if k[:2] == "__" and k in ("__name__", "__file__", "__spec__", "__doc__")})
print(sys.path, sys.modules["__main__"].__dict__ is globals())
import run
print(run.MINE)
import random, threading, inspect, zlib, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Data(Dataset):
    bad = False
    __len__ = lambda self: 23
    def __getitem__(self, i):
        if i == 5 and self.bad: raise KeyError("no sample 5")
        return i, torch.rand(2)
class Stream(IterableDataset):
    __iter__ = lambda self: iter(range(7))
def state(): return zlib.crc32(repr((random.getstate(), torch.get_rng_state().tolist())).encode())
def show(loader, stop=None):
    print(state(), end=" ", flush=True)
    iterator = iter(loader)
    print(type(iterator), sorted(vars(iterator)), type(loader), sorted(vars(loader)), iter(iterator) is iterator)
    for number, batch in enumerate(iterator):
        print(number, batch)
        if number == stop: break
    print(state(), flush=True)
if __name__ == "__main__":
    torch.manual_seed(3), random.seed(3)
    show(DataLoader(Data(), batch_size=4, shuffle=True))
    show(DataLoader(Data(), batch_size=5, shuffle=True, num_workers=2))
    show(DataLoader(Data(), batch_size=6, num_workers=1, multiprocessing_context="METHOD", drop_last=True))
    show(DataLoader(Stream(), batch_size=2))
    kept = DataLoader(Data(), batch_size=7, shuffle=True, num_workers=1, persistent_workers=True)
    show(kept), show(kept), show(kept, stop=1)
    one, other = DataLoader(Data(), batch_size=3), DataLoader(Data(), batch_sampler=[[1, 2], [3]])
    print(list(zip(one, other)))
    print(inspect.signature(DataLoader.__iter__), DataLoader.__iter__.__qualname__, DataLoader.__iter__.__module__)
    Data.bad = True
    try:
        show(DataLoader(Data(), batch_size=8))
    except KeyError as error:
        print(str(error).splitlines()[-1], state())
    import atexit
    atexit.register(print, "at the end")
    def later():
        threading.main_thread().join()
        print("thread", len(list(DataLoader(Data(), batch_sampler=[[1]]))))
    threading.Thread(target=later).start()
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_script_sees_what_it_sees_under_python(method: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("MINE = 'the module beside the script'\n")  # the name of stallfree's own file
    (tmp_path / "train.py").write_text(SAME.replace("METHOD", method))
    words = ("train.py", "--lr", "0.1", "--", "-m", "--json", "x", "--help")
    bare, watched = start(tmp_path, plain(*words), watching("--json", "out.json", *words))
    found = json.loads((tmp_path / "out.json").read_text())
    assert watched.stdout == bare.stdout
    assert watched.returncode == bare.returncode == 0
    assert watched.stderr.startswith(bare.stderr)
    passes = [(1, 6), (1, 5), (1, 3), (1, 4), (3, 10), (1, 3), (1, 2), (1, 0), (1, 1)]
    assert [(row["passes"], row["batches"]) for row in found["loaders"]] == passes
    assert found["total"]["batches"] == 34


MODULE = """
import sys
from . import data
print(__name__, __package__, __spec__.name, __file__, sys.argv[1:], sys.path, data.numbers)
"""


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    for file, text in (("__init__", "print('package')"), ("data", "numbers = range(2)"), ("train", MODULE)):
        (tmp_path / "job" / f"{file}.py").write_text(text)
    bare, watched = start(tmp_path, plain("-m", "job.train", "-m", "x"), watching("-m", "job.train", "-m", "x"))
    assert (watched.stdout, watched.returncode) == (bare.stdout, 0)


MANY = """
import os, signal, sys, threading, time, torch
import stallfree as sf
from torch.utils.data import DataLoader
class Slow(list):
    def __getitem__(self, i):
        time.sleep(0.02)
        return i
class Nested(list):
    def __getitem__(self, i):
        return sum(float(batch.sum()) for batch in DataLoader(Slow(range(6)), batch_size=3))
class Bad(list):
    def __getitem__(self, i):
        if i in (2, 3):
            raise ValueError(i)
        return i
class Stream(torch.utils.data.IterableDataset):
    __iter__ = lambda self: iter(range(10))
for batch in DataLoader(Slow(range(6)), batch_size=2):
    time.sleep(0.03)
for batch in DataLoader(Nested(range(3))): time.sleep(0.03)
def early():
    for batch in DataLoader(Slow(range(6))): break
    time.sleep(0.05)  # not a part of a loop
thread = threading.Thread(target=early)
thread.start(), thread.join()
loader = sf.DataLoader(Bad(range(10)), batch_size=4, num_workers=1, on_error="skip", multiprocessing_context="fork")
for _ in range(2): print([batch.tolist() for batch in loader])
loader.close()
for device in (None, "cpu", "meta"):  # "meta" stands for a device without streams
    for batch in sf.DataLoader(range(10), batch_size=4, device=device): pass
for batch in sf.DataLoader(Stream(), batch_size=4): pass
for batch in sf.DevicePrefetcher(DataLoader(Slow(range(6)), batch_size=3), "cpu"): pass
for batch in sf.SharedLoader(Slow(range(6)), batch_size=3, group=f"run-{os.getpid()}"): pass
os.chdir("/")
if (pid := os.fork()) == 0:
    for batch in DataLoader(range(10)): pass
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
def f():
    signal.raise_signal(signal.SIGINT)
f()
"""


def test_one_script_of_many_loops_that_ends_by_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MANY)
    (watched,) = start(tmp_path, watching_script(tmp_path))
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["dataset"], row["passes"], row["batches"]) for row in found["loaders"]] == [
        ("Slow", 1, 3), ("Nested", 1, 3), ("Slow", 3, 6), ("Slow", 1, 1), ("Bad", 2, 6), ("range", 3, 9),
        ("Stream", 1, 3), ("Slow", 1, 2), ("Slow", 1, 2),
    ]  # fmt: skip
    assert watched.stdout == 2 * "[[0, 1], [4, 5, 6, 7], [8, 9]]\n" + "0\n"
    assert watched.stderr.count(HEAD) == 1, "forked children print no summary"
    assert watched.returncode == -signal.SIGINT
    trace, _, summary = watched.stderr.partition("KeyboardInterrupt\n")
    assert re.search(r"signal\.raise_signal\(signal\.SIGINT\)\n( *~+\^+\n)?$", trace)  # marked from Python 3.13 on
    assert not re.search("runpy|stallfree/analysis", trace), "no frame of ours in a traceback"
    assert HEAD in summary
    check_times(found)


def check_times(found: dict[str, Any]) -> None:
    alone, outer, inner, early, *_ = found["loaders"]
    assert alone["where"] == "train.py:19"
    for name, least in (("first", 0.04), ("waited", 0.08), ("between", 0.09)):
        assert alone[f"{name}_seconds"] >= least
    waited = alone["first_seconds"] + alone["waited_seconds"]
    assert alone["stall_share"] == pytest.approx(waited / (waited + alone["between_seconds"]))
    assert inner["first_seconds"] + inner["waited_seconds"] >= 18 * 0.02
    assert early["between_seconds"] == 0, "nobody asked for another batch"
    total, others = found["total"], [row for row in found["loaders"] if row is not inner]
    for name in ("first_seconds", "waited_seconds", "between_seconds"):  # an inner loader's wait is the outer one's
        assert total[name] == pytest.approx(sum(row[name] for row in others))
    assert sum(total[f"{name}_seconds"] for name in ("first", "waited", "between")) <= found["seconds"]
    assert outer["between_seconds"] >= 0.09


@pytest.mark.parametrize(
    "script",
    ["def f(:", "import sys\nsys.excepthook = lambda kind, value, trace: print(kind, value, trace.tb_lineno)\n1 / 0"],
)
def test_a_script_that_fails_without_a_loader(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    bare, watched = start(tmp_path, plain("train.py"), watching_script(tmp_path))
    assert (watched.returncode, watched.stdout) == (1, bare.stdout)
    assert watched.stderr.startswith(bare.stderr)
    assert watched.stderr[len(bare.stderr) :].startswith("stallfree: train.py iterated no DataLoader")


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('it ran')")
    with pytest.raises(InputError, match=r"nix\.py is not there"):
        run(str(tmp_path / "nix.py"))
    with pytest.raises(InputError, match="is a folder"):
        run(str(tmp_path))
    with pytest.raises(InputError, match=r"x\.json cannot be written"):
        run(str(tmp_path / "train.py"), json=tmp_path / "none" / "x.json")


CACHED = """
import copy, pickle, time, torch
from torch.utils.data import DataLoader, IterableDataset
class Slow(torch.utils.data.Dataset):
    __len__ = lambda self: 40
    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.full((8,), float(i))
class Stream(IterableDataset):
    __iter__ = lambda self: iter(range(3))
loader = DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1)
print(isinstance(loader, DataLoader), type(loader).__name__)
for epoch in range(2): print(sorted(int(x) for batch in loader for x in batch[:, 0]))
print([batch.tolist() for batch in DataLoader(Stream())])
class Unsized(Slow): __len__ = None
class Loader(DataLoader[torch.Tensor]): pass
numbers = {"a": 1, "b": 2}
for kind, data, options in (
    (DataLoader, Unsized(), {"sampler": [3, 1], "batch_size": 2}),
    (DataLoader, numbers, {"sampler": ["b", "a"], "batch_size": 2}),
    (DataLoader, numbers, {"sampler": ["b", "a"], "batch_size": None}),
    (DataLoader, numbers, {"batch_sampler": [["a", "b"], ["b"]]}),
    (DataLoader, [], {}), (Loader, Slow(), {"sampler": [3, 1], "batch_size": 2}),
    (copy.copy, DataLoader(Slow(), sampler=[3, 1]), {}),
):
    other = kind(data, **options)
    print([[int(x) for x in torch.as_tensor(batch).flatten()[:2]] for _ in range(2) for batch in other])
other.num_workers, other.timeout = 1, 5.0
print(len(list(other)), type(pickle.loads(pickle.dumps(other))).__module__)
"""


def test_torchs_loader_is_replaced_by_one_with_a_cache(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CACHED)
    (cached,) = start(tmp_path, watching("--cache", "--json", "out.json", "train.py"))
    assert cached.stdout.splitlines() == [
        "True DataLoader", *2 * [str([*range(40)])], "[[0], [1], [2]]", "[[3, 3], [3, 3]]", "[[2, 1], [2, 1]]",
        "[[2], [1], [2], [1]]", "[[1, 2], [2], [1, 2], [2]]", "[]", "[[3, 3], [3, 3]]",
        "[[3, 3], [1, 1], [3, 3], [1, 1]]", "2 stallfree.analysis.unchanged",
    ]  # fmt: skip
    for kind, reason in (("Stream", "a stream"), ("Unsized", "no length"), ("dict", "other keys"), ("list", "empty")):
        assert re.search(f"the loader of {kind} stays PyTorch's: .*{reason}", cached.stderr)
    assert "stallfree: cache='auto' keeps all 40 samples" in cached.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    counted = [(row["dataset"], row["passes"], row["batches"]) for row in found["loaders"]]
    assert counted[:2] == [("Slow", 2, 10), ("Stream", 1, 3)]
    assert all(row["where"].startswith("train.py:") for row in found["loaders"])
