"""What `prepared_224` and `prepared_32` share: prepared pictures in memory, and who hands them out how fast."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.contender import Task, make_samples
from benchmarks.harness import Check, Contender, Options, Report, Spread, alternate, check_ratio, scratch_folder


def contenders() -> dict[str, Contender]:
    """Everyone, by a short name."""
    return {
        "torch": Contender("torch DataLoader, 2 persistent workers", "benchmarks.contenders.torch_loader"),
        "batched": Contender(
            "torch DataLoader, 2 persistent workers, data set that gathers whole batches",
            "benchmarks.contenders.torch_loader",
            {"setting": "batched"},
        ),
        "stallfree": Contender("stallfree DataLoader, 2 workers", "benchmarks.contenders.stallfree_loader"),
        "limit": Contender("one process, gather into a standing buffer (the limit)", "benchmarks.contenders.gather"),
        "ffcv": Contender("FFCV", "benchmarks.peers.ffcv_bench", venv="ffcv", tunes=True),
        "tfdata": Contender("tf.data, in memory", "benchmarks.peers.tfdata_bench", venv="tfdata", tunes=True),
    }


def report(options: Options, *, side: int, samples: int, batch: int, wanted: dict[str, float]) -> Report:
    """Run all contenders over `samples` pictures; `wanted` are the least ratios of stallfree to each."""
    with scratch_folder() as scratch:
        if options.quick:
            samples = max(batch, samples // 8 // batch * batch)
        task = Task(side, samples, batch, workers=2, seconds=options.seconds, folder=str(scratch))
        make_samples(task)
        found = contenders()
        alternate(list(found.values()), asdict(task), options.rounds, scratch)
    ours = found["stallfree"]
    rows, checks = [], []
    for contender in found.values():
        if contender.missing:
            rows.append([contender.name, contender.missing, ""])
            continue
        against = "1" if contender is ours else _ratio(ours, contender)
        rows.append([contender.name, Spread.of(contender.rates()).show(), against])
    for key, least in wanted.items():
        what = f"prepared {side}x{side}x3, batch {batch}: stallfree against {found[key].name}"
        checks.append(check_ratio(what, ours, found[key], least))
    return Report(
        columns=["contender", "samples/s", "stallfree is so many times as fast"],
        rows=rows,
        checks=checks,
        notes=[
            f"{samples:,} pictures of {side}x{side}x3 bytes ({samples * side * side * 3 / 2**30:.2f} GiB) in memory, "
            f"batches of {batch}, another random order each epoch, 2 workers or threads. Whole epochs are timed; the "
            "loop receives each batch and touches nothing. Each contender's first epoch is not timed but checked: "
            f"every sample once, with its label and its pixels. Median of {options.rounds} rounds of all contenders "
            "in turns (lowest to highest); ratios within a round.",
            *(
                f"{c.name}: best of {len(c.tried)} settings tried before the rounds: {c.params['setting']}."
                for c in found.values()
                if c.tried
            ),
        ],
        versions={name: text for c in found.values() for r in c.results[:1] for name, text in r["versions"].items()}
        | _versions(found["stallfree"]),
        raw={
            c.name: {"setting": c.params.get("setting"), "tried": c.tried, "rounds": c.results} for c in found.values()
        },
    )


def _versions(contender: Contender) -> dict[str, str]:
    return contender.results[0]["versions"] if contender.results else {}


def _ratio(ours: Contender, theirs: Contender) -> str:
    check: Check = check_ratio("", ours, theirs, 0)
    return check.row()[1]
