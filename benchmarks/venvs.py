"""Creates the virtual environments of the peers: `python benchmarks/venvs.py [NAME ...]`; without a name, all.

Each is created in `.bench/venvs/NAME`. If one cannot be installed, the last lines of pip's output are printed. A case
whose environment is missing says so in its table instead of a figure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".bench" / "venvs"
IMPORTS = {
    "ffcv": "ffcv.loader",
    "tfdata": "tensorflow",
    "monai": "monai.data",
    "tensorsocket": "tensorsocket",
    "training": "torch, tensorflow, ffcv.loader",
    "programs": "torchvision, timm, torchaudio, datasets, transformers, monai, nibabel, albumentations, cv2",
}
LIBRARIES = dict.fromkeys(("ffcv", "training"), ("opencv4", "libturbojpeg"))
"""Libraries that pkg-config must find before the build."""
WITH_STALLFREE = ("programs", "training")
"""Environments in which stallfree is installed too, from this working copy."""


def python_of(name: str) -> Path:
    """Return the interpreter of a peer's environment, whether it exists or not."""
    return HOME / name / "bin" / "python"


def why_missing(name: str) -> str | None:
    """Return None if the environment `name` can be used, else the reason."""
    if not python_of(name).exists():
        return f"not installed: run `python benchmarks/venvs.py {name}`"
    probe = subprocess.run([python_of(name), "-c", f"import {IMPORTS[name]}"], capture_output=True, text=True)
    if probe.returncode == 0:
        return None
    return f"does not import: {(probe.stderr.strip().splitlines() or ['no message'])[-1]}"


def build(name: str) -> str | None:
    """Create the environment `name`. Returns None, or the reason why it cannot be used."""
    for library in LIBRARIES.get(name, ()):
        try:
            exists = subprocess.run(["pkg-config", "--exists", library]).returncode == 0
        except FileNotFoundError:
            return "pkg-config is not installed"
        if not exists:
            return f"the development files of {library} are not installed (see requirements-{name}.txt)"
    if not python_of(name).exists():
        venv.create(HOME / name, with_pip=True)
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [
        ("setuptools", "wheel"),
        ("--no-build-isolation", "-r", str(ROOT / "benchmarks" / "peers" / f"requirements-{name}.txt")),
    ]
    if name in WITH_STALLFREE:
        steps.append(("-e", str(ROOT)))
    for step in steps:
        done = subprocess.run([*pip, *step], capture_output=True, text=True)
        if done.returncode:
            return "pip failed:\n  " + "\n  ".join(done.stderr.strip().splitlines()[-12:])
    return why_missing(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"which; all by default: {', '.join(IMPORTS)}")
    names = parser.parse_args().names or list(IMPORTS)
    if unknown := sorted(set(names) - set(IMPORTS)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(IMPORTS)}")
    failed = 0
    for name in names:
        reason = build(name)
        failed += reason is not None
        print(f"{name}: {'ready' if reason is None else reason}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
