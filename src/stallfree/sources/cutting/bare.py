"""A data set without its transforms as a source: what it calls them with is in its records."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stallfree.errors import cut_refused
from stallfree.pipeline.compose import Compose, Transform
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.randomness import find_generators, global_generators, preserved
from stallfree.pipeline.values import private
from stallfree.sources.base import BaseSource
from stallfree.sources.cutting.recorded import (
    CallTransforms,
    Chain,
    Plan,
    called,
    chains_of,
    flat_record,
    part_of,
    planned_record,
    steps_on_places,
    taken,
)
from stallfree.sources.cutting.stand_in import Output, Recorder, StandIn, refuse
from stallfree.sources.detach import with_values

_FORMAT = 1


class BareSource(BaseSource):
    """The records of `dataset` without its transforms. See recorded.py for their form.

    Each thread of each process reads a copy of its own, so that files which the data set opens are never shared.

    Args:
        dataset: the data set; it is copied.
        names: the dotted attributes that hold a transform.
        transforms: what they hold.

    Attributes:
        plan: that all samples have, if their records are flat; None if each record has its plan.
    """

    threads = False

    def __init__(self, dataset: Any, names: Sequence[str], transforms: Sequence[Transform]) -> None:
        self.pipeline = Compose([])
        self.plan: Plan | None = None
        self._chains: list[Chain] = []
        self._names, self._transforms = tuple(names), tuple(transforms)
        self._kind = type(dataset).__name__
        self._without = with_values(dataset, dict.fromkeys(names))
        self._lengths: dict[str, int] = {}
        self._local = threading.local()

    def recorded(self, id: int) -> tuple[Plan, list[Any]]:
        """The plan of sample `id`, and the sample and its calls without the outputs. See `taken`."""
        recorder, dataset = self._mine()
        sample = recorder.record(dataset, id)
        return taken(sample, recorder.calls)

    def make_flat(self, plan: Plan) -> list[Transform] | None:
        """Make flat records from now on, of samples of this plan; the steps for them, or None if there are none."""
        chains = chains_of(plan, self._transforms)
        if chains is None:
            return None
        self.plan, self._chains = plan, chains
        return steps_on_places(plan, chains, self._transforms)

    def make_planned(self) -> list[Transform]:
        """Make records with a plan from now on; the step for them."""
        self.plan = None
        return [CallTransforms(self._transforms)]

    def __len__(self) -> int:
        return len(self._without)

    def _record(self, id: int) -> Any:
        plan, tree = self.recorded(id)
        if self.plan is None:
            return planned_record(plan, tree)
        if plan != self.plan:
            name = self._names[0]
            raise cut_refused(
                f"for sample {id}, {self._kind} calls its transforms in another way than for the samples that cut has "
                f"compared: name it there, as in cut(dataset, {name!r}, check=[{id}])"
            )
        return flat_record(tree, self._chains)

    def _where(self, id: int) -> str:
        return ""

    def _mine(self) -> tuple[Recorder, Any]:
        """The recorder and the copy of this thread."""
        own = getattr(self._local, "own", None)
        if own is None or own[0] != os.getpid():
            recorder = Recorder(self._kind, self._names, self._length_of)
            stand_ins = {name: StandIn(recorder, number) for number, name in enumerate(self._names)}
            own = self._local.own = os.getpid(), recorder, with_values(self._without, stand_ins)
        return own[1], own[2]

    def _length_of(self, output: Output) -> int:
        """The length of an output: that of the first one which was unpacked at its place. That call is made."""
        key = f"{output.call.number} {output.path}"
        if key not in self._lengths:
            calls = output.recorder.calls
            plan, tree = taken(None, calls[: 1 + next(at for at, call in enumerate(calls) if call is output.call)])
            with preserved([*global_generators(), *find_generators(self._transforms)]):
                real = part_of(called(plan, private(tree), self._transforms)[1][-1], output.path)
            if not isinstance(real, (tuple, list, np.ndarray, torch.Tensor)):
                refuse(output, f"its output, of type {type(real).__name__}, was iterated over")
            self._lengths[key] = len(real)
        return self._lengths[key]

    def fingerprint(self) -> str:
        """The fingerprint of the data set without its transforms, and the form of the records."""
        return f"BareSource {_FORMAT} {fingerprint(self._without, self._names, self.plan and self.plan.text())}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"BareSource({self._kind}, {len(self)} samples)"
