"""Compares samples that a data set makes itself with those that are made of its records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from stallfree.errors import InputError, cut_random, cut_refused, text_of
from stallfree.ipc.forked import call_in_child
from stallfree.notes import note_sample
from stallfree.pipeline.classify import Trust, make_twice, spread
from stallfree.pipeline.compose import Compose, Transform, mark_of
from stallfree.pipeline.randomness import Handle, States, find_generators, global_generators, sample_seed
from stallfree.pipeline.reached import random_name
from stallfree.pipeline.values import same
from stallfree.sources.cutting.bare import BareSource
from stallfree.sources.cutting.recorded import Plan
from stallfree.sources.detach import with_values

_SAMPLES = 8
"""Samples that are compared."""


class Check:
    """Finds the form of the records of a data set, and compares samples.

    Args:
        dataset: the data set. Copies of it are read.
        names: the dotted attributes that hold a transform.
        transforms: what they hold.
    """

    def __init__(self, dataset: Any, names: Sequence[str], transforms: Sequence[Transform]) -> None:
        self._dataset, self._names, self._transforms = dataset, names, transforms
        self._kind = type(dataset).__name__
        self._what = f"{self._kind} cannot be cut at {' and '.join(map(repr, names))}"
        self._handles: list[Handle] = []

    def source(self, ids: Sequence[int]) -> tuple[BareSource, list[Transform]]:
        """The source of the records and the steps after it, compared on `ids` and others. Raises `InputError`."""
        plan = call_in_child(partial(self._find_plan, ids), f"the cut of {self._kind}")
        source = self._bare()
        steps = None if plan is None else source.make_flat(plan)
        return source, source.make_planned() if steps is None else steps

    def _find_plan(self, ids: Sequence[int]) -> Plan | None:
        """The plan of all samples if their records are flat; None if each record has its plan. In a child process."""
        self._handles = [*global_generators(), *find_generators(self._dataset)]
        reading = self._bare()
        samples = self._samples([*spread(len(self._dataset), _SAMPLES), *ids])
        plans = [self._plan(reading, id) for id in samples]
        self._require_calls(plans, list(samples))
        self._require_steady(list(samples))
        if all(plan == plans[0] for plan in plans) and self._flat(plans[0], samples):
            return plans[0]
        steps = reading.make_planned()
        for id, sample in samples.items():
            self._require_same(id, sample, reading, steps)
        return None

    def _bare(self) -> BareSource:
        try:
            return BareSource(self._dataset, self._names, self._transforms)
        except Exception as error:
            raise cut_refused(
                f"{self._what}: it cannot be copied with another object in that place ({type(error).__name__}: "
                f"{text_of(error)}): make the transform a plain attribute"
            ) from error

    def _samples(self, ids: Sequence[int]) -> dict[int, Any]:
        """The samples as the data set makes them, without those that cannot be read."""
        whole = with_values(self._dataset, dict(zip(self._names, self._transforms, strict=True)))
        samples: dict[int, Any] = {}
        problem: Exception | None = None
        for id in dict.fromkeys(ids):
            try:
                samples[id] = self._own(whole, id)
            except Exception as error:
                if problem is None:
                    problem = error
                    note_sample(error, self._dataset, id, "fetching")
        if not samples:
            assert problem is not None
            raise problem
        return samples

    def _own(self, whole: Any, id: int) -> Any:
        self._seed(id)
        return whole[id]

    def _seed(self, id: int) -> None:
        for place, handle in enumerate(self._handles):
            handle.seed(sample_seed(place, 0, id))

    def _plan(self, reading: BareSource, id: int) -> Plan:
        """The plan of sample `id`. Raises `InputError` if it cannot be made without its transforms, or is random."""
        self._seed(id)
        states = States(self._handles)
        try:
            plan, _ = reading.recorded(id)
        except InputError:
            raise
        except Exception as error:
            raise cut_refused(
                f"{self._what}: sample {id} cannot be made without the output of the transform "
                f"({type(error).__name__}: {text_of(error)}): let __getitem__ return the output as it is, and move "
                "what follows into the transform"
            ) from error
        if states.moved():
            self._refuse_random(f"it drew random numbers when sample {id} was read", certain=True)
        return plan

    def _require_calls(self, plans: Sequence[Plan], ids: Sequence[int]) -> None:
        """Raise `InputError` if a transform is never called."""
        seen = {number for plan in plans for number, _, _ in plan.calls}
        tried = ", ".join(map(str, ids))
        for number, name in enumerate(self._names):
            if number not in seen:
                raise cut_refused(
                    f"{self._kind} does not call its {name} for any of the samples {tried}: leave it "
                    "out, or name a sample that it is called for with check=[id]. A data set that keeps its samples "
                    "after the transform cannot be cut"
                )

    def _require_steady(self, ids: Sequence[int]) -> None:
        """Raise `InputError` if what is read depends on chance."""
        if mark_of(self._dataset) is False:
            return
        reading = self._bare()
        bare = with_values(self._dataset, dict.fromkeys(self._names))
        if name := random_name(bare):
            self._refuse_random(f"its code names {name}", certain=False)
        states = States(find_generators(bare))
        for id in ids:
            fetch = partial(reading.fetch, id)
            _, found = make_twice(fetch, fetch, (), [Trust.of(bare)], states)
            if found is not None:
                self._refuse_random(f"when sample {id} was read, {found.why}", certain=found.certain)

    def _refuse_random(self, why: str, *, certain: bool) -> NoReturn:
        if certain:
            raise cut_random(
                f"{self._what}: it draws random numbers outside of the transform, which a cache would freeze: {why}. "
                "Make all random changes in the transform"
            )
        raise cut_random(
            f"{self._what}: it may give something else each time, also without the transform, which a cache would "
            f"freeze: {why}. Make all random changes in the transform; or, if what is read is always the same, say so "
            "with stallfree.mark_deterministic(dataset)"
        )

    def _flat(self, plan: Plan, samples: dict[int, Any]) -> bool:
        """Whether flat records give the same samples."""
        reading = self._bare()
        steps = reading.make_flat(plan)
        if steps is None:
            return False
        try:
            for id, sample in samples.items():
                self._require_same(id, sample, reading, steps)
        except InputError:  # then with one step for all, which calls the transforms just as the data set does
            return False
        return True

    def _require_same(self, id: int, sample: Any, reading: BareSource, steps: Sequence[Transform]) -> None:
        self._seed(id)
        try:
            made = Compose(steps)(reading.fetch(id))
        except Exception as error:
            raise cut_refused(
                f"{self._what}: sample {id} is made by the data set, but not if the transform runs afterwards "
                f"({type(error).__name__}: {text_of(error)}): call the transform in __getitem__ with values that stay "
                "as they are"
            ) from error
        equal = same(sample, made)
        if equal:
            return
        if equal is None:
            raise cut_refused(
                f"{self._what}: its samples, such as {id} of type {type(sample).__name__}, cannot be compared: return "
                "tensors, arrays, numbers, texts, or containers of these"
            )
        again = self._own(with_values(self._dataset, {}), id)
        if not same(sample, again):
            raise cut_refused(
                f"{self._what}: sample {id} differs each time, also from equal states of all generators, so it "
                "cannot be compared: let the transform draw from a generator that it keeps, or from a global one"
            )
        raise cut_refused(
            f"{self._what}: sample {id} differs if the transform runs after the rest of __getitem__: call the "
            "transform with what it needs, and return its output as it is"
        )
