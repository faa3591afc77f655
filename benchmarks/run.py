"""Run benchmarks: `python benchmarks/run.py [NAME ...] [--data FOLDER] [--quick]`; all of them without a name.

Results go to `benchmarks/results/NAME.json` and into `docs/benchmarks/`. With `--quick` they are printed only: that
shows that all runs, the figures are too short to mean much.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `benchmarks` is found when this file is started

from benchmarks import harness

NAMES = (
    "prepared_224",
    "prepared_32",
    "jpeg_warm",
    "fast_prep",
    "cold_storage",
    "end_to_end",
    "real_programs",
    "tiers",
    "lru_formula",
    "bound",
    "memory",
    "auto_cache",
    "get_many",
    "growth",
    "scale",
    "smart_cache",
    "smart_boundary",
    "smart_failures",
    "dice",
    "shared_jobs",
    "shared_storage",
    "shared_single",
    "shared_ceiling",
    "shared_faults",
    "shared_search",
    "importance_counts",
    "importance_time",
    "importance_accuracy",
    "importance_cost",
    "store_reads",
    "store_partitioned",
    "device_law",
    "predicted",
    "stall_shares",
    "model_rates",
    "observer",
    "reads_cost",
    "plain_loader",
    "first_batch",
    "watch_cost",
    "replay",
    "ray_workers",
)


NAMED = ("device_gpu", "gpu_photos", "gpu_prep", "cores", "soak")
"""Those that run only when they are named: on a GPU and many cores (see gpu.py), and for an hour."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES + NAMED)}")
    parser.add_argument("--data", type=Path, help="a folder of JPEG photographs and of volumes; made-up ones without")
    parser.add_argument("--quick", action="store_true", help="short runs, results printed only")
    parser.add_argument("--minutes", type=float, help="length of the soak; 60, or 3 with --quick")
    parser.add_argument("--page", action="store_true", help="measure nothing, render the results that are there")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - {*NAMES, *NAMED}):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES + NAMED)}")
    if given.page:
        harness.write_pages(NAMES + NAMED)
        return 0
    options = harness.Options(data=given.data, quick=given.quick, minutes=given.minutes)
    failed = []
    for name in given.names or NAMES:
        case: harness.Case = importlib.import_module(f"benchmarks.{name}")
        harness.say(f"{name}: {case.QUESTION}")
        try:
            report = case.run(options)
        except harness.BenchmarkError as error:
            harness.say(f"{name} failed: {error}")
            failed.append(name)
            continue
        path = harness.save(case, report, options)
        print(harness.result_page(json.loads(path.read_text())), flush=True)
        if not options.quick:
            harness.write_pages(NAMES + NAMED)
    if failed:
        harness.say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
