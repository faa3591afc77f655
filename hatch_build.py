"""Compiles `stallfree.vision`'s C file when the package is installed or built, if that can be done here.

Needed are a C compiler (`cc`, or `CC`) and the headers of libjpeg-turbo (Debian, Ubuntu: libjpeg-dev; Fedora:
libjpeg-turbo-devel). Without them the package is installed as it is, and everything works, only slower. With
`STALLFREE_NATIVE=0` nothing is compiled, with `STALLFREE_NATIVE=1` it must succeed.

    python hatch_build.py        compiles into the source tree, where an editable install looks
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # started as a script, where hatchling need not be
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "src/stallfree/vision/_native.c"
LIBRARY = SOURCE.with_suffix(".so")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def compile_native(target: Path) -> str:
    """Compile to `target`; "" or the reason why it cannot be done."""
    wish = os.environ.get("STALLFREE_NATIVE", "")
    if wish == "0":
        return "STALLFREE_NATIVE=0"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, *FLAGS, str(SOURCE), "-o", str(partial), "-ljpeg", "-lm", "-ldl"]
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


class NativeBuildHook(BuildHookInterface):
    """Puts the library into the source tree for an editable install, and into the wheel for any other."""

    _folder = ""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        target = LIBRARY
        if version != "editable":
            self._folder = tempfile.mkdtemp()
            target = Path(self._folder) / LIBRARY.name
        reason = compile_native(target)
        if reason:
            self.app.display_warning(
                f"stallfree is installed without its compiled part ({reason}): pictures are decoded whole and resized "
                "by torch. For the compiled part, install a C compiler and libjpeg-dev, and install stallfree anew"
            )
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        if version != "editable":
            build_data["force_include"][str(target)] = f"stallfree/vision/{LIBRARY.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    problem = compile_native(LIBRARY)
    print(problem or f"made {LIBRARY}")
    sys.exit(bool(problem))
