"""The cases and tests that need a GPU, in 10 minutes at most: `python benchmarks/gpu.py OUT [--carried DIR]`.

Each part is a process with a time limit. Results go to OUT/CASE.json, what a part prints to OUT/PART.log. Needs torch
and torchvision with CUDA, stallfree's dependencies, pytest, pytest-timeout, hypothesis and psutil. A machine without a
network can be given a folder with what it lacks: wheels, shared libraries (libjpeg.so.62), a tar of JPEG files.

    python benchmarks/gpu.py out --carried .bench/gpu
    python benchmarks/gpu.py out --quick                on any machine: shows that all parts run
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = Path("/dev/shm/stallfree-gpu")
TESTS = ["-m", "pytest", "-m", "gpu", "-q", "-n", "0", "--timeout", "90", "-p", "no:cacheprovider", "--durations", "8"]
PARTS: dict[str, tuple[list[str], int]] = {
    "gpu_photos": (["-m", "benchmarks.run", "gpu_photos"], 180),
    "gpu_prep": (["-m", "benchmarks.run", "gpu_prep"], 240),
    "device_gpu": (["-m", "benchmarks.run", "device_gpu"], 120),
    "tests_prep": ([*TESTS, "tests/vision/test_vision_gpu.py"], 80),
    "tests_device": ([*TESTS, "tests/device/test_device_gpu.py", "tests/importance/test_importance_losses.py"], 150),
    "cores": (["-m", "benchmarks.run", "cores"], 200),
}
"""Command and longest time in seconds of each part, the most important first."""
NAMED = ("cores",)
"""Runs only if it is named."""


def main() -> int:
    """Return the number of parts that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for results and logs")
    parser.add_argument("--carried", type=Path, help="folder of wheels, libraries and a tar of photographs")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be given again")
    parser.add_argument("--quick", action="store_true", help="a few pictures and short measurements")
    parser.add_argument("--seconds", type=float, default=570, help="longest time of all parts together")
    arguments = parser.parse_args()
    atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    environment, photos = prepare(arguments.carried), unpack(arguments.carried)
    failed, summary, end = 0, [], time.monotonic() + arguments.seconds
    for name in arguments.part or [part for part in PARTS if part not in NAMED]:
        command, limit = PARTS[name]
        begun = time.monotonic()
        if "pytest" not in command:
            command = [*command, "--out", str(out), *(["--quick"] if arguments.quick else [])]
            command += ["--data", str(photos)] if photos is not None else []
        limit = int(min(limit, end - begun))
        code = run([sys.executable, *command], out / f"{name}.log", limit, environment) if limit >= 5 else 124
        failed += code != 0
        summary.append(f"{name}: {'ok' if code == 0 else f'ended with {code}'}, {time.monotonic() - begun:.0f} s")
        print(summary[-1], flush=True)
    for log in sorted(out.glob("*.log")):
        lines = [line for line in log.read_text().splitlines() if line.startswith(("|", "FAILED", "ERROR"))]
        print(log.stem, *lines, log.read_text().splitlines()[-1:], sep="\n")
    print("\n".join(summary), flush=True)
    return failed


def prepare(carried: Path | None) -> dict[str, str]:
    """Return the environment of the parts: the source tree, and the folder of what this machine lacks."""
    site = SCRATCH / "site"
    paths = [str(ROOT / "src"), str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "STALLFREE_ROOT": str(SCRATCH / "stallfree"),
    }
    information = site / "stallfree-0.1.0.dist-info"  # the source tree is not installed
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stallfree\nVersion: 0.1.0\n")
    if carried is not None:
        if wheels := [str(path.absolute()) for path in sorted(carried.glob("*.whl"))]:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
            subprocess.run([*pip, *wheels], check=False)
        libraries = [str(carried.absolute()), os.environ.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    return environment


def unpack(carried: Path | None) -> Path | None:
    """Return a folder in memory with the photographs of the tar; None without one."""
    archives = [] if carried is None else sorted(carried.glob("*.tar"))
    photos = SCRATCH / "photos"
    photos.mkdir(parents=True, exist_ok=True)
    for path in archives if not any(photos.iterdir()) else []:
        with tarfile.open(path) as archive:
            for member in archive:
                data = archive.extractfile(member) if member.name.endswith(".jpg") else None
                if data is not None:
                    (photos / member.name.replace("/", "-")).write_bytes(data.read())
    return photos if archives else None


def run(command: list[str], log: Path, limit: float, environment: dict[str, str]) -> int:
    """Run a part for `limit` seconds at most; returns its exit code, 124 if it was stopped."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            return 124


if __name__ == "__main__":
    sys.exit(main())
