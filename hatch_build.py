"""Compiles `stallfree.vision`'s C file when the package is installed or built, if that can be done here.

Needed are a C compiler (`cc`, or `CC`) and the headers of libjpeg-turbo (Debian, Ubuntu: libjpeg-dev; Fedora:
libjpeg-turbo-devel). Without them the package is installed as it is, and everything works, only slower.

    python hatch_build.py        compiles into the source tree, where an editable install looks

| variable | value | effect |
| --- | --- | --- |
| `STALLFREE_NATIVE` | `0` | nothing is compiled |
| | `1` | it is an error if the file cannot be compiled |
| `STALLFREE_LIBJPEG` | not set | the libjpeg-turbo of the system is used, as a shared library |
| | a folder | the sources of libjpeg-turbo there are built, and linked statically |
| | `download` | the same with the release below, which is downloaded and compared with its SHA-256 |

Building libjpeg-turbo needs cmake, and nasm on x86.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # started as a script, where hatchling need not be
    BuildHookInterface = MetadataHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent
SITE = "https://stallfree.readthedocs.io/"
SOURCE = ROOT / "src/stallfree/vision/_native.c"
LIBRARY = SOURCE.with_suffix(".so")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
HIDDEN = ("-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")
"""No symbol of a static libjpeg is exported: other libraries of the process bring their own libjpeg."""

RELEASE = "3.1.3"
URL = f"https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download/{RELEASE}/libjpeg-turbo-{RELEASE}.tar.gz"
SHA256 = "075920b826834ac4ddf97661cc73491047855859affd671d52079c6867c1c6c0"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_INSTALL_LIBDIR=lib", "-DCMAKE_POSITION_INDEPENDENT_CODE=ON",
    "-DENABLE_SHARED=OFF", "-DREQUIRE_SIMD=ON", "-DWITH_TURBOJPEG=OFF", "-DWITH_TOOLS=OFF", "-DWITH_TESTS=OFF",
)  # fmt: skip
NOTICES = ("LICENSE.md", "README.ijg")


def download(folder: Path) -> Path:
    """Download the pinned release of libjpeg-turbo; returns the folder of its sources."""
    archive = folder / "libjpeg-turbo.tar.gz"
    with urllib.request.urlopen(URL, timeout=60) as answer:
        archive.write_bytes(answer.read())
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{URL} has the SHA-256 {found}, expected {SHA256}")
    shutil.unpack_archive(archive, folder)
    return folder / f"libjpeg-turbo-{RELEASE}"


def build_libjpeg(folder: Path) -> Path | None:
    """Build the libjpeg-turbo that `STALLFREE_LIBJPEG` names, below `folder`; returns its prefix, None if not set."""
    wish = os.environ.get("STALLFREE_LIBJPEG", "")
    if not wish or os.environ.get("STALLFREE_NATIVE") == "0":
        return None
    sources = download(folder) if wish == "download" else Path(wish).resolve()
    build, prefix = folder / "build", folder / "libjpeg"
    for command in (
        ["cmake", "-S", str(sources), "-B", str(build), f"-DCMAKE_INSTALL_PREFIX={prefix}", *OPTIONS],
        ["cmake", "--build", str(build), "--parallel", str(os.cpu_count()), "--target", "install"],
    ):
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            reason = done.stdout[-4000:] if done.returncode else ""
        except OSError as error:
            reason = str(error)
        if reason:
            raise RuntimeError(f"STALLFREE_LIBJPEG={wish}, but {shlex.join(command)} failed: {reason}")
    return prefix


def compile_native(target: Path, libjpeg: Path | None = None) -> str:
    """Compile to `target`, with the static library below `libjpeg`; returns "" or the reason why it cannot be done."""
    wish = os.environ.get("STALLFREE_NATIVE", "")
    if wish == "0":
        return "STALLFREE_NATIVE=0"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    library = [f"-I{libjpeg}/include", *HIDDEN, f"{libjpeg}/lib/libjpeg.a"] if libjpeg else ["-ljpeg"]
    command = [*compiler, *FLAGS, str(SOURCE), "-o", str(partial), *library, "-lm", "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[0]
        if not reason:
            os.replace(partial, target)  # a process that has the old one open keeps it
    except OSError as error:
        reason = str(error)
    finally:
        partial.unlink(missing_ok=True)
    if reason and wish == "1":
        raise RuntimeError(f"STALLFREE_NATIVE=1, but {shlex.join(command)} failed: {reason}")
    return reason


def with_full_links(readme: str) -> str:
    """The README with links to the documentation's site in place of files, for package indexes."""
    pages = re.sub(r"\]\(docs/([^)#]*?)(?:index)?\.md(#[^)]*)?\)", _page, readme)
    return pages.replace("](docs/", f"]({SITE}")


def _page(found: re.Match[str]) -> str:
    name, anchor = found.groups("")
    return f"]({SITE}{name}{'/' if name and not name.endswith('/') else ''}{anchor})"


class ReadmeHook(MetadataHookInterface):
    """Puts the README into the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = with_full_links((ROOT / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class NativeBuildHook(BuildHookInterface):
    """Puts the library into the source tree for an editable install, and into the wheel for any other."""

    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name)
        libjpeg = build_libjpeg(folder)
        target = LIBRARY if version == "editable" else folder / LIBRARY.name
        reason = compile_native(target, libjpeg)
        if reason:
            self.app.display_warning(
                f"stallfree is installed without its compiled part ({reason}): pictures are decoded whole and resized "
                "by torch. For the compiled part, install a C compiler and libjpeg-dev, and install stallfree again"
            )
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        if version == "editable":
            return
        build_data["force_include"][str(target)] = f"stallfree/vision/{LIBRARY.name}"
        for notice in NOTICES if libjpeg else ():
            path = libjpeg / "share/doc/libjpeg-turbo" / notice
            build_data["force_include"][str(path)] = f"stallfree/vision/libjpeg-turbo/{notice}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        problem = compile_native(LIBRARY, build_libjpeg(Path(scratch)))
    print(problem or f"made {LIBRARY}")
    sys.exit(bool(problem))
