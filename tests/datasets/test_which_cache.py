"""Code, values and marks decide which cache a data set gets: none finds the samples of other ones."""

from pathlib import Path

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


def install(site: Path, by: int) -> None:
    """Install version 0.1.0 of a project that multiplies by `by`."""
    package, info = site / "project", site / "project-0.1.0.dist-info"
    files = {
        package / "__init__.py": PROJECT.format(by),
        package / "consts.py": f"BY = {by}",
        package / "lazy.py": f"def by(x): return x * {by}",
        info / "METADATA": "Metadata-Version: 2.1\nName: project\nVersion: 0.1.0\n",
        info / "RECORD": f"project/__init__.py,sha256={by},1\nproject/consts.py,sha256={by},1\n",
    }
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_project_in_site_packages_is_edited(tmp_path: Path, interpreter: Interpreter) -> None:
    """Its version stays the same."""
    for by in (2, 3):
        site = tmp_path / str(by) / "site-packages"
        install(site, by)
        done = interpreter.run(RUN, str(site), str(tmp_path / "store"))
        assert (done.code, done.out.split()) == (0, [str(3 * by)] * 3), done.err
