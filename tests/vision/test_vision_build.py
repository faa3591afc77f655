"""The part in C: compiling it when the package is built, doing without, and damaged pictures, which must not end it."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hatch_build
import pytest
from vision_data import compiler, needs_library

from stallfree.vision import crops


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STALLFREE_NATIVE", "STALLFREE_LIBJPEG", "CC"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def run_hook(target: str = "wheel") -> Iterator[tuple[dict[str, Any], list[str]]]:
    said: list[str] = []
    data: dict[str, Any] = {"force_include": {}}
    hook = SimpleNamespace(target_name=target, app=SimpleNamespace(display_warning=said.append), _scratch=None)
    hatch_build.NativeBuildHook.initialize(hook, "standard", data)
    try:
        yield data, said
    finally:
        hatch_build.NativeBuildHook.finalize(hook, "standard", data, "")


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_the_user_is_told(compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with run_hook("sdist") as result:
        assert result == ({"force_include": {}}, [])
    monkeypatch.setenv("CC", compiler)
    with run_hook() as (data, [warning]):
        assert data == {"force_include": {}}  # py3-none-any, as without the hook
        assert re.search("installed without its compiled part.*libjpeg-dev", warning, re.DOTALL)
    monkeypatch.setenv("STALLFREE_NATIVE", "1")
    with pytest.raises(RuntimeError, match=f"STALLFREE_NATIVE=1, but {compiler} .* failed"), run_hook():
        pass
    monkeypatch.setenv("STALLFREE_NATIVE", "0")
    assert hatch_build.compile_native(tmp_path / "x.so") == "STALLFREE_NATIVE=0"
    assert not list(tmp_path.iterdir())


def test_compiled_it_is_in_the_wheel_which_is_for_this_platform() -> None:
    compiler()
    with run_hook() as (data, said):
        assert said == []
        assert data["tag"].startswith("py3-none-linux_")
        assert data["pure_python"] is False
        ((made, place),) = data["force_include"].items()
        assert place == "stallfree/vision/_native.so"
        assert [path.name for path in Path(made).parent.iterdir()] == ["_native.so"]
        assert ctypes.CDLL(made).stallfree_abi() == crops.ABI


def test_a_libjpeg_that_cannot_be_built_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hatch_build.build_libjpeg(tmp_path) is None  # that of the system
    monkeypatch.setenv("STALLFREE_LIBJPEG", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match=r"STALLFREE_LIBJPEG=.*nowhere, but cmake .* failed"), run_hook():
        pass
    monkeypatch.setenv("STALLFREE_LIBJPEG", "download")
    archive = tmp_path / "other.tar.gz"
    archive.write_bytes(b"not what was pinned")
    monkeypatch.setattr(hatch_build, "URL", archive.as_uri())
    (tmp_path / "scratch").mkdir()
    with pytest.raises(RuntimeError, match=f"SHA-256 .*expected {hatch_build.SHA256}"):
        hatch_build.build_libjpeg(tmp_path / "scratch")
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["libjpeg-turbo.tar.gz"]  # nothing was unpacked


@needs_library
def test_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(crops, "ABI", crops.ABI + 1)
    assert crops.library.__wrapped__() is None
    monkeypatch.setattr(crops, "LIBRARY", tmp_path / "nothing.so")
    assert crops.library.__wrapped__() is None


def test_the_readme_of_the_package_links_to_pages_of_the_site() -> None:
    metadata: dict[str, Any] = {}
    hatch_build.ReadmeHook.update(None, metadata)
    links = re.findall(r"\]\(([^)#]*)", metadata["readme"]["text"])
    assert len(links) > 10
    for link in links:
        assert link.startswith(hatch_build.SITE)
        page = link.removeprefix(hatch_build.SITE)
        places = [page, f"{page.rstrip('/')}.md", f"{page}index.md"]
        assert any((hatch_build.ROOT / "docs" / place).is_file() for place in places), link


def run_fuzz(library: Path, count: int, **environment: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name("fuzz_native.py")), str(library), str(count), "7"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@needs_library
@pytest.mark.parametrize("count", [300, pytest.param(40_000, marks=pytest.mark.slow)])
def test_damaged_pictures(count: int) -> None:
    said = run_fuzz(crops.LIBRARY, count)
    for outcome in ("done", "unreadable", "bad argument"):  # it got as far as that
        assert outcome in said


@pytest.mark.slow
def test_damaged_pictures_under_sanitizers(tmp_path: Path) -> None:
    gcc, library = compiler("gcc"), tmp_path / "checked.so"
    checks = ["-O1", "-g", "-DNO_CLONES", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [gcc, *hatch_build.FLAGS, *checks, str(hatch_build.SOURCE), "-o", str(library), "-ljpeg", "-lm", "-ldl"]
    subprocess.run(command, check=True)
    asan = subprocess.run([gcc, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    options = "detect_leaks=0:allocator_may_return_null=1"
    assert "unreadable" in run_fuzz(library, 10_000, LD_PRELOAD=asan.stdout.strip(), ASAN_OPTIONS=options)
