"""What an installation needs: a light import, a folder to write to, and what is left on other systems than Linux."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from stallfree.ipc import folders

ROOT = Path(__file__).parents[1]

DATA = """
import json, os, sys, warnings, torch
def picture(id): return torch.full((3, 5), id, dtype=torch.uint8)
class Data:
    def __init__(self, make=picture): self.make = make
    def __len__(self): return 24
    def __getitem__(self, id): return self.make(id), id
def ids(loader):
    found = [(picture[:, 0, 0].tolist(), labels.tolist()) for picture, labels in loader]
    assert all(left == right for left, right in found)
    return [id for labels, _ in found for id in labels]
"""


def run(program: str, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> Any:
    """What `program` prints as JSON in a fresh interpreter. Without a variable that names a root, unless given."""
    others = {name: value for name, value in os.environ.items() if name != "STALLFREE_ROOT"}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, cwd=Path(__file__).parent / "support", env=others | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_stallfree_imports_nothing_else() -> None:
    before = "import json, sys; import importlib.metadata, typing; before = set(sys.modules); import stallfree; "
    new = run(before + "print(json.dumps(sorted(set(sys.modules) - before)))")
    assert [name for name in new if name.startswith("stallfree")] == ["stallfree"]
    heavy = {"torch", "numpy", "PIL", "fsspec", "rich", "typer", "xxhash", "multiprocessing", "asyncio", "socket"}
    assert not heavy & {name.partition(".")[0] for name in new}


def test_users_see_the_public_names() -> None:
    everything: dict[str, Any] = {}
    exec("from stallfree import *", everything)
    assert all(everything[name] is getattr(sf, name) and name in dir(sf) for name in sf.__all__)
    assert {"DataLoader", "StallfreeError", "clara", "__version__"} <= {*dir(sf)}
    with pytest.raises(AttributeError, match="module 'stallfree' has no attribute 'DataLoadr'"):
        sf.DataLoadr  # type: ignore[attr-defined]  # noqa: B018


def test_no_shared_memory_is_a_warning_and_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm" and real(path, mode))
    monkeypatch.delenv("STALLFREE_ROOT")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="may be on a disk and slower"):
        assert folders.default_root() == tmp_path / f"stallfree-{os.getuid()}"


def _mounts(*commands: str) -> tuple[str, ...]:
    """A prefix that runs a command where these mounts are made, or a skip where that is not allowed."""
    unshare = shutil.which("unshare")
    script = " && ".join(commands)
    if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", script], capture_output=True).returncode:
        pytest.skip("mounts cannot be changed here")
    return unshare, "-m", "sh", "-c", f'{script} && exec "$@"', "sh"


EPOCHS = """
before = set(sys.modules)
import stallfree as sf
sf.DataLoader, sf.CachedDataset, sf.ImageFolder, sf.ImportanceSampler
found = {"imported": sorted(set(sys.modules) - before)}
try:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with sf.CachedDataset(Data(), capacity="1MiB", transform=sf.mark_random(lambda sample: sample)) as dataset:
            for name, data in (("plain", Data()), ("cached", dataset)):
                with sf.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork") as loader:
                    found[name] = [ids(loader) for _ in range(2)]
            found["hits"] = dataset.stats().hits
            found["folder"] = str(dataset.cache.path.parent)
    found["warned"] = [str(warning.message) for warning in warned]
    found["read-only"] = [folder for folder in ("/", "/dev/shm") if not os.access(folder, os.W_OK)]
except sf.StallfreeError as error:
    found = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(found))
"""
READ_ONLY = "mount -t tmpfs -o ro,size=4k none /dev/shm"
READ_ONLY_ROOT = "mount -o remount,ro,bind /"


def test_everything_runs_with_a_read_only_root_and_only_a_temporary_folder(tmp_path: Path) -> None:
    """And the loader imports nothing that only others need."""
    prefix = _mounts(READ_ONLY, f"mount -t tmpfs none {tmp_path}", READ_ONLY_ROOT)
    found = run(DATA + EPOCHS, prefix=prefix, TMPDIR=str(tmp_path), HOME="/nowhere")
    assert found["plain"] == found["cached"] == [list(range(24))] * 2
    assert found["hits"] >= 24
    assert found["folder"] == str(tmp_path / f"stallfree-{os.getuid()}")
    assert (len(set(found["warned"])), found["read-only"]) == (1, ["/", "/dev/shm"])
    new = {".".join(name.split(".")[:2]) for name in found["imported"]}
    others = ("analysis", "clara", "cli", "integrations", "observe", "report", "shared")
    assert not new & {f"stallfree.{package}" for package in others}
    assert not {name.partition(".")[0] for name in new} & {"PIL", "fsspec", "rich", "typer", "redis", "plotly"}


@pytest.mark.slow
def test_nothing_but_read_only_folders_is_one_error() -> None:
    separate = [folder for folder in ("/tmp", "/var/tmp") if Path(folder).is_dir()]
    bound = [f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}" for folder in separate]
    found = run(DATA + EPOCHS, prefix=_mounts(READ_ONLY, READ_ONLY_ROOT, *bound), TMPDIR="/tmp")
    assert "StorageError" in found["error"]
    assert "set STALLFREE_ROOT" in found["error"]


CHECK = """
import stallfree as sf
def check(loader):
    for _ in range(2):
        assert sorted(ids(loader)) == list(range(24)), loader
    loader.close()
"""
UNGUARDED = 'check(sf.DataLoader(Data(lambda id: picture(id)), batch_size=4, cache="auto", capacity="1MiB"))'
GUARDED = """
if __name__ == "__main__":
    data = Data()
    check(sf.DataLoader(data, batch_size=4, num_workers=2))
    check(sf.DataLoader(sf.CachedDataset(data, capacity="1MiB"), batch_size=4, num_workers=2))
    check(sf.DataLoader(data, batch_size=4, num_workers=2, cache="auto", capacity="1MiB"))
    check(sf.DataLoader(sf.SmartCacheDataset(data, cache_num=24), batch_size=4, num_workers=1))
    check(sf.SharedLoader(data, group="default", batch_size=4))
    check(sf.DevicePrefetcher(sf.DataLoader(data, batch_size=4, num_workers=1), "cpu"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rest", [UNGUARDED, GUARDED], ids=["as it is", "guarded"])
def test_a_script_with_the_start_method_of_this_python(rest: str, tmp_path: Path) -> None:
    """With `cache="auto"` and no `num_workers`, a script needs no guard, and its data set need not be picklable."""
    (tmp_path / "train.py").write_text(DATA + CHECK + rest)
    done = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ELSEWHERE = """
import asyncio, concurrent.futures.thread, http.server, importlib.metadata, multiprocessing.popen_spawn_posix
import numpy, torch.distributed, torch.utils.data, typer
import PIL.Image, fsspec, pickle, rich.console, tempfile, xxhash
import other_system
other_system.pretend(sys.argv[1])
import stallfree as sf, stallfree.cli
def refused(make):
    try: make()
    except sf.PlatformError as error: return str(error)
found = {"names": [name for name in sf.__all__ if not hasattr(sf, name)]}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    with sf.DataLoader(Data(), batch_size=4, shuffle=True, seed=3, num_workers=2) as loader:
        found["plain"] = [ids(loader) for _ in range(2)]
        kept = list(loader)
        found["kept"] = sorted(ids(kept))
    with sf.DataLoader(Data(), num_workers=1): pass
found["warned"] = [str(warning.message) for warning in warned]
with sf.DataLoader(Data(), batch_size=4, shuffle=True, seed=3, cache="auto", capacity="1MiB") as loader:
    found["auto"] = [ids(loader) for _ in range(2)]
found["refused"] = [
    refused(make) for make in (
        lambda: sf.CachedDataset(Data(), capacity="1MiB"),
        lambda: sf.CachedDataset(Data(), capacity="1MiB", store=tempfile.gettempdir()),
        lambda: sf.SharedLoader(Data(), group="any"), lambda: sf.RedisStore(capacity_per_node="1MiB"),
        lambda: sf.SmartCacheDataset(Data(), cache_num=8), lambda: sf.ProcessPrefetcher(Data, "cpu"),
    )
]
prefetcher = sf.DevicePrefetcher(sf.DataLoader(Data(), batch_size=4), "cpu")
found["device"] = ids(prefetcher)
prefetcher.close()
found["libraries"] = sorted({"torchvision", "albumentations", "monai"} & set(sys.modules))
print(json.dumps(found))
"""


@pytest.mark.parametrize("system", [pytest.param("darwin", marks=pytest.mark.slow), "win32"])
def test_on_other_systems_one_process_does_all(system: str, tmp_path: Path) -> None:
    found = run(DATA + ELSEWHERE, system, TMPDIR=str(tmp_path))
    with sf.DataLoader(range(24), batch_size=4, shuffle=True, seed=3) as loader:  # type: ignore[arg-type]
        here = [[int(id) for labels in loader for id in labels] for _ in range(2)]
    assert found["names"] == found["libraries"] == []
    assert found["plain"] == found["auto"] == here
    assert found["kept"] == found["device"] == list(range(24))
    assert len(found["warned"]) == 1
    assert "num_workers=2: worker processes need Linux" in found["warned"][0]
    without = "leave the cache out"
    instead_of = [without, without, "DataLoader", "store='memory'", "DataLoader", "DevicePrefetcher"]
    for message, instead in zip(found["refused"], instead_of, strict=True):
        assert f"needs Linux, and this is {system}" in message
        assert instead in message.partition(": ")[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wheel_and_sdist_install_into_an_empty_environment(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    source, built = tmp_path / "source", tmp_path / "built"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    packages = sorted(built.iterdir())
    assert [package.name.endswith(".whl") for package in packages] == [True, False]

    def output(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout

    for package in packages:
        place = tmp_path / f"environment{package.suffix}"
        venv.create(place, with_pip=True, system_site_packages=False)
        python, here = str(place / "bin/python"), Path(torch.__file__).parents[1]
        (next(place.glob("lib/python*/site-packages")) / "others.pth").write_text(str(here))
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        output(python, "-m", "pip", "install", *options, str(package))
        where = Path(output(python, "-c", "import stallfree; print(stallfree.__file__)").strip())
        assert where.is_relative_to(place)
        assert where.with_name("py.typed").exists()
        for command in ([str(place / "bin/stallfree")], [python, "-m", "stallfree"]):
            assert "analyze" in output(*command, "--help")
