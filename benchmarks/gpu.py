"""Everything that needs a GPU, with one command: `python benchmarks/gpu.py [FOLDER]`.

The tests with the marker `gpu`, then the benchmark `device_gpu`; what they say goes to FOLDER too. Needs torch with
CUDA, stallfree, pytest, pytest-timeout and psutil installed, and 8 GiB free in /dev/shm (in a container: --shm-size).
A machine without a network can be given a folder of wheels:

    pip wheel --no-deps -w wheels .                      # where there is one
    pip download -d wheels fsspec numpy pillow rich typer xxhash psutil pytest pytest-timeout
    python benchmarks/gpu.py out wheels                  # there
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """The number of parts that failed."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "gpu-results").absolute()
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 2:
        wheels = [str(path) for path in sorted(Path(sys.argv[2]).glob("*.whl"))]
        subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", *wheels], check=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    failed = 0
    for name, command in (
        ("tests", ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/device/test_device_gpu.py"]),
        ("benchmark", ["benchmarks/run.py", "device_gpu"]),
    ):
        with open(out / f"{name}.log", "w") as log:
            print(f"{name}: {log.name}", flush=True)
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        print((out / f"{name}.log").read_text()[-3000:], flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
