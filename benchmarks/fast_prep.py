"""Decode, random crop, resize and mirror: stallfree's one step against tf.data's, and from decoded pictures MONAI's."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.harness import Contender, Options, Report, Spread, alternate, check_ratio, ratios, scratch_folder
from benchmarks.photos import jpeg_files, make_photos

NAME = "fast_prep"
QUESTION = (
    "How fast does prep run? A random part of a picture as in RandomResizedCrop(224), mirrored half the time, bytes in "
    "batches of 64, 2 workers or threads."
)
CLASSES = 10


def run(options: Options) -> Report:
    ours = "benchmarks.contenders.fast_prep"
    with scratch_folder() as scratch:
        what = make_pictures(scratch / "photos", options.data, 640 if options.quick else 2000)
        theirs = Contender("torch DataLoader, warm files, simplejpeg and torch's resize", ours, {"who": "torch"})
        tensorflow = Contender(
            "tf.data, fused decode and crop", "benchmarks.peers.tfdata_prep", venv="tfdata", tunes=True
        )
        fetched = Contender("stallfree, encoded pictures in the cache", ours, {"who": "fetched"})
        monai = Contender(
            "MONAI CacheDataset, decoded pictures", "benchmarks.peers.monai_prep", venv="monai", tunes=True
        )
        prepared = Contender("stallfree, decoded pictures in the cache", ours, {"who": "prepared"})
        found = [theirs, tensorflow, fetched, monai, prepared]
        common = {"photos": str(scratch / "photos"), "batch": 64, "workers": 2, "seconds": options.seconds}
        alternate(found, common, options.rounds, scratch)
    pairs = [(theirs, fetched), (tensorflow, fetched), (fetched, fetched), (monai, prepared), (prepared, prepared)]
    return Report(
        columns=["contender", "samples/s", "stallfree of the same form is so many times as fast"],
        rows=[_row(contender, best) for contender, best in pairs],
        checks=[
            check_ratio("encoded pictures: stallfree against tf.data", fetched, tensorflow, 1.2),
            check_ratio("decoded pictures: stallfree against MONAI", prepared, monai, 3.0),
        ],
        notes=[
            f"{what}. All draw parts within the same areas and ratios; the results of stallfree and torch are "
            f"antialiased, those of tf.data (at its default) and of MONAI are not. Median of {options.rounds} rounds.",
            *(
                f"{c.name}: best of {len(c.tried)} settings tried before the rounds: {c.params['setting']}."
                for c in found
                if c.tried
            ),
        ],
        versions={name: text for c in found for r in c.results[:1] for name, text in r["versions"].items()},
        raw={c.name: {"tried": c.tried, "rounds": c.results} for c in found},
    )


def make_pictures(folder: Path, data: Path | None, count: int) -> str:
    """`count` JPEG files in `folder`/CLASS/: the photographs below `data` again and again, or made-up ones."""
    if data is None:
        return make_photos(folder, None, count)
    found = sorted(path for path in jpeg_files(data) if path.stat().st_size > 20_000)
    if not found:
        raise FileNotFoundError(f"no JPEG file of 20 KB or more lies below {data}")
    for number in range(CLASSES):
        (folder / f"class-{number}").mkdir(parents=True)
    size = 0
    for number in range(count):
        source = found[number % len(found)]
        shutil.copyfile(source, folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg")
        size += source.stat().st_size
    return f"{count:,} JPEG files of {size / count / 1000:.0f} KB on average: {len(found)} photographs, repeated"


def _row(contender: Contender, best: Contender) -> list[str]:
    if contender.missing:
        return [contender.name, contender.missing, ""]
    ratio = "1" if contender is best else ratios(best, contender).show(".2f")
    return [contender.name, Spread.of(contender.rates()).show(), ratio]
