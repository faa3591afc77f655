"""Runs benchmarks: `python -m benchmarks.run [CASE ...] [--quick] [--baseline SRC]`; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT, BenchmarkError, Case, Options, against_baseline, as_text, run_case, say

QUESTIONS = {
    "training": ("training",),
    "storage": ("cold_storage", "bound", "tiers", "auto_cache", "real_programs"),
    "prep": ("fast_prep", "jpeg_warm", "cores"),
    "prepared": ("prepared_224", "prepared_32", "get_many"),
    "jobs": ("shared_jobs", "shared_storage", "shared_single", "shared_batches"),
    "smart_cache": ("smart_cache",),
    "importance": ("importance_time", "importance_accuracy"),
    "hosts": ("store_reads", "store_partitioned"),
    "ray_cluster": ("ray_workers", "shared_search"),
    "device": ("device_gpu", "gpu_photos", "gpu_prep"),
    "loader": ("plain_loader", "first_batch", "watch_cost"),
    "memory": ("memory", "growth", "soak"),
}
"""The cases of each module of `questions/`."""

NAMED = ("device_gpu", "gpu_photos", "gpu_prep", "cores", "importance_accuracy", "soak")
"""Cases that run only if they are named: they take a GPU, many cores or an hour."""

NAMES = tuple(name for names in QUESTIONS.values() for name in names)


def find_case(name: str) -> Case:
    """Return the case `name`."""
    module = next(module for module, names in QUESTIONS.items() if name in names)
    case: Case = importlib.import_module(f"benchmarks.questions.{module}").CASES[name]
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help="without a name: all that need no GPU and no hour")
    parser.add_argument("--list", action="store_true", help="print the cases and their questions")
    parser.add_argument(
        "--data", type=Path, help="folder of photographs, volumes or CIFAR-10; without it, made-up data"
    )
    parser.add_argument("--quick", action="store_true", help="one short round, printed only")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--baseline", metavar="SRC", help="compare with stallfree in this folder; printed only")
    parser.add_argument("--out", type=Path, help="folder for the results, in place of benchmarks/results")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the soak")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"unknown: {', '.join(unknown)}; the cases are {', '.join(NAMES)}")
    if arguments.list:
        print("\n".join(f"{name}: {find_case(name).question}" for name in NAMES))
        return 0
    quick = arguments.quick
    options = Options(arguments.data, quick, 0.3 if quick else 3.0, 1.0 if quick else arguments.minutes)
    failed = []
    for name in arguments.names or [name for name in NAMES if name not in NAMED]:
        case = find_case(name)
        if arguments.rounds:
            case = replace(case, rounds=arguments.rounds)
        say(f"{name}: {case.question}")
        try:
            if arguments.baseline:
                case = against_baseline(case, str(Path(arguments.baseline).resolve()))
            result = run_case(name, case, options)
        except BenchmarkError as error:
            say(f"{name} failed: {error}")
            failed.append(name)
            continue
        only_printed = ROOT / ".bench" / "results" if quick or arguments.baseline else RESULTS
        pages.RESULTS = arguments.out or only_printed
        pages.RESULTS.mkdir(parents=True, exist_ok=True)
        (pages.RESULTS / f"{name}.json").write_text(as_text(result))
        print(pages.table(name), flush=True)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
