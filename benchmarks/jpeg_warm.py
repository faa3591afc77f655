"""JPEG in the cache, decoded and augmented by workers, against torch's loader on warm files: no harm done."""

from __future__ import annotations

from benchmarks.harness import Contender, Options, Report, Spread, alternate, check_ratio, ratios, scratch_folder
from benchmarks.photos import make_photos

NAME = "jpeg_warm"
QUESTION = (
    "When files are warm and workers decode anyway, does the cache do harm? Decode, random crop of 224, random flip, "
    "batches of 64, 2 workers."
)


def run(options: Options) -> Report:
    module = "benchmarks.contenders.jpeg"
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, 400 if options.quick else 2000)
        theirs = Contender("torch DataLoader, files in the page cache", module, {"who": "torch"})
        ours = Contender("stallfree DataLoader, files in the sample cache", module, {"who": "stallfree"})
        common = {"photos": str(scratch / "photos"), "batch": 64, "workers": 2, "seconds": options.seconds}
        alternate([theirs, ours], common, options.rounds, scratch)
    return Report(
        columns=["contender", "samples/s", "stallfree is so many times as fast"],
        rows=[
            [theirs.name, Spread.of(theirs.rates()).show(), ratios(ours, theirs).show(".2f")],
            [ours.name, Spread.of(ours.rates()).show(), "1"],
        ],
        checks=[check_ratio("JPEG decode + crop + flip: stallfree against torch on warm files", ours, theirs, 1.0)],
        notes=[f"{what}. Both use the same decoder and the same transform. Median of {options.rounds} rounds."],
        versions=ours.results[0]["versions"],
        raw={c.name: c.results for c in (theirs, ours)},
    )
