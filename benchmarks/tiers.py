"""A local disk below memory, behind slow storage: what the second epoch gains, and what the first one costs."""

from __future__ import annotations

from benchmarks.harness import Check, Contender, Options, Report, Spread, alternate, ratios, scratch_folder

NAME = "tiers"
QUESTION = (
    "Storage of 30 MB/s and 2 ms, memory for 25% of the data, a local disk for all of it: how fast is the second "
    "epoch, and what does the first one cost more than with memory only?"
)
SIZE = 110_000
SHARE = 0.25
OVERHEAD = 0.05


def run(options: Options) -> Report:
    module = "benchmarks.contenders.tiers"
    memory = Contender("memory for 25%", module, {"who": "memory"})
    tiers = Contender("memory for 25%, over a disk", module, {"who": "tiers"})
    whole = Contender("memory for all", module, {"who": "all"})
    common = {
        "samples": 256 if options.quick else 2048,
        "size": SIZE,
        "share": SHARE,
        "batch": 64,
        "bandwidth": 30e6,
        "latency": 0.002,
    }
    with scratch_folder() as scratch:
        alternate([memory, tiers, whole], common, options.rounds, scratch)
    cost = Spread.of([a / b for a, b in zip(_first(tiers), _first(memory), strict=True)])
    gain = ratios(tiers, memory)
    reads = max(result["reads"][1] for result in tiers.results)
    return Report(
        columns=["cache", "s, first epoch", "samples/s, second epoch", "times memory for 25%", "read from storage"],
        rows=[
            [
                contender.name,
                Spread.of(_first(contender)).show(".2f"),
                Spread.of(contender.rates()).show(),
                ratios(contender, memory).show(".1f"),
                f"{max(result['reads'][1] for result in contender.results):,}",
            ]
            for contender in (memory, tiers, whole)
        ],
        checks=[
            Check("memory over a disk: samples read from storage in the second epoch", reads, 0, "==", ",.0f"),
            Check(
                "memory over a disk: samples/s in the second epoch over those with memory for 25% only",
                gain.median,
                2.0,
                spread=(gain.low, gain.high),
            ),
            Check(
                "memory over a disk: time of the first epoch over that with memory only",
                cost.median,
                1 + OVERHEAD,
                "<=",
                spread=(cost.low, cost.high),
            ),
        ],
        notes=[
            f"{common['samples']:,} samples of {SIZE // 1000} KB, random order, batches of 64, 2 workers that live on, "
            "no device. Before the second epoch the disk's file is put out of the kernel's memory, so that the disk is "
            f"read. Median (lowest to highest) of {options.rounds} rounds, in turns, ratios within a round; what was "
            "read from storage is the most of all rounds."
        ],
        versions=tiers.results[0]["versions"],
        raw={contender.name: contender.results for contender in (memory, tiers, whole)},
    )


def _first(contender: Contender) -> list[float]:
    return [result["seconds"][0] for result in contender.results]
