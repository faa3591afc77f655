"""Compiling the part in C when the package is built, and doing without."""

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vision_data import compiler

from stallfree.vision import crops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build hook of this working copy."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("STALLFREE_NATIVE", "STALLFREE_LIBJPEG", "CC"):
        monkeypatch.delenv(name, raising=False)
    return module


@contextmanager
def run_hook(build: Any, target: str = "wheel") -> Iterator[tuple[dict[str, Any], list[str]]]:
    """What a build of `target` is told by the hook, and what the user is told."""
    said: list[str] = []
    data: dict[str, Any] = {"force_include": {}}
    hook = SimpleNamespace(target_name=target, app=SimpleNamespace(display_warning=said.append), _scratch=None)
    build.NativeBuildHook.initialize(hook, "standard", data)
    try:
        yield data, said
    finally:
        build.NativeBuildHook.finalize(hook, "standard", data, "")


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_the_wheel_is_for_everyone_and_the_user_is_told(
    build: ModuleType, compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with run_hook(build, "sdist") as result:
        assert result == ({"force_include": {}}, [])
    monkeypatch.setenv("CC", compiler)
    with run_hook(build) as (data, [warning]):
        assert data == {"force_include": {}}  # py3-none-any, as without the hook
        assert re.search("installed without its compiled part.*libjpeg-dev", warning, re.DOTALL)
    monkeypatch.setenv("STALLFREE_NATIVE", "1")
    with pytest.raises(RuntimeError, match=f"STALLFREE_NATIVE=1, but {compiler} .* failed"), run_hook(build):
        pass
    monkeypatch.setenv("STALLFREE_NATIVE", "0")
    assert build.compile_native(tmp_path / "x.so") == "STALLFREE_NATIVE=0"
    assert not list(tmp_path.iterdir())


def test_compiled_it_is_in_the_wheel_which_is_for_this_platform(build: ModuleType) -> None:
    compiler()
    with run_hook(build) as (data, said):
        assert said == []
        assert data["tag"].startswith("py3-none-linux_")
        assert data["pure_python"] is False
        ((made, place),) = data["force_include"].items()
        assert place == "stallfree/vision/_native.so"
        assert [path.name for path in Path(made).parent.iterdir()] == ["_native.so"]
        assert ctypes.CDLL(made).stallfree_abi() == crops.ABI


def test_a_libjpeg_that_was_requested_and_cannot_be_built_is_an_error(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert build.build_libjpeg(tmp_path) is None  # that of the system
    monkeypatch.setenv("STALLFREE_LIBJPEG", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match=r"STALLFREE_LIBJPEG=.*nowhere, but cmake .* failed"), run_hook(build):
        pass
    monkeypatch.setenv("STALLFREE_LIBJPEG", "download")
    archive = tmp_path / "other.tar.gz"
    archive.write_bytes(b"not what was pinned")
    monkeypatch.setattr(build, "URL", archive.as_uri())
    (tmp_path / "scratch").mkdir()
    with pytest.raises(RuntimeError, match=f"SHA-256 .*expected {build.SHA256}"):
        build.build_libjpeg(tmp_path / "scratch")
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["libjpeg-turbo.tar.gz"]  # nothing was unpacked


def test_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if crops.library() is None:
        pytest.skip("the compiled part is not there")
    monkeypatch.setattr(crops, "ABI", crops.ABI + 1)
    assert crops.library.__wrapped__() is None
    monkeypatch.setattr(crops, "LIBRARY", tmp_path / "nothing.so")
    assert crops.library.__wrapped__() is None


def test_the_readme_of_the_package_links_to_pages_of_the_site(build: ModuleType) -> None:
    metadata: dict[str, Any] = {}
    build.ReadmeHook.update(None, metadata)
    links = re.findall(r"\]\(([^)#]*)", metadata["readme"]["text"])
    assert len(links) > 10
    for link in links:
        assert link.startswith(build.SITE)
        page = link.removeprefix(build.SITE)
        places = [page, f"{page.rstrip('/')}.md", f"{page}index.md"]
        assert any((ROOT / "docs" / place).is_file() for place in places), link
