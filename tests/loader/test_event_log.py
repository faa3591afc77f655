"""The log of events that a loader writes."""

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from cached_data import Numbers
from children import Child
from loader_data import Failing, Made, floats
from stallfree.analysis.simulate import Event, read_events

SAMPLES, BATCH = 10, 3
BATCHES = 4


class Slow(Numbers):
    """Storage that takes a while."""

    def _record(self, id: int) -> Any:
        time.sleep(0.005)
        return super()._record(id)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def count(events: list[Event]) -> Counter[tuple[str, int, int]]:
    """How often each thing was done to each batch."""
    return Counter((event.what, event.epoch, event.batch) for event in events)


def each(*done: str, epochs: int = 1) -> Counter[tuple[str, int, int]]:
    """Each of these done to every batch of some epochs, once."""
    return Counter((what, epoch, batch) for what in done for epoch in range(epochs) for batch in range(BATCHES))


def check_order(events: list[Event], begun: float) -> None:
    """Nobody does two things at once, a batch is ready before it is used, and all is in the time of the log."""
    assert all(0 <= event.start <= event.end <= time.monotonic() - begun for event in events)
    actors = {event.actor for event in events} - {"gather"}  # which is two threads
    for actor in actors:
        own = sorted((event for event in events if event.actor == actor), key=lambda event: (event.start, event.end))
        for one, following in itertools.pairwise(own):
            assert one.end <= following.start + 2e-6
    ready = {(event.epoch, event.batch): event.end for event in events if event.what in ("prep", "gather")}
    used = {(event.epoch, event.batch): event.start for event in events if event.what == "compute"}
    assert used.keys() <= ready.keys()
    assert all(ready[batch] <= start + 2e-6 for batch, start in used.items())


@pytest.mark.parametrize(
    ("workers", "method"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
)
def test_every_batch_of_every_epoch(workers: int, method: str | None, path: Path) -> None:
    path.write_text("of an earlier run")
    begun = time.monotonic()
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": method, "event_log": path}
    with sf.DataLoader(Slow(SAMPLES), BATCH, **options) as loader:
        for epoch in range(2):
            for _ in loader:
                time.sleep(0.002)
            events = read_events(path)  # complete after each epoch
            assert count(events) == each("fetch", "prep", "compute", epochs=epoch + 1)
        stats = loader.stats()
    check_order(events, begun)
    assert {event.actor for event in events} <= {"device", *(f"loader {number}" for number in range(max(1, workers)))}
    for what, seconds in (("fetch", stats.fetch_seconds), ("prep", stats.prep_seconds)):
        spent = sum(event.end - event.start for event in events if event.what == what)
        assert spent == pytest.approx(seconds, abs=1e-4)
    steps = [event for event in events if event.what == "compute"]
    assert {event.actor for event in steps} == {"device"}
    assert all(event.end - event.start >= 0.002 - 2e-6 for event in steps)


def test_batches_out_of_the_cache(path: Path) -> None:
    begun = time.monotonic()
    with sf.CachedDataset(Numbers(SAMPLES), capacity="4MiB") as dataset:
        assert len(list(dataset)) == SAMPLES  # all are stored
        with sf.DataLoader(dataset, BATCH, num_workers=2, event_log=path) as loader:
            assert len(list(loader)) == BATCHES
    events = read_events(path)
    assert count(events) == each("gather", "compute")
    assert {event.actor for event in events} == {"gather", "device"}
    check_order(events, begun)


def test_batches_that_fail_or_are_empty(path: Path) -> None:
    data = Made(SAMPLES, Failing(ValueError, (3, 4, 5)))
    iterator = iter(sf.DataLoader(data, BATCH, event_log=path))
    next(iterator)
    with pytest.raises(ValueError, match="3"):
        next(iterator)
    assert len(list(iterator)) == 2
    assert count(read_events(path)) == each("prep", "compute") - Counter([("prep", 0, 1), ("compute", 0, 1)])
    assert len(list(sf.DataLoader(data, BATCH, on_error="skip", event_log=path))) == 3
    assert count(read_events(path)) == each("fetch", "prep", "compute") - Counter([("compute", 0, 1)])


def test_a_full_disk_ends_the_log_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    loader = sf.DataLoader(Made(SAMPLES, floats), BATCH, event_log="/dev/full")
    assert [len(list(loader)) for _ in range(2)] == [BATCHES, BATCHES]
    [said] = [record.message for record in caplog.records if "/dev/full" in record.message]
    assert said == "the log of events /dev/full ends here, it cannot be written: [Errno 28] No space left on device"


def test_a_forked_child_writes_nothing_into_it(path: Path) -> None:
    loader = sf.DataLoader(Made(SAMPLES, floats), BATCH, event_log=path)
    list(loader)
    before = path.read_bytes()
    assert Child(lambda: list(loader)).wait() == 0
    assert path.read_bytes() == before
