"""Random configurations: `DataLoader` yields what torch's loader yields, with the same errors and the same draws."""

import contextlib
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

import stallfree as sf
from loader_data import same
from torch_cases import ERRORS, Case, case_of


@pytest.mark.parametrize(("first", "count"), [
    *((seed, 1) for seed in range(1, 25)), *(pytest.param(n, 50, marks=pytest.mark.slow) for n in range(0, 2000, 50)),
])  # fmt: skip
def test_random_configurations(first: int, count: int) -> None:
    for seed in range(first, first + count):
        case = case_of(seed)
        theirs, ours = (outcomes(kind, case) for kind in (torch.utils.data.DataLoader, sf.DataLoader))
        label = f"seed {seed}: {case.text}"
        assert len(ours) == len(theirs), label
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert equal(our, their, case), f"{label}\noutcome {number}: {our!r:.500}\nof torch: {their!r:.500}"


def outcomes(kind: Any, case: Case) -> list[Any]:
    """The length, batches and errors of a loader, what the loop draws meanwhile, and the generators afterwards."""
    random.seed(case.seed), np.random.seed(case.seed), torch.manual_seed(case.seed)
    arguments = case.make()
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more workers than cores, and of ranks
        loader = kind(**arguments)
        with contextlib.suppress(TypeError):
            found.append(len(loader))
        for epoch, (most, twice) in enumerate(case.epochs):
            if isinstance(arguments.get("sampler"), DistributedSampler):
                arguments["sampler"].set_epoch(epoch + 5)
            iterators = [iter(loader), iter(loader)] if twice else [iter(loader)]
            taken = [take(iterators, most, draws=case.workers == 0)]
            found += [samples_of(taken[0], most)] if case.shuffled else taken[0]
            del iterators
    if isinstance(loader, sf.DataLoader):
        loader.close()
    state = [torch.get_rng_state()]
    return [*found, state if case.workers else [*state, random.getstate(), np.random.get_state(legacy=False)]]


def take(iterators: list[Any], most: int | None, draws: bool) -> list[Any]:
    """The next batches and errors of iterators that take turns; at most `most` of each."""
    found: list[Any] = []
    left = dict(enumerate(iterators))
    count = 0
    while left and count != most:
        count += 1
        for number, iterator in list(left.items()):
            try:
                found.append((number, next(iterator)))
            except StopIteration:
                del left[number]
                found.append((number, "end"))
            except Exception as error:
                found.append(error)
            if draws:
                found.append(torch.rand(()))
    return found


def samples_of(taken: list[Any], most: int | None) -> Any:
    """What an epoch of the loader's own order has in common with one of torch's."""
    batches = [found for found in taken if isinstance(found, tuple)]
    sizes = [(number, len(batch) if isinstance(batch, list) else batch == "end") for number, batch in batches]
    samples = [(number, repr(sample)) for number, batch in batches if isinstance(batch, list) for sample in batch]
    return [sizes, sorted(samples) if most is None else None]


def equal(our: Any, their: Any, case: Case) -> bool:
    if isinstance(their, Exception):  # torch cannot make every error of a worker again
        return isinstance(our, type(their)) or (case.workers > 0 and isinstance(our, ERRORS))
    return same(our, their)
