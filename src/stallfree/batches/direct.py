"""Makes samples of a data set without a cache or threads, by indexing it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from stallfree.batches.batch_state import Samples, raise_from
from stallfree.batches.sample_access import SampleAccess
from stallfree.pipeline.protocol import sample_error
from stallfree.sources.mapped import MapSource


def index_samples(reader: SampleAccess, ids: list[int], seed: int, epochs: Sequence[int], *, skip: bool) -> Samples:
    """Return the samples of a batch; see `Reader.finish`. Their `storage_bytes` are estimated from the first sample.

    Calls `__getitems__` with all ids if the data set has it and has drawn no random numbers so far.
    """
    source = reader.source
    if type(source) is MapSource and reader.randomness.draws is False and not skip and not len(reader.rest):
        samples = Samples(ids, _index_all(source, ids))
    else:
        samples = _index_each(reader, ids, seed, epochs, skip)
    samples.misses = len(ids)
    samples.estimate_bytes()
    return samples


def _index_all(source: MapSource, ids: list[int]) -> list[Any]:
    dataset = source.dataset
    several = getattr(dataset, "__getitems__", None)
    if several is not None:
        with contextlib.suppress(Exception):  # the loop below finds the sample that fails
            found = several(ids)
            if isinstance(found, (list, tuple)) and len(found) == len(ids):
                return list(found)
    values: list[Any] = []
    add = values.append
    try:
        for id in ids:
            add(dataset[id])
    except Exception as error:
        raise_from(sample_error(error, source, ids[len(values)], "fetching"), error)
    return values


def _index_each(reader: SampleAccess, ids: list[int], seed: int, epochs: Sequence[int], skip: bool) -> Samples:
    samples, rest, randomness, source = Samples(), reader.rest, reader.randomness, reader.source
    get = partial(operator.getitem, source.dataset) if type(source) is MapSource else source.fetch
    for id, epoch in zip(ids, epochs, strict=True):
        doing = "fetching"
        try:
            if reader.seeds_fetch:
                randomness.seed(seed, epoch, id)
            value = get(id)
            if len(rest):
                doing = "preparing"
                if reader.seeds:
                    randomness.seed(seed, epoch, id)
                value = rest(value)
        except Exception as error:
            samples.add_failure(error, source, id, doing, skip=skip)
        else:
            samples.ids.append(id)
            samples.values.append(value)
    return samples
