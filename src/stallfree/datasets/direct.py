"""Makes samples of a data set without a cache or threads, by indexing it.

In the training process, a batch is `collate_fn([dataset[id] for id in ids])` and nothing more (`PlainBatches`). Workers
and threads seed each sample (`index_samples`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stallfree.datasets.batch_state import Samples
from stallfree.datasets.sample_access import SampleAccess
from stallfree.notes import note_sample, note_samples
from stallfree.sources.mapped import MapSource


class PlainBatches:
    """Batches of a data set, made as torch's loader makes them: random numbers come from the global generators.

    Args:
        reader: of the data set, which has no cache.
        collate: makes a batch of a list of samples, or of one sample if `single`.
        single: a batch is a single sample.
        skip: leave out samples that fail.
    """

    def __init__(self, reader: SampleAccess, collate: Callable[[Any], Any], single: bool, skip: bool) -> None:
        self._source = source = reader.source
        self._dataset: Any = source.dataset if type(source) is MapSource else _Prepared(reader)
        self._several = None if single or skip else getattr(self._dataset, "__getitems__", None)
        self._collate, self._single, self._skip = collate, single, skip

    def make(self, ids: list[int]) -> tuple[Any, Samples | None]:
        """Return the batch of `ids`; and, if samples were left out, those that are in it.

        Raises the error of a sample that fails, unless it is left out.
        """
        samples = None
        if self._several is not None:
            try:
                values: Any = self._several(ids)
            except Exception as error:
                note_samples(error, ids, "fetching")
                raise
        elif not self._skip:
            values = self._each(ids)
        else:
            samples = self._with_gaps(ids)
            values = samples.values
            if not values and ids:
                return None, samples
        try:
            return self._collate(values[0] if self._single else values), samples
        except Exception as error:
            note_samples(error, ids if samples is None else samples.ids, "collating")
            raise

    def _each(self, ids: list[int]) -> list[Any]:
        dataset, left = self._dataset, iter(ids)
        try:
            return [dataset[id] for id in left]
        except Exception as error:
            note_sample(error, self._source, ids[-1 - operator.length_hint(left)], "fetching")
            raise

    def _with_gaps(self, ids: list[int]) -> Samples:
        samples = Samples()
        for id in ids:
            try:
                samples.values.append(self._dataset[id])
            except Exception as error:
                samples.add_failure(error, self._source, id, "fetching", skip=True)
            else:
                samples.ids.append(id)
        return samples


class _Prepared:
    """The samples of a source and its transforms, by index."""

    def __init__(self, reader: SampleAccess) -> None:
        self._reader = reader

    def __getitem__(self, id: int) -> Any:
        return self._reader.rest(self._reader.source.fetch(id))


def index_samples(reader: SampleAccess, ids: list[int], seed: int, epochs: Sequence[int], *, skip: bool) -> Samples:
    """Return the samples of a batch; see `Reader.finish`. Their `storage_bytes` are estimated from the first sample.

    Calls `__getitems__` with all ids, as torch's loader does. If it returns samples that draw random numbers, these are
    made one by one: then they are a function of each id.
    """
    source, samples = reader.source, None
    if type(source) is MapSource and not skip and not reader.rest.transforms:
        samples = _index_all(reader, source, ids, seed, epochs)
    if samples is None:
        samples = _index_each(reader, ids, seed, epochs, skip)
    samples.misses = len(ids)
    samples.estimate_bytes()
    return samples


def _index_all(
    reader: SampleAccess, source: MapSource, ids: list[int], seed: int, epochs: Sequence[int]
) -> Samples | None:
    """Return the samples, or the batch that `__getitems__` made of them; None if each is to be made by itself."""
    dataset, randomness = source.dataset, reader.randomness
    several = None if reader.single else getattr(dataset, "__getitems__", None)
    if randomness.draws is True and not reader.whole:
        return None
    if several is None:
        return None if randomness.draws is None else Samples(ids, _index_plainly(source, ids))
    randomness.seed(seed, epochs[0], ids[0])
    try:
        found = several(ids)
    except Exception as error:
        note_samples(error, ids, "fetching")
        raise
    reader.whole = reader.whole or not isinstance(found, list) or len(found) != len(ids)
    if reader.whole:
        return Samples(ids, found, whole=True)
    return None if randomness.moved() else Samples(ids, found)


def _index_plainly(source: MapSource, ids: list[int]) -> list[Any]:
    dataset, left = source.dataset, iter(ids)
    try:
        return [dataset[id] for id in left]
    except Exception as error:
        note_sample(error, source, ids[-1 - operator.length_hint(left)], "fetching")
        raise


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
