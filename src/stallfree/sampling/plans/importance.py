"""`ImportanceSampler`: fewer samples per epoch, chosen by their losses and by what the cache holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError
from stallfree.frames import short_traceback
from stallfree.pipeline.randomness import draw_seed
from stallfree.sampling.plans.active_epoch import ActiveEpoch, Marks
from stallfree.sampling.plans.losses import Losses
from stallfree.sampling.plans.plan import Plan
from stallfree.sampling.plans.probabilities import check_cache, check_share
from stallfree.sampling.plans.reduce import agree, of_first_rank, ranks_of_job, resident_to_all, steps_of
from stallfree.sampling.plans.retention import Retention
from stallfree.sampling.plans.sampling_plans import PLANS, Draw, Known, Rule, draw_plan, last_eighth
from stallfree.sampling.plans.serving import ON_MISS, Residents
from stallfree.sampling.plans.states import check_state, pack, unpack
from stallfree.sampling.ranks import deal, share
from stallfree.units import parse_size, parse_whole

Array = npt.NDArray[Any]

_STATE_VERSION = 1

_LARGE = 1 << 17
"""From so many samples on, the next plan is drawn while the last fiftieth of the epoch is trained."""

_NEARLY = 0.98

_LOWEST = 0.4
"""Lowest probability of a missing sample, as a share of their mean."""

_LEAN = 0.8
"""How much the probability of a missing sample depends on the rank of its loss; see docs/decisions/importance.md."""


class ImportanceSampler:
    """Draws the samples of each epoch by their losses, so that an epoch costs less storage I/O.

    Give it to `stallfree.DataLoader` as `sampler`: the loader then yields `Batch(data, ids, weights)`. Train on
    `(losses * batch.weights).mean()` with one loss per sample, and hand the losses to `update`. Under another loader it
    gives ids like any sampler, the weights are in `plan(epoch).weights`.

    | plan | draws | weights |
    | --- | --- | --- |
    | "unbiased" | all residents; of the others so many as `target_io` says, rather of high loss | 1 / p, see below |
    | "icache" | each with the share of recent losses that its own is not below, to the power `beta` | none |
    | "cis" | as "icache", but all samples are fetched, and the weight says which to train on | 0 or 1 |
    | "infobatch" | leaves out a share `prune` of those below the mean loss | 1 / p |
    | "full" | all | none |

    Sources: "icache" and "cis" Chen et al., "iCACHE", HPCA 2023; "infobatch" Qin et al., ICLR 2024; the score "shade"
    Khan et al., FAST 2023. An *L-sample* is one whose probability is below 1/2, the others are *H-samples*.

    In the plan "unbiased", p is a known function of the rank of the loss and of residency, and the weighted gradient
    is, in expectation, that of the full epoch. On a cache of the policy "importance" the residents rotate: what is
    fetched comes in, and one that was served goes. There the weight is one over the share that is drawn of the samples
    of about the same rank, and the gradient is right as far as, among them, residency says nothing about it; where
    losses are mostly noise it was off by 1% of its norm. That is for one job at a time, and for the policies "minio"
    (residents stay) and "importance": others let residents go before their turn, which costs operations.

    Args:
        num_samples: of the data set; ids are 0 to `num_samples` - 1.
        plan: see above.
        cache: the `SampleCache` of the data set (`CachedDataset.cache`), or whatever has `resident(ids)`. None: nothing
            counts as resident.
        seed: of the draws, and of the order within an epoch. If None, it is drawn from torch's generator with the first
            plan, and all ranks have that of rank 0.
        target_io: storage operations per epoch, as a share of those the full plan would cost with this cache.
        p_min: no sample has a lower probability ("unbiased"). None: 0.4 * `target_io`.
        beta: power of the selection probability ("icache", "cis"): 1 draws about half of the samples, 2 a third.
        prune: share of the samples below the mean loss to leave out ("infobatch").
        max_age: a sample that was last served so many epochs ago is drawn. It may be dropped by `drop_last`, or because
            an epoch ends early; then it is drawn again in the next one.
        warm_up: epochs at the start that take all samples; before there is a loss, there is nothing to choose by.
        full_every: each so many epochs one takes all samples; None: never. (3 is the default of the sampler that was
            released with iCACHE.)
        num_epochs: of the training; then "infobatch" takes all samples in the last eighth of it. None: never.
        normalize: scale of the weights in a batch; "cis" has none, 0 and 1 say who is chosen. "epoch": one factor per
            epoch, for which their mean over it is 1 in expectation; "batch": the mean in each batch is 1, which is a
            little biased; None: 1 / p as it is, whose sum over the epoch is `num_samples` in expectation.
        score: "loss", or "shade": the rank of the loss within its batch.
        on_miss: what happens when an L-sample, one that is rather left out than drawn, is in the plan and not in the
            cache. "swap": another one that is, and is in the plan too, is served first; "substitute": any L-sample is
            served that is in the cache and was not yet used in this epoch (the paper's way); "fetch": it is fetched.
            None: "swap" in the plan "icache", else "fetch". "substitute" is not for plans with weights.
        low_region: share of the cache that may be filled out of `packages` with L-samples that are still to be served,
            above 0 and up to 1 (the paper starts with 0.1). None: the share of the requests of the epoch before that
            were for L-samples.
        packages: a folder on a fast disk, or None. Two processes beside the loader then pack L-samples that are
            missing into files of 1 MiB or more there, and fill the region of L-samples out of them, each file by one
            sequential read. The files stay, and serve the next run of the same data. For a `stallfree.DataLoader` and a
            cache of the policy "importance"; `on_miss` is then "swap" unless it is given.
        write_budget: bytes of packages that one loader may write.
        benefit: how many times longer an epoch of this job takes without the cache. Where several jobs use one cache of
            the policy "importance", what a sample is worth is the sum of benefit times importance over the jobs (those
            with a benefit of 1.5 or more, if there are any). None: found from the times of the epoch before; or measure
            it with `stallfree.measure_benefit`.

    Attributes:
        benefit: as given, or as measured so far.
        measures: whether a loader is to measure it.

    In a job of several ranks (torch.distributed) the losses of all are brought together when a plan is drawn, which
    they must all do at the same time; all have the same plan, of which each takes its part, in equally many batches. A
    sample that another node of a `RedisStore` holds is resident for all ranks; without torch.distributed, nobody knows.

    Raises `InputError` for arguments that cannot be used.
    """

    plans_epochs = True
    """A loader serves the plans, and does not iterate this like a sampler."""

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
        normalize: str | None = "epoch",
        score: str = "loss",
        on_miss: str | None = None,
        low_region: float | None = None,
        packages: str | Path | None = None,
        write_budget: int | str = "1GiB",
        benefit: float | None = None,
    ) -> None:
        self.num_samples = parse_whole(num_samples, "num_samples", 1)
        scored = getattr(getattr(cache, "policy", None), "name", "") == "importance"
        _check_names(plan, normalize, score, on_miss)
        check_cache(cache, self.num_samples, on_miss)
        _check_serving(plan, on_miss, packages, benefit, scored=scored)
        self.cache = cache
        self.seed = self._given = None if seed is None else parse_whole(seed, "seed")
        self.normalize = normalize
        swaps = packages is not None or (plan == "icache" and cache is not None)
        self.on_miss = on_miss or ("swap" if swaps else "fetch")
        self.low_region = None if low_region is None else check_share("low_region", low_region)
        self.packages = None if packages is None else Path(packages)
        self.write_budget = parse_size(write_budget, "write_budget")
        self.measures = benefit is None
        self.benefit = 1.0 if benefit is None else float(benefit)
        self.rule = _rule(
            plan,
            beta=check_share("beta", beta, high=100),
            prune=check_share("prune", prune, high=0.99),
            target_io=check_share("target_io", target_io),
            p_min=p_min,
            max_age=parse_whole(max_age, "max_age", 1),
            warm_up=parse_whole(warm_up, "warm_up", 0),
            full_every=0 if full_every is None else parse_whole(full_every, "full_every", 1),
            full_from=last_eighth(num_epochs, plan),
            rotating=plan == "unbiased" and scored,
        )
        self.losses = Losses(self.num_samples, relative=score == "shade")
        self._drawn = np.full(self.num_samples, -1, np.int32)
        self._marks = Marks(self.num_samples)
        self._draw: Draw | None = None
        self._ahead: tuple[int, Future[Draw]] | None = None
        self._next = 0
        self._iterated = False
        self._retention = Retention(cache, self.rule.rotating) if scored else None
        self._begun_draw: Draw | None = None

    # -- plans --------------------------------------------------------------------------------------------------------

    def plan(self, epoch: int) -> Plan:
        """The ids of an epoch in order, and their weights: 1 / p, not normalized, or None in plans without weights.

        The plan of the epoch asked for last is kept; another one is drawn from what is known at that moment. With
        several ranks it is that of all of them together.
        """
        return self._drawn_for(parse_whole(epoch, "epoch", 0)).plan

    def _drawn_for(self, epoch: int) -> Draw:
        draw = self._draw
        if draw is None or draw.plan.epoch != epoch:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[0] == epoch:
                draw = ahead[1].result()
            else:
                self.losses.pause_at = None
                self.losses.collect()
                draw = draw_plan(self.rule, self._known(), self._seed_of_all(), epoch)
            self._take(draw)
            self._marks.apply(self._drawn)  # what was received since the snapshot
            self._marks.plan(draw.plan, self._drawn)
        return draw

    def _seed_of_all(self) -> int:
        if self.seed is None:
            self.seed = of_first_rank(draw_seed())
        return self.seed

    def _known(self) -> Known:
        """What has been received up to now, by all ranks."""
        agree(self.losses, self._marks.served, self._marks.ended)  # so no rank is in the epoch before any more
        there = resident_to_all(self.cache, self.num_samples)
        self._marks.apply(self._drawn)
        return Known(self.losses.last.copy(), self._drawn.copy(), there)

    def _take(self, draw: Draw) -> None:
        """Make `draw` the one that is kept."""
        self._draw = draw
        if self.num_samples >= _LARGE and self.on_miss != "substitute" and ranks_of_job().count == 1:
            self.losses.pause_at = self.losses.taken + math.ceil(_NEARLY * len(draw.plan.ids))

    def _draw_ahead(self) -> None:
        """Draw the next plan in a thread, from what has been received up to now."""
        assert self._draw is not None
        epoch, known = self._draw.plan.epoch + 1, self._known()
        thread = ThreadPoolExecutor(1, thread_name_prefix="stallfree-plan")
        self._ahead = epoch, thread.submit(draw_plan, self.rule, known, self._seed_of_all(), epoch)
        thread.shutdown(wait=False)

    # -- losses -------------------------------------------------------------------------------------------------------

    @short_traceback
    def update(self, ids: Any, losses: Any) -> None:
        """Hand in the losses of samples that were served: `Batch.ids`, and one loss for each.

        Both may be tensors on any device; nothing waits for the device. A loss that is NaN or infinite is left
        out, with one warning: the sample keeps the loss that it had. Raises `InputError` if
        there is not one number for each id, or an id is none of the data set's; for ids on a device, at a later call.
        """
        self.losses.add(ids, losses)
        if self.losses.pause_at is not None and self.losses.taken >= self.losses.pause_at:
            self.losses.pause_at = None
            self._draw_ahead()
            self.losses.collect(wait=False)

    # -- an epoch that is served --------------------------------------------------------------------------------------

    def begin(self, epoch: int, batch_size: int, *, drop_last: bool = False) -> ActiveEpoch:
        """An epoch that is about to be served. Sets the scores of what the cache is to keep.

        For a loader that serves the plan itself, as stallfree's does.
        """
        draw = self._drawn_for(parse_whole(epoch, "epoch", 0))
        self._next, self._iterated = epoch, True
        batches = self.batches(epoch, batch_size, drop_last=drop_last)
        if self._retention is not None:
            self._retention.begin(draw, self.losses.last, self.benefit, self._seed_of_all())
        self._marks.begin()
        return self._begun(draw, batches)

    def resume(self, rest: list[Array]) -> ActiveEpoch:
        """The epoch that `load_state_dict` brought, of which the batches `rest` are left.

        Raises `InputError` if it brought none.
        """
        if self._begun_draw is None:
            raise InputError(
                "the state has no plan: it was taken before the first epoch, and has no batches left. Begin a new epoch"
            )
        self._marks.ended[:] = False
        return self._begun(self._begun_draw, rest)

    def _begun(self, draw: Draw, batches: list[Array]) -> ActiveEpoch:
        self._begun_draw = draw
        plan, weighted = draw.plan, self.rule.plan != "cis"
        weights = np.ones(self.num_samples, np.float32)
        if plan.weights is not None:
            scale = len(plan.ids) / self.num_samples if self.normalize == "epoch" and weighted else 1.0
            weights[plan.ids] = plan.weights * np.float32(scale)
        per_batch = self.normalize == "batch" and weighted
        me = ranks_of_job()
        return ActiveEpoch(draw, batches, weights, per_batch, self._marks, self._retention, me.rank, me.count)

    def close(self) -> None:
        """This job is no longer one of those that use the cache. It is again, when another epoch begins."""
        if self._retention is not None:
            self._retention.close()

    def expected_samples(self, epochs: int, *, start: int = 0) -> int:
        """About how many samples the epochs from `start` to `epochs` - 1 serve, as far as is known beforehand.

        For a schedule that goes by samples seen (`BySamples`). A cache that is not full yet is taken to hold what fits,
        if samples are as large as those that are in it: so ask again when it is full, for the schedule.
        "icache" and "infobatch" depend on the losses; for them it is the share that evenly spread losses give. Those of
        all ranks together.
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
        servers = getattr(cache, "servers", None)
        held = float(np.mean(cache.resident(ids) if servers is None else servers.known(ids)))
        stats = cache.stats() if hasattr(cache, "stats") else None
        if stats is None or not min(stats.resident_items, stats.capacity_bytes) or stats.evictions or stats.rejected:
            return held
        room: float = stats.capacity_bytes * stats.resident_items / max(1, stats.resident_bytes)
        return max(held, min(1.0, room / max(1, len(ids))))

    # -- the part of this rank ----------------------------------------------------------------------------------------

    def batches(self, epoch: int, batch_size: int, *, drop_last: bool = False) -> list[Array]:
        """The ids of each batch of an epoch, for this rank, as planned.

        With several ranks all have the same number of batches, whose sizes differ by one at most; with `drop_last` all
        batches are full.
        """
        ranks, size = ranks_of_job(), parse_whole(batch_size, "batch_size", 1)
        return [step[ranks.rank] for step in steps_of(self.plan(epoch).ids, ranks.count, size, drop_last)]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch. Without it, each iteration is another one, counted from 0."""
        self._next, self._iterated = parse_whole(epoch, "epoch", 0), False

    @property
    def next_epoch(self) -> int:
        """The epoch that comes after the one that was served last."""
        return self._next + self._iterated

    def __repr__(self) -> str:
        return f"ImportanceSampler({self.num_samples}, plan={self.rule.plan!r})"

    def __iter__(self) -> Iterator[int]:
        self._next = self.next_epoch
        self._iterated = True
        ranks = ranks_of_job()
        return iter(deal(self.plan(self._next).ids, ranks.rank, ranks.count, drop_last=False).tolist())

    def __len__(self) -> int:
        """How many ids this iteration gives, before the first the next one; its plan is drawn for that."""
        return share(len(self.plan(self._next).ids), ranks_of_job().count, drop_last=False)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next plans depend on, and the plan that is kept; fit for JSON.

        Take it on each rank: the losses that it has not sent to the others yet are in its own state.
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
        """Go on as where `state_dict` was taken. Raises `InputError` for a state of another sampler or release."""
        names = ("plan", "seed", "next", "iterated", "drawn", "marks", "losses", "draw", "begun")
        check_state(state, _STATE_VERSION, *names)
        for name, mine in (("plan", self.rule.plan), ("seed", self._given)):
            if mine is not None and state[name] != mine:
                raise InputError(
                    f"the state was taken with {name}={state[name]!r}, this sampler has {mine!r}: give the same"
                )
        drawn = unpack(state["drawn"], np.int32)
        self.seed = self._given if state["seed"] is None else state["seed"]
        self.losses.load(state["losses"])
        self._drawn[:] = drawn
        self._marks.load(state["marks"])
        self._next, self._iterated = state["next"], state["iterated"]
        self._draw = self._ahead = None
        if state["draw"] is not None:
            self._take(Draw.load(state["draw"], self.num_samples))
        self._begun_draw = self._draw
        if state["begun"] is not None:
            self._begun_draw = Draw.load(state["begun"], self.num_samples)


def _rule(plan: str, *, target_io: float, p_min: float | None, **given: Any) -> Rule:
    lowest = _LOWEST * target_io if p_min is None else check_share("p_min", p_min)
    if lowest > target_io:
        raise InputError(
            f"p_min={p_min} is above target_io={target_io}: give a smaller p_min, no draw has so few operations"
        )
    return Rule(plan, target_io=target_io, p_min=lowest, lean=_LEAN, **given)


def _check_serving(plan: str, on_miss: Any, packages: Any, benefit: Any, *, scored: bool) -> None:
    """Raise `InputError` for a way of serving that does not fit the plan or the cache."""
    if on_miss == "substitute" and plan in ("unbiased", "infobatch"):
        raise InputError(
            f"on_miss='substitute' serves samples that were not drawn, and plan={plan!r} has weights for those "
            "that were: use on_miss='swap' or 'fetch'"
        )
    if packages is not None and (on_miss == "fetch" or not scored):
        raise InputError(
            f"packages={str(packages)!r} needs the cache of a CachedDataset(..., policy='importance'), and "
            "on_miss='swap' or 'substitute'"
        )
    number = isinstance(benefit, (int, float)) and not isinstance(benefit, bool)
    if benefit is not None and not (number and 0 < benefit < math.inf):
        raise InputError(f"benefit={benefit!r}: give a number above 0, how many times faster with the cache")


def _check_names(plan: Any, normalize: Any, score: Any, on_miss: Any) -> None:
    for name, value, known in (
        ("plan", plan, PLANS),
        ("normalize", normalize, ("epoch", "batch", None)),
        ("score", score, ("loss", "shade")),
        ("on_miss", on_miss, (*ON_MISS, None)),
    ):
        if value not in known:
            raise InputError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, known))}")
