"""Streams of other libraries under stallfree's loader with `cache="auto"`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.contender import emit
from benchmarks.harness import BenchmarkError, Check, Json, Options, Report, run_child, say, scratch_folder
from benchmarks.peers import venvs

NAME = "streams"
QUESTION = (
    "Streams of WebDataset, Streaming, LitData and Hugging Face with 0 to 3 workers: does the first epoch have the "
    "batches of torch's loader, do later ones read nothing, and are they shuffled over all samples?"
)
VENV = "streams"
SAMPLES, SHARDS, BATCH, VALUES = 1000, 8, 16, 20
LATER = 3
LIBRARIES = {
    "WebDataset": "webdataset",
    "Streaming": "mosaicml-streaming",
    "LitData": "litdata",
    "datasets": "datasets",
}


def run(options: Options) -> Report:
    if missing := venvs.why_missing(VENV):
        raise BenchmarkError(missing)
    rows, raw = [], []
    with scratch_folder() as scratch:
        for name in LIBRARIES:
            _child("write", name, scratch)
            found = [_child("read", name, scratch, workers=workers) for workers in range(4)]
            say(f"  {name}: first epochs equal {_all(one['first'] for one in found)}")
            raw += found
            rows.append(
                [
                    name,
                    _all(one["first"] for one in found),
                    _all(one["whole"] for one in found),
                    ", ".join(f"{one['step'] * 3 / SAMPLES:.2f}" for one in found),
                ]
            )
    return Report(
        columns=[
            "stream",
            "first epoch: equal to torch's, of 4",
            f"{LATER} later epochs without the files: each sample once, of 4",
            "distance of samples that follow one another, over that in a random order; 0 to 3 workers",
        ],
        rows=rows,
        checks=[
            Check(
                "streams: first epochs with the batches of torch's loader, of 16", _count(raw, "first"), 16, "==", ".0f"
            ),
            Check(
                "streams: later epochs without the files that have each sample once, of 16",
                _count(raw, "whole"),
                16,
                "==",
                ".0f",
            ),
        ],
        notes=[
            f"{SAMPLES:,} samples in {SHARDS} shards or more, not shuffled by the stream, batches of {BATCH}; 0 to 3 "
            "workers. After the first epoch the files are moved away."
        ],
        versions=raw[0]["versions"],
        raw=raw,
    )


def _all(found: Any) -> str:
    return f"{sum(found)} of 4"


def _count(raw: list[Json], what: str) -> int:
    return sum(one[what] for one in raw)


def _child(mode: str, name: str, scratch: Path, **params: Any) -> Json:
    given = {"mode": mode, "name": name, "root": str(scratch / name), **params}
    return run_child("benchmarks.streams", given, scratch=scratch, python=venvs.python_of(VENV))


# -- the children -----------------------------------------------------------------------------------------------------


def _row(number: int) -> dict[str, Any]:
    import numpy as np

    return {"number": number, "values": np.random.default_rng(number).random(VALUES, np.float32)}


def _write_webdataset(root: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(root / "%04d.tar"), maxcount=SAMPLES // SHARDS, verbose=0) as writer:
        for row in map(_row, range(SAMPLES)):
            writer.write({"__key__": f"{row['number']:05}", "npy": row["values"], "cls": row["number"]})


def _write_streaming(root: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(root), columns={"number": "int", "values": "ndarray"}, size_limit=1 << 14) as writer:
        for row in map(_row, range(SAMPLES)):
            writer.write(row)


def _write_litdata(root: Path) -> None:
    import litdata

    litdata.optimize(_row, list(range(SAMPLES)), str(root), chunk_size=SAMPLES // SHARDS, num_workers=1)


def _write_datasets(root: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    each = SAMPLES // SHARDS
    for shard in range(SHARDS):
        rows = [_row(number) for number in range(each * shard, each * (shard + 1))]
        columns = {"number": [row["number"] for row in rows], "values": [row["values"].tolist() for row in rows]}
        parquet.write_table(pyarrow.table(columns), root / f"{shard}.parquet")


def _read_webdataset(root: Path) -> Any:
    import webdataset

    shards = sorted(map(str, root.glob("*.tar")))
    stream = webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("cls", "npy")
    return stream.map(lambda pair: {"number": pair[0], "values": pair[1]})


def _read_streaming(root: Path) -> Any:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    return StreamingDataset(local=str(root), shuffle=False, batch_size=BATCH)


def _read_litdata(root: Path) -> Any:
    import litdata

    return litdata.StreamingDataset(str(root), shuffle=False)


def _read_datasets(root: Path) -> Any:
    import datasets

    files = sorted(map(str, root.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).with_format("torch")


STREAMS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "WebDataset": (_write_webdataset, _read_webdataset),
    "Streaming": (_write_streaming, _read_streaming),
    "LitData": (_write_litdata, _read_litdata),
    "datasets": (_write_datasets, _read_datasets),
}


def write(given: Json) -> None:
    root = Path(given["root"])
    root.mkdir()
    STREAMS[given["name"]][0](root)
    emit({})


def read(given: Json) -> None:
    import torch

    import stallfree as sf

    root, make = Path(given["root"]), STREAMS[given["name"]][1]
    options = {"batch_size": BATCH, "num_workers": given["workers"]}
    expected = list(torch.utils.data.DataLoader(make(root), **options))
    with sf.DataLoader(make(root), cache="auto", capacity="64MiB", seed=1, **options) as loader:
        first = list(loader)
        away = root.with_name("away")
        root.rename(away)
        try:
            later = [[number for batch in loader for number in batch["number"].tolist()] for _ in range(LATER)]
        finally:
            away.rename(root)
    equal = len(first) == len(expected) and all(
        torch.equal(mine["number"], torchs["number"]) and torch.equal(mine["values"], torchs["values"])
        for mine, torchs in zip(first, expected, strict=True)
    )
    steps = [abs(a - b) for order in later for a, b in pairwise(order)]
    whole = all(sorted(order) == list(range(SAMPLES)) for order in later) and len({*map(tuple, later)}) == LATER
    versions = {name: version(name) for name in ("stallfree", *LIBRARIES.values())}
    emit(
        {"first": equal, "whole": whole, "step": sum(steps) / len(steps), "workers": given["workers"]},
        torch=torch.__version__,
        **versions,
    )


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    {"write": write, "read": read}[task["mode"]](task)
