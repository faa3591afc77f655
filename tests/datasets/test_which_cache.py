"""Code, values and marks decide which cache a data set gets: none finds the samples of other ones."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from unseen import fraction, unseen_ids
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
import sys
import stallfree as sf
site, store = sys.argv[1:]
sys.path.insert(0, site)
import project
for step in (project.Prep(), project.prep, project.late):
    options = {"store": store, "persist": True, "transform": step, "form": "prepared"}
    with sf.CachedDataset(project.Numbers(), capacity="1MiB", **options) as cached:
        print(cached[3])
"""


def install(site: Path, by: int, origin: str) -> None:
    """Install version 0.1.0 of a project that multiplies by `by`, from a folder, an index, or as a mere copy."""
    package, info = site / "project", site / "project-0.1.0.dist-info"
    files = {
        package / "__init__.py": PROJECT.format(by),
        package / "consts.py": f"BY = {by}",
        package / "lazy.py": f"def by(x): return x * {by}",
    }
    if origin != "copied":
        files[info / "INSTALLER"] = "pip"
        files[info / "METADATA"] = "Metadata-Version: 2.1\nName: project\nVersion: 0.1.0\n"
        files[info / "RECORD"] = "".join(f"project/{file},sha256={by},1\n" for file in ("__init__.py", "consts.py"))
    if origin == "folder":
        files[info / "direct_url.json"] = '{"dir_info": {}, "url": "file:///project"}'
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize("origin", ["folder", "index", "copied"])
def test_a_project_in_site_packages_is_edited(origin: str, tmp_path: Path, interpreter: Interpreter) -> None:
    """Its version stays the same."""
    for number, by in enumerate((2, 3, 2)):
        site = tmp_path / str(number) / "site-packages"
        install(site, by, origin)
        done = interpreter.run(RUN, str(site), str(tmp_path / "store"))
        assert (done.code, done.out.split()) == (0, [str(3 * by)] * 3), done.err
        caches = list((tmp_path / "store").glob("*/*-minio-*"))
        assert len(caches) == (3 if number == 0 else 6)  # the third run finds those of the first


args = argparse.Namespace(scale=1)


class Rows:
    def __init__(self) -> None:
        self.count = 16

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        return np.full(4, id, np.float32)


class Scaled(Rows):
    def __getitem__(self, id: int) -> Any:
        return super().__getitem__(id) * args.scale


class Holds(Rows):
    args = args

    def __getitem__(self, id: int) -> Any:
        return super().__getitem__(id) * self.args.scale


def scale(x: Any) -> Any:
    return x * args.scale


class Scale:
    def __call__(self, x: Any) -> Any:
        return scale(x)


@pytest.mark.parametrize("held", [False, True], ids=["numbers", "beside a file"])
@pytest.mark.parametrize(
    ("dataset", "transform"),
    [(Rows, scale), (Rows, Scale()), (Scaled, None), (Holds, None)],
    ids=["function", "object", "data set", "attribute"],
)
def test_two_jobs_of_a_sweep(
    dataset: Any, transform: Any, held: bool, monkeypatch: pytest.MonkeyPatch, store_root: Path
) -> None:
    """A cache is private if code names an object beside which there is one without a fingerprint."""
    with open(os.devnull) as file:
        monkeypatch.setattr(args, "log", file if held else None, raising=False)
        caches = []
        for by in (2, 3):
            monkeypatch.setattr(args, "scale", by)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                options = {} if transform is None else {"transform": transform, "form": "prepared"}
                caches.append(sf.CachedDataset(dataset(), capacity="1MiB", **options))
            assert caches[-1][3].tolist() == [3 * by] * 4
            assert [str(each.message) for each in caught if "private" in str(each.message)] == [] or held
            assert held == any(
                "log of type _io.TextIOWrapper has no fingerprint" in str(each.message) for each in caught
            )
        for cached in caches:
            cached.close()


LATE = unseen_ids(16)[0]


class DrawsLate(Rows):
    """Draws for one sample, which does not depend on it. The first look does not show it."""

    def __getitem__(self, id: int) -> Any:
        if id == LATE:
            fraction()
        return super().__getitem__(id)


@pytest.mark.parametrize("where", ["memory", "tier"])
def test_a_marked_data_set_has_a_new_cache(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was noted in the persistent one, that it is random, has no effect on it."""
    monkeypatch.setenv("STALLFREE_ROOT", str(tmp_path))
    options: dict[str, Any] = {"persist": True}
    if where == "tier":
        options = {"store": sf.DiskTier(tmp_path, capacity="1MiB", persist=True)}
    keys = set()
    for mark in (lambda thing: thing, sf.mark_deterministic):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with sf.CachedDataset(mark(DrawsLate()), capacity="1MiB", **options) as cached:
                for _ in range(3):
                    rows = torch.cat(list(sf.DataLoader(cached, batch_size=4)))[:, 0]
                    assert rows.tolist() == list(range(16))
                keys.add(cached.cache.fingerprint)
    assert len(keys) == 2
    assert cached.stats().hits >= 32
    assert not [each for each in caught if issubclass(each.category, sf.StallfreeWarning)]
