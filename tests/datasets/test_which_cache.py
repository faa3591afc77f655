"""Code, values and marks decide which cache a data set gets: none finds the samples of other ones."""

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from cases import half
from loader_data import Made
from warm import Interpreter

PROJECT = """
from .consts import BY
class Numbers:
    def __len__(self): return 4
    def __getitem__(self, id): return id
class Prep:
    def __call__(self, x): return x * {}
def prep(x): return x * BY
def late(x):
    from .lazy import by
    return by(x)
"""

RUN = """
import sys, stallfree as sf
site, store = sys.argv[1:]
sys.path.insert(0, site)
import project
for step in (project.Prep(), project.prep, project.late):
    options = {"store": store, "persist": True, "transform": step, "form": "prepared"}
    with sf.CachedDataset(project.Numbers(), capacity="1MiB", **options) as cached:
        print(cached[3])
"""


def install(site: Path, by: int) -> None:
    package, info = site / "project", site / "project-0.1.0.dist-info"
    files = {
        package / "__init__.py": PROJECT.format(by), package / "consts.py": f"BY = {by}",
        package / "lazy.py": f"def by(x): return x * {by}",
        info / "METADATA": "Metadata-Version: 2.1\nName: project\nVersion: 0.1.0\n",
        info / "RECORD": f"project/__init__.py,sha256={by},1\nproject/consts.py,sha256={by},1\n",
    }  # fmt: skip
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_project_in_site_packages_is_edited(tmp_path: Path, interpreter: Interpreter) -> None:
    for number, by in enumerate((2, 3, 2)):
        site = tmp_path / str(number) / "site-packages"
        install(site, by)
        done = interpreter.run(RUN, str(site), str(tmp_path / "store"))
        assert (done.code, done.out.split()) == (0, [str(3 * by)] * 3), done.err
        caches = list((tmp_path / "store").glob("*/*-minio-*"))
        assert len(caches) == (3 if number == 0 else 6)  # the third run finds those of the first


args = argparse.Namespace(scale=1)


def row(id: int) -> Any:
    return np.full(4, id, np.float32)


class Holds(Made):
    args = args

    def __getitem__(self, id: int) -> Any:
        return row(id) * self.args.scale


def scale(x: Any) -> Any:
    return x * args.scale


class Scale:
    def __call__(self, x: Any) -> Any:
        return scale(x)


USES: dict[str, tuple[Any, Any]] = {
    "function": (Made(16, row), scale), "object": (Made(16, row), Scale()),
    "data set": (Made(16, lambda id: row(id) * args.scale), None), "attribute": (Holds(16, row), None),
}  # fmt: skip


@pytest.mark.parametrize(("use", "held"), half(USES, [False, True]))
def test_two_jobs_of_a_sweep(use: str, held: bool, monkeypatch: pytest.MonkeyPatch, store_root: Path) -> None:
    """A cache is private if code names an object beside which there is one without a fingerprint."""
    dataset, transform = USES[use]
    with open(os.devnull) as file:
        monkeypatch.setattr(args, "log", file if held else None, raising=False)
        caches = []
        for by in (2, 3):
            monkeypatch.setattr(args, "scale", by)
            with warnings.catch_warnings(record=True, action="always") as caught:
                options = {} if transform is None else {"transform": transform, "form": "prepared"}
                caches.append(sf.CachedDataset(dataset, capacity="1MiB", **options))
            assert caches[-1][3].tolist() == [3 * by] * 4
            said = [str(each.message) for each in caught if "private" in str(each.message)]
            assert held == any("log of type _io.TextIOWrapper has no fingerprint" in each for each in said)
            assert held or not said
        for cached in caches:
            cached.close()
