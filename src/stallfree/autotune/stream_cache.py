"""`DataLoader(cache="auto")` of an iterable data set: later epochs come from what the first one has read."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from stallfree.autotune.auto_cache import AutoCache
from stallfree.batches.reader import Reader
from stallfree.batches.stream import StreamReader
from stallfree.batches.stream_recorder import DREW, FAILED, FULL, UNSTORABLE, Recorder, ids_of_streams
from stallfree.cache import SampleCache
from stallfree.cache.capacity import granted
from stallfree.datasets.private_names import token
from stallfree.errors import StallfreeError, iterable_unsupported, text_of
from stallfree.ipc.folders import default_root
from stallfree.ipc.forked import call_in_child
from stallfree.pipeline.classify.names import random_name
from stallfree.pipeline.classify.outcomes import States, Trust, make_twice
from stallfree.pipeline.compose import Compose, Transform
from stallfree.pipeline.generators import find_generators
from stallfree.pipeline.marks import mark_of
from stallfree.pipeline.settings import Settings
from stallfree.pipeline.values import private
from stallfree.sources.throttle import payload_bytes
from stallfree.units import format_size
from stallfree.workers.worker_pool import Options

_PROBED = 4
"""Samples that two iterations over a copy of the data set must give alike."""

_SMALLEST = 400
"""Bytes of the capacity per id, at least: the index has about 20 bytes for each."""

_IN_ORDER = frozenset(
    f"{kind}Iterable"
    for kind in (
        "Examples",
        "ArrowExamples",
        "RebatchedArrowExamples",
        "MappedExamples",
        "FilteredExamples",
        "FormattedExamples",
        "SelectColumns",
        "TakeExamples",
        "SkipExamples",
        "VerticallyConcatenatedMultiSourcesExamples",
    )
)
"""Parts of a stream of Hugging Face that neither shuffle nor repeat, as its state names them."""

_WHY = {
    0: "an iteration over it was not whole: a worker died, or two iterations ran at the same time",
    FULL: "it does not fit in the capacity",
    UNSTORABLE: "its samples cannot be stored",
    FAILED: "a sample failed",
    DREW: "it drew random numbers, and a cache would freeze them",
}

log = logging.getLogger("stallfree")


def auto_cache(
    dataset: Any, capacity: int | float, workers: int | None, transform: Transform | None
) -> AutoCache | StreamCache:
    """The cache that a loader of `dataset` creates by itself. Arguments as of `AutoCache`."""
    if not isinstance(dataset, IterableDataset):
        return AutoCache(dataset, capacity, workers, transform)
    if transform is not None:
        raise iterable_unsupported(
            f"transform={transform!r:.80} with an iterable {type(dataset).__name__}: let the data set apply it"
        )
    return StreamCache(dataset, granted(capacity, default_root()), workers or 0)


def _first(dataset: Any, epoch: int) -> list[Any]:
    """The first samples of a data set in an epoch."""
    if hasattr(dataset, "set_epoch") and not _is_in_order(dataset):
        dataset.set_epoch(epoch)
    return [private(sample) for sample in islice(dataset, _PROBED)]


def _is_in_order(dataset: Any) -> bool:
    """Whether this is an unshuffled stream of Hugging Face: a new epoch only has another order of its shards."""
    if type(dataset).__module__ != "datasets.iterable_dataset" or not hasattr(dataset, "state_dict"):
        return False
    kinds, states = set(), [dataset.state_dict().get("examples_iterable")]
    while states:
        state = states.pop()
        if isinstance(state, dict):
            kinds.add(state.get("type"))
            states += [part for part in state.values() if isinstance(part, (dict, list))]
        elif isinstance(state, list):
            states += state
    return bool(kinds) and kinds <= _IN_ORDER


def _look(dataset: Any) -> tuple[str, list[Any]]:
    """Return why two short iterations may differ, "" if they do not, and the samples of one, in a child process."""
    trust = [Trust.of(dataset)]
    states = States(find_generators(dataset))
    samples, found = make_twice(partial(_first, dataset, 0), partial(_first, dataset, 1), (), trust, states)
    name = random_name(dataset)
    return (found.why if found is not None else f"its code names {name}" if name else ""), samples


class StreamCache:
    """The cache of an iterable data set, with the interface of `AutoCache`.

    The first iteration that runs to its end fills it. Further ones have all samples in a new order, a function of
    (seed, epoch), and read no stream. That is so only if the data set repeats, as two short iterations over a copy of
    it show, draws no random numbers while it is read, and fits. Otherwise all iterations read it, as under torch.

    Args:
        dataset: an iterable data set.
        room: bytes of the cache.
        workers: number of worker processes.

    Attributes:
        cached: None: samples have no data set.
        decision: one line with the decision and its reason; "" before the first iteration.
        num_workers: as given.
    """

    cached = None

    def __init__(self, dataset: Any, room: int, workers: int) -> None:
        self._dataset, self._room = dataset, room
        self.num_workers, self.decision = workers, ""
        self._cache: SampleCache | None = None
        self._reader: StreamReader | None = None
        self._filling: StreamReader | None = None  # whose samples are stored
        self._example: Any = None
        self._repeats = self._watches = True

    def tuned(self, options: Options) -> Options:
        """The options of a loader's next epoch."""
        if self._reader is None:
            assert isinstance(options.reader, StreamReader)
            self._reader = options.reader
            self._probe()
        if self._cache is not None and (why := self._cache.uncached_steps):
            self._refuse(_WHY[why])
        if not self._repeats:
            return options
        if self._reader.table is None:
            return self._fill(options, self._reader)
        if options.reader.streams:
            cached = Reader(self._reader.source, self._cache, Compose([]), Compose([]))
            cached.settings = Settings(self._dataset)
            return replace(options, reader=cached)
        return options

    def end(self, samples: int, seconds: float, waited: float) -> None:
        """Use what an iteration has stored."""
        cache, reader = self._cache, self._reader
        if cache is None or reader is None or reader.table is not None:
            return
        why = cache.uncached_steps
        reader.table = ids = None if why else ids_of_streams(cache, reader.streams)
        if ids is None or not len(ids):
            self._refuse(_WHY[why] if samples else "it is empty")
        else:
            size = format_size(cache.stats().resident_bytes)
            self._say(
                f"{self._name} is cached ({len(ids):,} samples, {size}): from now on each epoch has all of them in a "
                "new order, and does not read it"
            )

    def _probe(self) -> None:
        """Find out whether the data set repeats; keep its first sample."""
        mark = mark_of(self._dataset)
        try:
            doubt, samples = call_in_child(partial(_look, self._dataset), f"the first look at {self._name}")
        except Exception as error:
            return self._refuse(f"two iterations over a copy of it raised {type(error).__name__}: {text_of(error)}")
        if not samples:
            self._refuse("it is empty")
        elif mark:
            self._refuse("it is marked as random")
        elif mark is None and doubt:
            self._refuse(
                f"it may not repeat: {doubt}. Leave out its own shuffle, as epochs from a cache are shuffled; or, if "
                "it always has the same samples, say so with stallfree.mark_deterministic(dataset)"
            )
        else:
            self._example, self._watches = samples[0], mark is None

    def _fill(self, options: Options, reader: StreamReader) -> Options:
        """Record the next iteration in a cache of its own: what another one has stored may be of other samples."""
        self._drop()
        ids = self._room // max(_SMALLEST, payload_bytes(self._example) // 4)
        name = f"stream-{token()}"
        try:
            self._cache = SampleCache(
                ids + reader.streams, capacity=self._room, fingerprint=name, name=name, example=self._example
            )
        except StallfreeError as error:
            self._refuse(text_of(error))
            return options
        recording = self._filling = copy.copy(reader)
        recording.recorder = Recorder(self._cache, self._dataset, watches=self._watches)
        return replace(options, reader=recording)

    @property
    def _name(self) -> str:
        return f"the stream {type(self._dataset).__name__}"

    def _refuse(self, why: str) -> None:
        self._repeats = False
        if self._cache is not None:
            with contextlib.suppress(StallfreeError):  # persistent workers, which go on as under torch, stop storing
                self._cache.uncache_steps(DREW)
        if self._filling is not None:
            self._filling.recorder = None
        self._drop()
        self._say(f"no cache for {self._name}: {why}")

    def _say(self, text: str) -> None:
        self.decision = text
        log.info("%s", text)
        print(f"stallfree: {text}", file=sys.stderr)

    def _drop(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._cache = None

    def close(self) -> None:
        """Remove the cache. The next iteration reads the stream again, and stores it."""
        self._drop()
        if self._reader is not None:
            self._reader.table = None
