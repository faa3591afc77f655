"""`ImportanceSampler`: fewer samples per epoch, selected by their losses and their residency in the cache.

The training loop passes losses to `update`. `plan` draws an epoch from the losses of all ranks and the resident
samples, and a loader serves it through the `ActiveEpoch` that `begin` returns.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stallfree.datasets.epoch_source import Plan, check_state
from stallfree.datasets.ranks import deal, share
from stallfree.errors import InputError, argument_conflict, cache_required, ranks_conflict, state_mismatch
from stallfree.importance.epoch import ON_MISS, ActiveEpoch, Marks, Residents, Retention
from stallfree.importance.jobs import agree, num_steps, of_first_rank, ranks_of_job, resident_to_all, steps_of
from stallfree.importance.losses import Losses, pack, unpack
from stallfree.importance.plans import PLANS, Draw, Known, Rule, check_cache, check_share, draw_plan, last_eighth
from stallfree.pipeline.randomness import draw_seed
from stallfree.raising import short_traceback
from stallfree.units import parse_number, parse_size, parse_whole

Array = np.ndarray[Any, np.dtype[Any]]

_STATE_VERSION = 1

_LOWEST = 0.4
"""Lowest probability of a missing sample, as a share of their mean."""


class ImportanceSampler:
    """Draws the samples of each epoch by their losses, to reduce storage reads.

    Pass it to `stallfree.DataLoader` as `sampler`: the loader then yields `Batch(data, ids, weights)`. Train on
    `(losses * batch.weights).mean()` with one loss per sample, and pass the losses to `update`. Under another loader it
    yields ids like any sampler, and the weights are in `plan(epoch).weights`.

    | plan | draws | weights |
    | --- | --- | --- |
    | "unbiased" | all residents, plus a loss-weighted draw from the rest, limited by `target_io` | 1 / p, see below |
    | "icache" | each with the share of recent losses that are not above its own, to the power `beta` | none |
    | "infobatch" | all but a share `prune` of those below the mean loss | 1 / p |
    | "full" | all | none |

    Sources: "icache" Chen et al., "iCACHE", HPCA 2023; "infobatch" Qin et al., ICLR 2024. An *L-sample* is one whose
    probability is below 1/2, the others are *H-samples*. Weights are scaled by one factor per epoch, so that their
    expected mean is 1.

    In the plan "unbiased", p is a known function of the rank of the loss and of residency, and the expected weighted
    gradient is that of the full epoch. On a cache of the policy "importance" the residents rotate: each fetched sample
    replaces one that was served. There the weight is one over the drawn share of the samples of about the same rank.
    The gradient is then unbiased if, among these samples, it is independent of residency; where losses are mostly
    noise, the measured error was 1% of its norm. This holds for one job at a time, and for the policies "minio"
    (residents stay) and "importance": others evict residents before they are served, which costs operations.

    Args:
        num_samples: size of the data set; ids are 0 to `num_samples` - 1.
        plan: see above.
        cache: the `SampleCache` of the data set (`CachedDataset.cache`), or any object with `resident(ids)`. None: no
            sample counts as resident.
        seed: of the draws, and of the order within an epoch. None: drawn from torch's generator with the first plan;
            all ranks use that of rank 0.
        target_io: storage operations per epoch, as a share of those of the full plan with this cache.
        p_min: lowest probability of a sample ("unbiased"). None: 0.4 * `target_io`.
        beta: power of the selection probability ("icache"): 1 draws about half of the samples, 2 a third.
        prune: share of the samples below the mean loss to leave out ("infobatch").
        max_age: a sample that was last served this many epochs ago is always drawn. If `drop_last` or an early end of
            the epoch drops it, it is drawn again in the next epoch.
        warm_up: number of first epochs that take all samples, before any losses are known.
        full_every: every `full_every`-th epoch takes all samples; None: never. (The sampler released with iCACHE has
            the default 3.)
        num_epochs: of the training; "infobatch" takes all samples in the last eighth of them. None: never.
        on_miss: what to do if an L-sample in the plan is not in the cache. "swap": a resident L-sample from later in
            the plan is served first; "substitute": any resident L-sample is served that was not yet used in this epoch
            (as in the paper); "fetch": the sample is fetched. None: "swap" in the plan "icache", else "fetch".
            "substitute" is not available for plans with weights.
        packages: a folder on a fast disk, or None. A process then packs missing L-samples into packages of 1 MiB or
            more in an unnamed file there, and reads them into the cache with one sequential read per package, up to the
            share of L-samples among the requests of the previous epoch (0.1 at first). The packages end with the
            loader. Requires a `stallfree.DataLoader` and a cache of the policy "importance"; `on_miss` then defaults to
            "swap".
        write_budget: maximum bytes of packages that one loader writes.
        benefit: how many times longer an epoch of this job takes without the cache. If several jobs use one cache of
            the policy "importance", the value of a sample is the sum of benefit times importance over the jobs (those
            with a benefit of 1.5 or more, if there are any). None: measured in the previous epoch.

    Attributes:
        benefit: as given, or the last measurement.
        measures: whether a loader must measure it.

    In a job of several ranks (torch.distributed), beginning an epoch (`iter(loader)`) is a collective operation that
    combines the losses of all ranks; nothing else is. All ranks have the same plan, and each takes its part of it in
    the same number of batches. A sample in another node's server of a `RedisStore` is resident for all ranks; without
    torch.distributed, this is unknown.

    Raises `InputError` for invalid arguments.

    Example:
        ```python
        sampler = sf.ImportanceSampler(len(dataset), target_io=0.25)
        for batch in sf.DataLoader(dataset, batch_size=4, sampler=sampler):
            images, labels = batch.data
            losses = criterion(model(images), labels)  # one per sample
            (losses * batch.weights).mean().backward()
            sampler.update(batch.ids, losses)
        ```
    """

    plans_epochs = True
    """A loader serves the plans, and does not iterate this like a sampler."""

    def epoch_source(self, setup: Any) -> Any:
        """The source of a loader's epochs."""
        from stallfree.importance.source import ImportanceSource  # which needs this module

        return ImportanceSource(setup)

    @short_traceback
    def __init__(
        self,
        num_samples: int,
        *,
        plan: str = "unbiased",
        cache: Residents | None = None,
        seed: int | None = None,
        target_io: float = 0.25,
        p_min: float | None = None,
        beta: float = 1.0,
        prune: float = 0.5,
        max_age: int = 10,
        warm_up: int = 1,
        full_every: int | None = None,
        num_epochs: int | None = None,
        on_miss: str | None = None,
        packages: str | Path | None = None,
        write_budget: int | str = "1GiB",
        benefit: float | None = None,
    ) -> None:
        self.num_samples = parse_whole(num_samples, "num_samples", 1)
        scored = getattr(getattr(cache, "policy", None), "name", "") == "importance"
        for name, value, known in (("plan", plan, PLANS), ("on_miss", on_miss, (*ON_MISS, None))):
            if value not in known:
                raise InputError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, known))}")
        check_cache(cache, self.num_samples, on_miss)
        _check_serving(plan, on_miss, packages, benefit, scored=scored)
        self.cache = cache
        self.seed = self._given = None if seed is None else parse_whole(seed, "seed")
        swaps = packages is not None or (plan == "icache" and cache is not None)
        self.on_miss = on_miss or ("swap" if swaps else "fetch")
        self.packages = None if packages is None else Path(packages)
        self.write_budget = parse_size(write_budget, "write_budget")
        self.measures = benefit is None
        self.benefit = 1.0 if benefit is None else float(benefit)
        target_io = check_share("target_io", target_io)
        lowest = _LOWEST * target_io if p_min is None else check_share("p_min", p_min)
        if lowest > target_io:
            raise argument_conflict(
                f"p_min={p_min} is above target_io={target_io}: give a smaller p_min, no draw has so few operations"
            )
        self.rule = Rule(
            plan,
            beta=check_share("beta", beta, high=100),
            prune=check_share("prune", prune, high=0.99),
            target_io=target_io,
            p_min=lowest,
            max_age=parse_whole(max_age, "max_age", 1),
            warm_up=parse_whole(warm_up, "warm_up", 0),
            full_every=0 if full_every is None else parse_whole(full_every, "full_every", 1),
            full_from=last_eighth(num_epochs, plan),
            rotating=plan == "unbiased" and scored,
        )
        self.losses = Losses(self.num_samples)
        self._drawn = np.full(self.num_samples, -1, np.int32)
        self._marks = Marks(self.num_samples)
        self._draw: Draw | None = None
        self._drawn_by = 1  # number of ranks that drew it
        self._next = 0
        self._iterated = False
        self._retention = Retention(cache, self.rule.rotating) if scored else None
        self._begun_draw: Draw | None = None

    # -- plans --------------------------------------------------------------------------------------------------------

    def plan(self, epoch: int) -> Plan:
        """The ids of an epoch in order, and their weights.

        Weights are 1 / p, not normalized; None in plans without weights.

        The plan of the last requested epoch is kept; any other is drawn from the data received so far. With several
        ranks, the plan covers all of them, who draw it together when the epoch begins. Raises `InputError` for an epoch
        that has not begun then.
        """
        epoch = parse_whole(epoch, "epoch", 0)
        draw = self._kept(epoch)
        if draw is None and ranks_of_job()[1] > 1:
            raise ranks_conflict(
                f"the plan of epoch {epoch} is drawn by all ranks together when it begins: ask for it after "
                "iter(loader), or use sampler.expected_samples()"
            )
        return (draw or self._drawn_for(epoch)).plan

    def _kept(self, epoch: int) -> Draw | None:
        """The kept draw of an epoch. One that this process drew alone is not that of several ranks."""
        draw = self._draw
        kept = draw is not None and draw.plan.epoch == epoch and self._drawn_by == ranks_of_job()[1]
        return draw if kept else None

    def _drawn_for(self, epoch: int) -> Draw:
        """The draw of an epoch. With several ranks, a collective operation unless it is kept."""
        draw = self._kept(epoch)
        if draw is None:
            self.losses.collect()
            self.seed = of_first_rank(draw_seed() if self.seed is None else self.seed)
            draw = self._draw = draw_plan(self.rule, self._known(), self.seed, epoch)
            self._drawn_by = ranks_of_job()[1]
            self._marks.plan(draw.plan, self._drawn)
        return draw

    def _num_ids(self, epoch: int) -> int:
        """The number of ids of an epoch, over all ranks.

        With several ranks, that of the newest plan for an epoch that has not begun and is not known to be full.
        """
        if ranks_of_job()[1] == 1 or self._kept(epoch) is not None:
            return len(self.plan(epoch).ids)
        draw = None if self.rule.full(epoch) else self._draw
        return self.num_samples if draw is None else len(draw.plan.ids)

    def _known(self) -> Known:
        """The data that all ranks have received."""
        agree(self.losses, self._marks.served, self._marks.ended)  # so no rank is still in the previous epoch
        there = resident_to_all(self.cache, self.num_samples)
        self._marks.apply(self._drawn)
        return Known(self.losses.last, self._drawn, there)

    # -- losses -------------------------------------------------------------------------------------------------------

    @short_traceback
    def update(self, ids: Any, losses: Any) -> None:
        """Record the losses of served samples: `Batch.ids`, and one loss for each.

        Both may be tensors on any device; the call does not wait for the device. A loss that is NaN or infinite is
        ignored with one warning: the sample keeps its previous loss. Raises `InputError` if there is not one number
        for each id, or an id is not in the data set; for ids on a device, at a later call.
        """
        self.losses.add(ids, losses)

    # -- an epoch that is served --------------------------------------------------------------------------------------

    def begin(self, epoch: int, batch_size: int, *, drop_last: bool = False) -> ActiveEpoch:
        """Begin serving an epoch. Sets the scores that decide what the cache keeps.

        For loaders that serve the plan themselves, such as `stallfree.DataLoader`.
        """
        draw = self._drawn_for(parse_whole(epoch, "epoch", 0))
        assert self.seed is not None  # drawn with the plan
        self._next, self._iterated = epoch, True
        batches = self.batches(epoch, batch_size, drop_last=drop_last)
        if self._retention is not None:
            self._retention.begin(draw, self.losses.last, self.benefit, self.seed)
        self._marks.begin()
        return self._begun(draw, batches)

    def resume(self, rest: list[Array]) -> ActiveEpoch:
        """Resume the epoch that `load_state_dict` restored, with the remaining batches `rest`.

        Raises `InputError` if it restored none.
        """
        if self._begun_draw is None:
            raise state_mismatch(
                "the state has no plan: it was taken before the first epoch, and has no batches left. Begin a new epoch"
            )
        self._marks.ended[:] = False
        return self._begun(self._begun_draw, rest)

    def _begun(self, draw: Draw, batches: list[Array]) -> ActiveEpoch:
        self._begun_draw = draw
        return ActiveEpoch(draw, batches, self._marks, self._retention)

    def close(self) -> None:
        """Unregister this job from the cache. It is registered again when another epoch begins."""
        if self._retention is not None:
            self._retention.close()

    def expected_samples(self, epochs: int, *, start: int = 0) -> int:
        """The approximate number of samples that several epochs serve, over all ranks.

        The epochs are those from `start` to `epochs` - 1.

        For a schedule of the learning rate that advances by samples seen. For a cache that is not full yet, its final
        content is extrapolated from the mean size of its samples: call this again once it is full. "icache" and
        "infobatch" depend on the losses; for them the estimate assumes uniformly distributed losses.

        Example:
            ```python
            sampler = sf.ImportanceSampler(1000, target_io=0.25, seed=0)
            seen, expected = 0, sampler.expected_samples(90)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: max(0.0, 1 - seen / expected))
            ```
        """
        epochs, start = parse_whole(epochs, "epochs", 0), parse_whole(start, "start", 0)
        held, rule = self._held(), self.rule
        part = {
            "unbiased": held + (1 - held) * rule.target_io,
            "icache": 1 / (1 + rule.beta),
            "infobatch": 1 - rule.prune / 2,
        }.get(rule.plan, 1.0)
        full = sum(rule.full(epoch) for epoch in range(start, epochs))
        return round(self.num_samples * (full + (max(0, epochs - start) - full) * part))

    def _held(self) -> float:
        """The share of the samples that the cache holds, or will hold when it is full."""
        if self.cache is None:
            return 0.0
        cache: Any = self.cache
        ids = np.arange(self.num_samples)
        held = float(np.mean(getattr(cache, "known", cache.resident)(ids)))
        stats = cache.stats() if hasattr(cache, "stats") else None
        if stats is None or not min(stats.resident_items, stats.capacity_bytes) or stats.evictions or stats.rejected:
            return held
        room: float = stats.capacity_bytes * stats.resident_items / max(1, stats.resident_bytes)
        return max(held, min(1.0, room / max(1, len(ids))))

    # -- the part of this rank ----------------------------------------------------------------------------------------

    def batches(self, epoch: int, batch_size: int, *, drop_last: bool = False) -> list[Array]:
        """The ids of each batch of an epoch, for this rank, as planned.

        All ranks have the same number of batches, whose sizes differ by at most one; with `drop_last` all batches are
        full.
        """
        (rank, count), size = ranks_of_job(), parse_whole(batch_size, "batch_size", 1)
        return [step[rank] for step in steps_of(self.plan(epoch).ids, count, size, drop_last)]

    def num_batches(self, epoch: int, batch_size: int, *, drop_last: bool = False) -> int:
        """The number of batches of an epoch. With several ranks: see `__len__`."""
        return num_steps(self._num_ids(epoch), ranks_of_job()[1], batch_size, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Without it, iterations are consecutive epochs, counted from 0.
        """
        self._next, self._iterated = parse_whole(epoch, "epoch", 0), False

    @property
    def next_epoch(self) -> int:
        """The epoch after the last served one."""
        return self._next + self._iterated

    def __repr__(self) -> str:
        return f"ImportanceSampler({self.num_samples}, plan={self.rule.plan!r})"

    def __iter__(self) -> Iterator[int]:
        self._next = self.next_epoch
        self._iterated = True
        return iter(deal(self._drawn_for(self._next).plan.ids, *ranks_of_job(), drop_last=False).tolist())

    def __len__(self) -> int:
        """The number of ids of the current iteration, or of the first one before it.

        Draws its plan, except with several ranks, which draw it when it begins: until then it is the number of the
        newest plan, or of all samples.
        """
        return share(self._num_ids(self._next), ranks_of_job()[1], drop_last=False)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that the next plans depend on, and the kept plan.

        It is serializable as JSON.

        Save it on each rank: the state holds the losses that this rank has not sent to the others yet.
        """
        begun = self._begun_draw
        return {
            "version": _STATE_VERSION,
            "plan": self.rule.plan,
            "seed": self.seed,
            "next": self._next,
            "iterated": self._iterated,
            "drawn": pack(self._drawn),
            "marks": self._marks.state(),
            "losses": self.losses.state(),
            "draw": None if self._draw is None else self._draw.state(),
            "begun": None if begun is None or begun is self._draw else begun.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises `InputError` for a state of another sampler or release."""
        names = ("plan", "seed", "next", "iterated", "drawn", "marks", "losses", "draw", "begun")
        check_state(state, _STATE_VERSION, *names)
        for name, mine in (("plan", self.rule.plan), ("seed", self._given)):
            if mine is not None and state[name] != mine:
                raise state_mismatch(
                    f"the state was taken with {name}={state[name]!r}, this sampler has {mine!r}: give the same"
                )
        drawn = unpack(state["drawn"], np.int32)
        self.seed = self._given if state["seed"] is None else state["seed"]
        self.losses.load(state["losses"])
        self._drawn[:] = drawn
        self._marks.load(state["marks"])
        self._next, self._iterated = state["next"], state["iterated"]
        self._draw, self._drawn_by = Draw.load(state["draw"], self.num_samples), ranks_of_job()[1]
        self._begun_draw = Draw.load(state["begun"], self.num_samples) or self._draw


def _check_serving(plan: str, on_miss: Any, packages: Any, benefit: Any, *, scored: bool) -> None:
    """Raise `InputError` if the serving arguments do not match the plan or the cache."""
    if on_miss == "substitute" and plan in ("unbiased", "infobatch"):
        raise argument_conflict(
            f"on_miss='substitute' serves samples that were not drawn, and plan={plan!r} has weights for those "
            "that were: use on_miss='swap' or 'fetch'"
        )
    if packages is not None and (on_miss == "fetch" or not scored):
        raise cache_required(
            f"packages={str(packages)!r} needs the cache of a CachedDataset(..., policy='importance'), and "
            "on_miss='swap' or 'substitute'"
        )
    if benefit is not None:
        parse_number(benefit, "benefit")
