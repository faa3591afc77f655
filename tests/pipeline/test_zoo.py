"""No cache freezes what is random, and what is deterministic is cached: the entries of the zoo, and the zoo's judge."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zoo
import zoo_entries  # noqa: F401
import zoo_unseen
from zoo import ENTRIES, WAYS, Entry, rows

import frozen as fr
import stallfree as sf

KINDS = {kind: [entry for entry in ENTRIES if entry.kind == kind] for kind in ("random", "steady", "either")}
SOME = (
    *("crop_or_pad", "minority_class", "only_the_last", "rare_with_generator_made_inside", "clock_for_some"),
    *("counter_every_ten_calls", "drawn_in_a_pool_for_some", "steady_then_hidden", "data_set_that_crops_some"),
    *("library_that_makes_a_generator", "permutation_of_numpy"),
    *("decode_resize_normalise", "tokenise", "random_in_names_only", "collects_statistics"),
)
UNSEEN = {entry.name: entry for entry in ENTRIES if entry.draws is zoo_unseen.fires}
"""What draws for 1 sample in 16, and leaves no trace in the global generators."""

NAMES = [pytest.param(name, marks=[pytest.mark.libraries] * name.startswith(zoo_unseen.LARGE)) for name in UNSEEN]
SOME_UNSEEN = ("pil_effect_spread", "c_library", "hash_of_the_time")
COUNT = 128
LEAST = 0.9
"""Share of the deterministic entries that are to be cached."""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What entries keep in circles, such as folders, is gone at the end of a test."""
    yield
    gc.collect()


def of_name(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def wrong(entry: Entry, ways: Any = WAYS, workers: int = 0) -> dict[str, str]:
    """What is wrong with an entry, by way."""
    ways = [way for way in ways if entry.records is not None or way not in ("prepared", "auto, cut")]
    if workers:  # its workers begin each epoch with the state of their parent: C code draws the same, also uncached
        ways = [way for way in ways if way != "torch's loader"]
    verdicts = {way: zoo.judge(entry, way, workers) for way in ways}
    return {way: verdict for way, verdict in verdicts.items() if verdict}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "step") for name in SOME), *((name, "window") for name in SOME[::3])]
)
def test_some_entries(name: str, way: str) -> None:
    assert wrong(of_name(name), [way]) == {}


def test_there_are_enough_entries() -> None:
    assert len(KINDS["random"]) >= 60
    assert len(KINDS["steady"]) >= 20
    assert len(UNSEEN) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("entry", KINDS["random"] + KINDS["either"], ids=lambda entry: entry.name)
def test_random_ones_stay_random_in_every_cache(entry: Entry, workers: int) -> None:
    if workers and entry.local:
        pytest.skip("its samples differ in one process only")
    assert wrong(entry, workers=workers) == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_most_deterministic_ones_are_cached_in_every_cache() -> None:
    problems = {entry.name: ways for entry in KINDS["steady"] if (ways := wrong(entry))}
    assert "other values" not in str(problems)
    assert len(problems) <= (1 - LEAST) * len(KINDS["steady"]), problems


def stuck(name: str, way: str, workers: int) -> list[int]:
    """The samples that are frozen after epoch 3, of those that are drawn for."""
    ids = [id for id in range(COUNT) if zoo_unseen.fires(id)]
    assert len(ids) == COUNT // zoo_unseen.EVERY
    return fr.frozen_in(way, rows(COUNT), UNSEEN[name].make(), ids, workers)


@pytest.mark.parametrize("name", NAMES)
def test_unseen_draws_are_not_frozen(name: str) -> None:
    assert stuck(name, "step", 0) == []


@pytest.mark.parametrize(("way", "workers"), [("auto, cut", 0), ("data set", 2)])
@pytest.mark.parametrize("name", SOME_UNSEEN)
def test_some_unseen_draws_in_other_ways(name: str, way: str, workers: int) -> None:
    assert stuck(name, way, workers) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", fr.WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_unseen_draws_in_many_runs(name: str, way: str, workers: int) -> None:
    if workers and UNSEEN[name].local:
        pytest.skip("its samples differ in one process only")
    assert [stuck(name, way, workers) for _ in range(20)] == [[]] * 20


@pytest.mark.parametrize("way", ["step", pytest.param("window", marks=pytest.mark.slow), "group"])
def test_the_judge_sees_that_a_step_is_frozen(way: str) -> None:
    step = sf.mark_deterministic(lambda x: x + np.random.normal())
    assert "48 samples are frozen" in zoo.judge(Entry("marked wrongly", "random", lambda: step), way)


def test_the_judge_sees_that_a_steady_step_runs_anew() -> None:
    def changed(x: Any) -> Any:
        return x * 2

    entry = Entry("marked wrongly", "random", lambda: sf.mark_random(changed), prefix="changed", draws=lambda id: False)
    assert "it runs anew" in zoo.judge(entry, "step")


def test_the_judge_sees_that_a_few_samples_are_frozen_or_a_rare_draw_is_kept() -> None:
    entry, numbers = Entry("made here", "random", list), np.random.default_rng(0).random((7, 48))
    assert zoo.frozen(entry, numbers.tolist()) == []
    numbers[:, 7] = 0.5
    assert zoo.frozen(entry, numbers.tolist()) == [7]
    entry = Entry("made here", "random", list, base=np.copy)
    epochs = [[*map(fr.sealed, rows())] for _ in range(7)]
    assert len(zoo.frozen(entry, epochs)) == 48
    epochs[4][3] = "drawn"
    assert zoo.frozen(entry, epochs) == []
    for epoch in epochs:
        epoch[11] = "drawn and kept"
    assert zoo.frozen(entry, epochs) == [11]
