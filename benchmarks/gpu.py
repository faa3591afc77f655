"""Everything that needs a GPU or many cores: `python benchmarks/gpu.py OUT [--wheels DIR] [--data DIR]`.

The tests with the marker `gpu`, then the benchmarks `device_gpu`, `gpu_photos` and `cores`; what they print goes to the
folder OUT too. Needs torch with CUDA, stallfree, pytest, pytest-timeout, hypothesis and psutil, and 16 GiB free in
/dev/shm (in a container: --shm-size). A machine without a network can be given a folder of wheels:

    pip wheel --no-deps -w wheels .                      # where there is one
    pip download -d wheels fsspec numpy pillow rich typer xxhash simplejpeg psutil pytest pytest-timeout hypothesis
    python benchmarks/gpu.py out --wheels wheels         # there
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/device/test_device_gpu.py",
    "tests/device/test_everyday_gpu.py",
    "tests/sampling/test_importance_losses.py",
]
PARTS = {
    "tests": ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations", "10", *TESTS],
    "device_gpu": ["benchmarks/run.py", "device_gpu"],
    "gpu_photos": ["benchmarks/run.py", "gpu_photos"],
    "cores": ["benchmarks/run.py", "cores"],
}


def main() -> int:
    """The number of parts that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for what is printed")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--data", type=Path, help="a folder of JPEG photographs; made-up ones without")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be given again")
    parser.add_argument("--quick", action="store_true", help="short benchmarks, results printed only")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.wheels:
        wheels = [str(path) for path in sorted(given.wheels.glob("*.whl"))]
        subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", *wheels], check=True)
    more = [*(["--data", str(given.data.absolute())] if given.data else []), *(["--quick"] if given.quick else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    failed = 0
    for name in given.part or PARTS:
        command = [sys.executable, *PARTS[name], *(more if name != "tests" else [])]
        path = given.out / f"{name}.log"
        print(f"{name}: {path}", flush=True)
        with open(path, "w") as log:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        print(path.read_text()[-5000:], flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
