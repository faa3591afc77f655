"""Everything that needs a GPU, most important first: `python benchmarks/gpu.py OUT [--carried DIR] [--part NAME ...]`.

Each part is a process with a time limit of its own. Its figures go to OUT/PART.json as soon as they are known, what it
prints to OUT/PART.log, and a short table of all parts is printed at the end. Needs torch and torchvision with CUDA,
stallfree's dependencies, pytest, pytest-timeout, hypothesis and psutil. A machine without a network can be given a
folder with what it lacks: wheels, shared libraries (libjpeg.so.62), `flower-photos-200.tar` or another tar of JPEGs.

    python benchmarks/gpu.py out --carried .bench/gpu          about 6 minutes
    python benchmarks/gpu.py out --quick --device cpu          on any machine: shows that all parts run
    python benchmarks/gpu.py out --page                        the figures in OUT as results and pages
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = Path("/dev/shm/stallfree-gpu")
PREP = ["-m", "benchmarks.contenders.gpu_prep"]
TESTS = ["-m", "pytest", "-m", "gpu", "-q", "-n", "0", "--timeout", "90", "-p", "no:cacheprovider", "--durations", "8"]
PARTS: dict[str, tuple[list[str], int]] = {
    "decoder": ([*PREP, "decoder"], 60),
    "pixels": ([*PREP, "pixels"], 60),
    "tests_prep": ([*TESTS, "tests/vision"], 60),
    "training": ([*PREP, "training"], 180),
    "placement": ([*PREP, "placement"], 90),
    "copies": ([*PREP, "copies"], 80),
    "tests_fork": ([*TESTS, "tests/device/test_device_gpu.py", "-k", "garbage or pinned or ones_own or process"], 60),
    "tests_device": ([*TESTS, "tests/device/test_device_gpu.py"], 260),
    "tests_importance": ([*TESTS, "tests/importance/test_importance_losses.py"], 30),
}
"""Command and longest time in seconds of each part."""

Json = dict[str, Any]


def main() -> int:
    """The number of parts that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for figures and logs")
    parser.add_argument("--carried", type=Path, help="folder of wheels, libraries and a tar of photographs")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be given again")
    parser.add_argument("--quick", action="store_true", help="a few pictures and short measurements")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=540, help="longest time of all parts together")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the results and the page")
    given = parser.parse_args()
    if given.page:
        sys.path.insert(0, str(ROOT))
        from benchmarks.gpu_prep import write_page

        write_page(given.out)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    environment = prepare(given.carried)
    photos = unpack(given.carried)
    failed, summary, end = 0, [], time.monotonic() + given.seconds
    for name in given.part or PARTS:
        command, limit = PARTS[name]
        begun = time.monotonic()
        options = [str(given.out / f"{name}.json"), str(photos), "--device", given.device]
        arguments = [] if "pytest" in command else [*options, *(["--quick"] if given.quick else [])]
        limit = min(limit, end - begun)
        if limit < 5:
            summary.append(f"{name}: no time left")
            continue
        code = run([sys.executable, *command, *arguments], given.out / f"{name}.log", limit, environment)
        failed += code != 0
        summary.append(f"{name}: {'ok' if code == 0 else f'ended with {code}'}, {time.monotonic() - begun:.0f} s")
        print(summary[-1], flush=True)
    print("\n".join([*table(given.out), *tests(given.out), *summary]), flush=True)
    return failed


def prepare(carried: Path | None) -> dict[str, str]:
    """The environment of the parts: the source tree, and the folder of what this machine lacks."""
    site = SCRATCH / "site"
    paths = [str(ROOT), str(ROOT / "src"), str(site), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "STALLFREE_ROOT": str(SCRATCH / "stallfree"),
    }
    information = site / "stallfree-0.1.0.dist-info"  # the source tree is not installed
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stallfree\nVersion: 0.1.0\n")
    if carried is not None:
        wheels = [str(path.absolute()) for path in sorted(carried.glob("*.whl"))]
        if wheels:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
            subprocess.run([*pip, *wheels], check=False)
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(carried.absolute()), os.environ.get("LD_LIBRARY_PATH", "")])
        )
    return environment


def unpack(carried: Path | None) -> Path:
    """A folder in memory with photographs: those of the tar, in one folder; or made-up ones."""
    photos = SCRATCH / "photos"
    if any(photos.glob("*/*.jpg")):
        return photos
    (photos / "all").mkdir(parents=True, exist_ok=True)
    for path in [] if carried is None else sorted(carried.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                data = archive.extractfile(member) if member.name.endswith(".jpg") else None
                if data is not None:
                    (photos / "all" / member.name.replace("/", "-")).write_bytes(data.read())
    if not any(photos.glob("*/*.jpg")):
        program = "import sys; from pathlib import Path; from benchmarks.photos import make_photos; "
        program += "make_photos(Path(sys.argv[1]), None, 64)"
        environment = prepare(carried)
        subprocess.run([sys.executable, "-c", program, str(photos)], check=True, env=environment, cwd=ROOT)
    return photos


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


# -- the table --------------------------------------------------------------------------------------------------------


def read(out: Path, name: str) -> Json:
    """The figures of a part; none if it has not written any."""
    path = out / f"{name}.json"
    found: Json = json.loads(path.read_text()) if path.exists() else {}
    return found


def table(out: Path) -> list[str]:
    """One line per figure that was asked for."""
    lines = [f"\n{platform.node()}, {len(os.sched_getaffinity(0))} cores, {read(out, 'decoder').get('device', '?')}"]
    for name, each in read(out, "decoder").items():
        if isinstance(each, dict):
            lines.append(f"decoder, {name}: " + ", ".join(f"{key} {show(value)}" for key, value in each.items()))
        elif name.startswith("one core"):
            lines.append(f"{name}: {show(each)}")
    found = read(out, "pixels")
    lines.append("pixels: " + ", ".join(f"{key} {show(value)}" for key, value in found.items()))
    found = read(out, "training")
    for name, each in found.items():
        if isinstance(each, dict):
            both, alone = each["with a ResNet-50"], each["loader alone"]
            lines.append(
                f"{name}: loader {show(alone['pictures/s'])}/s, trains {show(both['pictures/s'])}/s, "
                f"busy {both['busy']:.3f}"
            )
        elif name.startswith(("a step", "its")):
            lines.append(f"{name}: {show(each)}")
    for cores in (2, 4, 8):
        try:
            here, there = (found[f"{cores} cores, {name}"]["loader alone"]["pictures/s"] for name in ("CPU", "GPU"))
            lines.append(f"{cores} cores: the GPU's decoder over the CPU's, loader alone: {there / here:.2f}")
        except KeyError:
            continue
    for name, each in read(out, "placement").items():
        if isinstance(each, dict):
            lines.append(f"placement, {name}: {each['predict']} {each['placement']}")
    for name, each in read(out, "copies").items():
        if isinstance(each, dict):
            lines.append(f"{name}: " + ", ".join(f"{way} {show(sorted(values))}" for way, values in each.items()))
    return lines


def tests(out: Path) -> list[str]:
    """The last lines of the tests, and each test that failed."""
    lines = []
    for name in ("tests_prep", "tests_fork", "tests_device", "tests_importance"):
        path = out / f"{name}.log"
        if path.exists():
            written = path.read_text().splitlines()
            lines += [f"{name}: {line}" for line in written if line.startswith(("FAILED", "ERROR"))]
            lines += [f"{name}: {line}" for line in written[-1:]]
    return lines


def show(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(show, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
