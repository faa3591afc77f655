"""`stallfree run`: a script behaves as under `python`, and its loaders are timed."""

from __future__ import annotations

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
from stallfree.observe import start as start_file

HEAD = "waited for data"

Done = subprocess.CompletedProcess[str]
Timed = tuple[dict[str, Any], list[float]]


def start(folder: Path, *commands: list[str]) -> list[Done]:
    """Run all of them at once, in `folder`, to the end."""
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        for command in commands
    ]
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
    """What `stallfree run --json out.json train.py` replaces itself by, which need not import stallfree first."""
    return [sys.executable, str(start_file.__file__), str(folder / "out.json"), "script", "train.py"]


def both(script: str, folder: Path, command: list[str], *arguments: str) -> tuple[Done, dict[str, Any]]:
    """Run a script with `python` and with `command`, see that nothing differs; the second one, and its JSON."""
    (folder / "train.py").write_text(script)
    bare, watched = start(folder, plain("train.py", *arguments), [*command, *arguments])
    assert watched.stdout == bare.stdout
    assert watched.returncode == bare.returncode
    assert watched.stderr.startswith(bare.stderr)
    return watched, json.loads((folder / "out.json").read_text())


def counts(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(row["dataset"], row["passes"], row["batches"], row["samples"]) for row in found["loaders"]]


# -- what the script sees ---------------------------------------------------------------------------------------------

SAME = """
import sys
print(sorted(set(sys.modules) - {"__future__", "atexit", "io"}))
import os
print(sys.flags, dict(os.environ))
print({k: v for k, v in globals().items() if k[:2] == "__" and k not in ("__loader__", "__builtins__")})
print(type(__loader__).__name__, getattr(__loader__, "path", None), sys.argv)
print(sys.path, sys.modules["__main__"].__dict__ is globals())
import loops, start
print(loops.MINE, start.MINE)
import random, threading, inspect, zlib
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Data(Dataset):
    bad = False
    def __len__(self):
        return 23
    def __getitem__(self, i):
        if i == 5 and self.bad:
            raise KeyError("no sample 5")
        return i, torch.rand(2)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))

def state():
    return zlib.crc32(repr((random.getstate(), torch.get_rng_state().tolist())).encode())

def show(loader, stop=None):
    print(state(), end=" ", flush=True)
    iterator = iter(loader)
    print(type(iterator), sorted(vars(iterator)), type(loader), sorted(vars(loader)), iter(iterator) is iterator)
    for number, batch in enumerate(iterator):
        print(number, batch)
        if number == stop:
            break
    print(state(), flush=True)

if __name__ == "__main__":
    torch.manual_seed(3)
    random.seed(3)
    show(DataLoader(Data(), batch_size=4, shuffle=True))
    show(DataLoader(Data(), batch_size=5, shuffle=True, num_workers=2))
    show(DataLoader(Data(), batch_size=6, num_workers=1, multiprocessing_context="METHOD", drop_last=True))
    show(DataLoader(Stream(), batch_size=2))
    kept = DataLoader(Data(), batch_size=7, shuffle=True, num_workers=1, persistent_workers=True)
    show(kept)
    show(kept)
    show(kept, stop=1)
    print(list(kept)[0])
    one, other = DataLoader(Data(), batch_size=3), DataLoader(Data(), batch_sampler=[[1, 2], [3]])
    print(list(zip(one, other)))
    print(inspect.signature(DataLoader.__iter__), DataLoader.__iter__.__qualname__, DataLoader.__iter__.__module__)
    Data.bad = True
    for size, workers in (8, 0), (2, 1):
        try:
            how = "fork" if workers else None  # the class of any other process has no bad sample
            show(DataLoader(Data(), batch_size=size, num_workers=workers, multiprocessing_context=how))
        except KeyError as error:
            print(str(error).splitlines()[-1], state())
    import atexit, os
    atexit.register(print, "at the end")
    kept_open = open(f"unflushed-{os.getpid()}.txt", "w")
    kept_open.write("flushed at the end")
    def later():
        threading.main_thread().join()
        print("thread", len(list(DataLoader(Data(), batch_sampler=[[1]]))))
    threading.Thread(target=later).start()
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_script_sees_what_it_sees_under_python(method: str, tmp_path: Path) -> None:
    for name in ("loops", "start"):  # the names of stallfree's own files
        (tmp_path / f"{name}.py").write_text(f"MINE = 'the {name} beside the script'\n")
    command = watching("--json", "out.json", "train.py")
    watched, found = both(
        SAME.replace("METHOD", method), tmp_path, command, "--lr", "0.1", "--", "-m", "--json", "x", "--help"
    )
    assert watched.returncode == 0
    assert [path.read_text() for path in tmp_path.glob("unflushed-*")] == ["flushed at the end"] * 2
    assert counts(found) == [
        ("Data", 1, 6, 23),
        ("Data", 1, 5, 23),
        ("Data", 1, 3, 18),
        ("Stream", 1, 4, None),
        ("Data", 4, 14, 3 * 23 + 14),
        ("Data", 1, 3, 9),
        ("Data", 1, 2, None),
        ("Data", 1, 0, 0),
        ("Data", 1, 2, 4),
        ("Data", 1, 1, None),
    ]
    assert found["total"]["batches"] == 40


MODULE = """
import sys
from . import data
print(__name__, __package__, __spec__.name, __file__, __cached__ == __spec__.cached, sys.argv, sys.path)
"""
LOADER = """
from torch.utils.data import DataLoader
if __name__ == "__main__":
    print([x.tolist() for x in DataLoader(data.Data(), num_workers=1, multiprocessing_context="forkserver")])
"""


@pytest.mark.parametrize(
    ("name", "loader"), [("job.train", ""), ("job", ""), pytest.param("job.train", LOADER, marks=pytest.mark.slow)]
)
def test_modules(name: str, loader: str, tmp_path: Path) -> None:
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("import sys; print('package', sys.argv, sys.path[0])\n")
    (package / "data.py").write_text(
        "class Data:\n    def __len__(self): return 2\n    def __getitem__(self, i): return i\n"
    )
    for file in ("train", "__main__"):
        (package / f"{file}.py").write_text(MODULE + loader)
    bare, watched = start(tmp_path, plain("-m", name, "-m", "x"), watching("--json", "out.json", "-m", name, "-m", "x"))
    assert (watched.stdout, watched.returncode) == (bare.stdout, 0)
    found = json.loads((tmp_path / "out.json").read_text())
    assert counts(found) == ([("Data", 1, 2, 2)] if loader else [])
    assert (HEAD in watched.stderr) == bool(loader)


def test_loaders_with_a_device_are_timed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import stallfree as sf\n"
        "for device in (None, 'cpu', 'meta'):\n"  # "meta" stands for a device without streams
        "    for batch in sf.DataLoader(range(10), batch_size=4, device=device): pass\n"
    )
    start(tmp_path, watching_script(tmp_path))
    assert counts(json.loads((tmp_path / "out.json").read_text())) == [("range", 3, 9, 30)]


def test_a_loader_of_an_iterable_data_set_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import stallfree as sf, torch\n"
        "class Stream(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter(range(10))\n"
        "loaders = [sf.DataLoader(Stream(), batch_size=4, device=device) for device in (None, 'cpu')]\n"
        "for loader in loaders:\n"
        "    for batch in loader: pass\n"
    )
    start(tmp_path, watching_script(tmp_path))
    assert counts(json.loads((tmp_path / "out.json").read_text())) == [("Stream", 1, 3, None)] * 2


# -- one script of many loops -----------------------------------------------------------------------------------------

MANY = """
import os, signal, sys
import stallfree as sf
from torch.utils.data import DataLoader
for _ in range(3):
    for batch in DataLoader(range(10), batch_size=4): pass
both = [DataLoader(range(size), batch_size=4) for size in (8, 5)]
for _ in range(2):
    for loader in both:
        for batch in loader: pass

class Some(list):
    def __getitem__(self, i):
        if i in (2, 3):
            raise ValueError(i)
        return i
loader = sf.DataLoader(Some(range(10)), batch_size=4, num_workers=1, on_error="skip", multiprocessing_context="fork")
for _ in range(2):
    print([batch.tolist() for batch in loader])
print(type(iter(loader)).__name__, next(iter(DataLoader(range(3)))))
loader.close()

class Plain:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return hasattr(DataLoader.__iter__, "__wrapped__")
loader = DataLoader(Plain(), num_workers=1, multiprocessing_context="fork")
print([bool(batch) for batch in loader], flush=True)
pid = os.fork()
if pid == 0:
    for batch in DataLoader(range(10)): pass
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
pid = os.fork()
if pid == 0:
    raise ValueError("in the child")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
signal.raise_signal(signal.SIGINT)
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, dict[str, Any]]:
    """What came of it, and its JSON."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "train.py").write_text(MANY)
    (watched,) = start(folder, watching_script(folder))
    return watched, json.loads((folder / "out.json").read_text())


def test_a_loader_iterated_in_one_place_again_and_again_is_one_row(many: tuple[Done, dict[str, Any]]) -> None:
    watched, found = many
    assert [(row["where"], row["loaders"]) for row in found["loaders"][:3]] == [
        ("train.py:6", 3),
        ("train.py:10", 1),
        ("train.py:10", 1),
    ]
    assert counts(found)[:3] == [("range", 3, 9, 30), ("range", 2, 4, 16), ("range", 2, 4, 10)]
    assert "(3 alike)" in watched.stderr


def test_loaders_of_stallfree_count_what_they_served(many: tuple[Done, dict[str, Any]]) -> None:
    watched, found = many
    epoch = "[[0, 1], [4, 5, 6, 7], [8, 9]]\n"
    assert watched.stdout.startswith(2 * epoch + "Iteration tensor([0])\n")
    assert counts(found)[3:5] == [("Some", 3, 6, 16), ("range", 1, 1, 1)]


def test_forked_children_are_not_watched(many: tuple[Done, dict[str, Any]]) -> None:
    watched, found = many
    assert watched.stdout.endswith("\n[False, False, False, False]\n0\n1\n")
    assert counts(found)[5:] == [("Plain", 1, 4, 4)]
    assert watched.stderr.count(HEAD) == 1


def test_an_interrupt_ends_the_script_as_under_python(many: tuple[Done, dict[str, Any]]) -> None:
    watched, _ = many
    assert watched.returncode == -signal.SIGINT
    trace, _, summary = watched.stderr.partition("KeyboardInterrupt\n")
    assert re.search(r"signal\.raise_signal\(signal\.SIGINT\)\n( *~+\^+\n)?$", trace)  # marked from Python 3.13 on
    assert "stallfree/observe" not in trace  # no frame of ours in a traceback
    assert HEAD in summary


# -- how it ends ------------------------------------------------------------------------------------------------------

LOOP = """
import os, signal, sys
from torch.utils.data import DataLoader
for batch in DataLoader(range(10), batch_size=4): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit()", 0),
        ("sys.exit('out of luck')", 1),
        ("def f():\n    raise ValueError('oh')\nf()", 1),
        ("signal.raise_signal(signal.SIGINT)", -2),
        ("sys.excepthook = lambda kind, value, trace: print(kind, value, trace.tb_lineno)\n1 / 0", 1),
    ],
)
def test_the_summary_comes_however_the_script_ends(end: str, code: int, tmp_path: Path) -> None:
    watched, found = both(LOOP + end, tmp_path, watching_script(tmp_path))
    assert watched.returncode == code
    assert counts(found) == [("range", 1, 3, 10)]
    assert watched.stderr.count(HEAD) == 1
    assert "stallfree analyze" in watched.stderr
    assert "stallfree/observe" not in watched.stderr  # no frame of ours in a traceback


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("print('nothing')", 0, True),
        ("import sys; sys.exit(4)", 4, False),
        ("raise ValueError", 1, False),
        ("def f(:", 1, False),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, False, marks=pytest.mark.slow),
    ],
)
def test_a_script_without_a_loader(script: str, code: int, told: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    bare, watched = start(tmp_path, plain("train.py"), watching_script(tmp_path))
    assert (watched.returncode, watched.stdout) == (code, bare.stdout)
    assert watched.stderr.startswith(bare.stderr)
    extra = watched.stderr[len(bare.stderr) :]
    assert extra.count("\n") == told
    assert extra.startswith("stallfree: train.py iterated no torch.utils.data.DataLoader") == told


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nix\.py is not there"):
        run(str(tmp_path / "nix.py"))
    with pytest.raises(InputError, match="is a folder"):
        run(str(tmp_path))


def test_a_summary_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('it ran')")
    with pytest.raises(InputError, match=r"x\.json cannot be written"):
        run(str(tmp_path / "train.py"), json=tmp_path / "none" / "x.json")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (plain(str(start_file.__file__), "", "module", "no_such_package.train"), "no module 'no_such_package.train'"),
        (plain(str(start_file.__file__), "", "module", "json.no_such_module"), "no module 'json.no_such_module'"),
    ],
)
def test_bad_input_is_one_line(command: list[str], words: str, tmp_path: Path) -> None:
    (done,) = start(tmp_path, command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


# -- times ------------------------------------------------------------------------------------------------------------

TIMED = """
import json, os, time
from torch.utils.data import DataLoader

class Slow:
    def __len__(self):
        return 6
    def __getitem__(self, i):
        time.sleep(0.02)
        return i

class Nested:
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return sum(float(batch.sum()) for batch in DataLoader(Slow(), batch_size=3))

def run(*loaders):
    begun = time.perf_counter()
    for batches in zip(*loaders):
        time.sleep(0.03)
    return time.perf_counter() - begun

alone = [DataLoader(Slow(), batch_size=2)]
in_turns = [DataLoader(Slow(), batch_size=2), DataLoader(Slow(), batch_size=2)]
nested = [DataLoader(Nested())]
os.chdir("/")
print(json.dumps([run(*alone), run(*in_turns), run(*nested)]))
"""


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Timed:
    """What was found for loops of three kinds, and the times of each as the script measured it."""
    folder = tmp_path_factory.mktemp("timed")
    (folder / "train.py").write_text(TIMED)
    (done,) = start(folder, plain(str(start_file.__file__), f"{folder}/out.json", "script", f"{folder}/train.py"))
    assert done.returncode == 0
    return json.loads((folder / "out.json").read_text()), json.loads(done.stdout)


def whole(figures: dict[str, Any]) -> float:
    return float(figures["first_seconds"] + figures["waited_seconds"] + figures["between_seconds"])


def check_share(figures: dict[str, Any]) -> None:
    waited = figures["first_seconds"] + figures["waited_seconds"]
    assert figures["stall_share"] == pytest.approx(waited / (waited + figures["between_seconds"]))


def test_times_of_one_loop(timed: Timed) -> None:
    found, (elapsed, *_) = timed
    row = found["loaders"][0]
    assert row["first_seconds"] >= 0.04
    assert row["waited_seconds"] >= 0.08
    assert row["between_seconds"] >= 0.09
    assert whole(row) <= elapsed <= found["seconds"]
    check_share(row)


def test_times_of_loaders_in_turns(timed: Timed) -> None:
    for row in timed[0]["loaders"][1:3]:  # the wait for the other one is time between
        assert row["waited_seconds"] >= 0.08
        assert row["between_seconds"] >= 2 * 0.03 + 2 * 0.04
        check_share(row)


def test_times_of_a_loader_within_a_loader(timed: Timed) -> None:
    found, _ = timed
    inner = found["loaders"][4]
    assert counts(found)[3:] == [("Nested", 1, 3, 3), ("Slow", 3, 6, 18)]
    assert inner["first_seconds"] + inner["waited_seconds"] >= 18 * 0.02


def test_no_time_is_counted_twice(timed: Timed) -> None:
    found, elapsed = timed
    alone, one, other, outer, _ = found["loaders"]
    total = found["total"]
    for name in ("first_seconds", "waited_seconds"):  # what a loader within another one waits is the other's wait
        assert total[name] == pytest.approx(sum(row[name] for row in (alone, one, other, outer)))
    assert total["between_seconds"] >= alone["between_seconds"] + 2 * 0.03 + outer["between_seconds"]
    assert whole(total) <= sum(elapsed) <= found["seconds"]
    check_share(total)


# -- the forecast -----------------------------------------------------------------------------------------------------

WAITING = """
import torch
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        sum(range(100_000))
        print("sample", i)
        return torch.full((8,), float(i))

def main():
    for batch in DataLoader(Slow(), batch_size=8):
        batch.sum()

main()
"""


def test_the_line_to_change_is_named_with_what_it_gains(tmp_path: Path) -> None:
    watched, found = both(WAITING, tmp_path, watching("--json", "out.json", "train.py"))
    forecast = found["forecast"]
    assert (forecast["where"], forecast["cached"]) == ("train.py:14", "samples cached as fetched")
    assert forecast["rate"] > 2 * forecast["now"]
    head, advice = watched.stderr.splitlines()[1:3]
    assert HEAD in head
    assert advice.startswith(
        "Next: give stallfree.DataLoader the arguments of the DataLoader at train.py:14, and cache="
    )
    assert "samples/s from the second epoch on in place of" in advice
    augmenting = WAITING.replace("float(i))", "float(i)) + torch.rand(8)")  # and reads no files
    _, found = both(augmenting, tmp_path, watching("--json", "out.json", "train.py"))
    assert found["forecast"] is None
    failing = WAITING.replace("main()\n", "main()\nraise SystemExit(3)\n")
    _, found = both(failing, tmp_path, watching("--json", "out.json", "train.py"))
    assert found["forecast"] is None
