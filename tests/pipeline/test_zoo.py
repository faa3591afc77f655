"""No cache freezes what is random, and what is deterministic is cached: the entries of the zoo, and the zoo's judge."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zoo
import zoo_unseen
from zoo_entry import ENTRIES, Entry, rows
from zoo_ways import WAYS

import frozen as fr
import stallfree as sf

KINDS = {kind: [entry for entry in ENTRIES if entry.kind == kind] for kind in ("random", "steady", "either")}
FEW = ("auto, sf 0", "whole, sf 0", "smart, torch 0")
SOME = (
    *("crop_or_pad", "minority_class", "only_the_last", "rare_with_generator_made_inside", "clock_for_some"),
    *("counter_every_ten_calls", "drawn_in_a_pool_for_some", "steady_then_hidden", "data_set_that_crops_some"),
)
UNSEEN = [entry for entry in ENTRIES if entry.draws is zoo_unseen.fires]
SOME_UNSEEN = (
    *("library_that_makes_a_generator", "pil_effect_spread", "opencv_normal", "c_library", "token"),
    *("hash_of_the_time", "file_of_random_bytes"),
)
SOME_STEADY = ("decode_resize_normalise", "tokenise", "random_in_names_only", "collects_statistics")
QUICK = ("auto, sf 2", "smart, sf 0", "whole, sf 0")
LEAST = 0.9
"""Share of the deterministic entries that are to be cached."""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What entries keep in circles, such as folders, is gone at the end of a test."""
    yield
    gc.collect()


def named(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def bad(entry: Entry, ways: tuple[str, ...]) -> dict[str, str]:
    """What is wrong, by way."""
    verdicts = zoo.judge(entry, ways=ways)
    assert {verdict.way for verdict in verdicts} <= set(ways)
    assert verdicts
    wrong = ("frozen", "wrong", "error") if entry.kind != "steady" else ("anew", "refused", "wrong", "error")
    return {verdict.way: f"{verdict.what}: {verdict.note}" for verdict in verdicts if verdict.what in wrong}


class TestEntries:
    @pytest.mark.parametrize("name", SOME)
    def test_random_ones_stay_random(self, name: str) -> None:
        assert bad(named(name), FEW) == {}

    @pytest.mark.parametrize("name", SOME_STEADY)
    def test_deterministic_ones_are_cached(self, name: str) -> None:
        assert bad(named(name), FEW) == {}

    @pytest.mark.slow
    @pytest.mark.parametrize("entry", KINDS["random"] + KINDS["either"], ids=lambda entry: entry.name)
    def test_random_ones_stay_random_in_every_cache(self, entry: Entry) -> None:
        assert bad(entry, tuple(WAYS)) == {}

    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    def test_most_deterministic_ones_are_cached_in_every_cache(self) -> None:
        found = {entry.name: bad(entry, tuple(WAYS)) for entry in KINDS["steady"]}
        assert not [name for name, ways in found.items() if any(text.startswith("wrong") for text in ways.values())]
        problems = {name: ways for name, ways in found.items() if ways}
        assert len(problems) <= (1 - LEAST) * len(found), problems

    def test_there_are_enough_of_all(self) -> None:
        assert len(KINDS["random"]) >= 50
        assert len(KINDS["steady"]) >= 20


def unseen() -> list[Any]:
    marks = {entry.name: [pytest.mark.libraries] for entry in UNSEEN if entry.name.startswith(zoo_unseen.LARGE)}
    return [pytest.param(entry, id=entry.name, marks=marks.get(entry.name, [])) for entry in UNSEEN]


class TestUnseen:
    """What draws for 1 sample in 16, and leaves no trace in the global generators."""

    COUNT = 128

    def stuck(self, entry: Entry, way: str, workers: int = 0) -> list[int]:
        """The samples that are frozen after epoch 3, of those that are drawn for."""
        ids = [id for id in range(self.COUNT) if entry.draws(id)]
        assert len(ids) == self.COUNT // zoo_unseen.EVERY
        return fr.frozen_in(way, rows(self.COUNT), entry.make(), ids, workers)

    def test_there_are_enough(self) -> None:
        assert len(UNSEEN) >= 12

    @pytest.mark.parametrize("way", ["step", "data set"])
    @pytest.mark.parametrize("entry", unseen())
    def test_is_not_frozen(self, entry: Entry, way: str) -> None:
        assert self.stuck(entry, way) == []

    @pytest.mark.parametrize(("way", "workers"), [("auto", 0), ("auto, cut", 0), ("data set", 2)])
    @pytest.mark.parametrize("name", SOME_UNSEEN)
    def test_some_in_other_ways(self, name: str, way: str, workers: int) -> None:
        assert self.stuck(named(name), way, workers) == []

    @pytest.mark.parametrize("name", SOME_UNSEEN)
    def test_some_from_the_first_epoch_on(self, name: str) -> None:
        """The samples are fewer than those which are made twice in any case."""
        assert bad(named(name), FEW) == {}

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("way", list(fr.WAYS))
    @pytest.mark.parametrize("entry", unseen())
    def test_in_many_runs(self, entry: Entry, way: str, workers: int) -> None:
        if workers and entry.local:
            pytest.skip("its samples differ in one process only")
        assert [self.stuck(entry, way, workers) for _ in range(20)] == [[]] * 20


def entry_of(step: object, kind: str, **details: object) -> Entry:
    usual = {"draws": lambda id: True, "base": None, "coarse": False, "local": False, "prefix": False}
    return Entry("made_here", kind, lambda: step, rows, **(usual | details))  # type: ignore[arg-type]


class TestJudge:
    """With steps that are marked wrongly, so that caches do what they should not."""

    @pytest.mark.parametrize("way", ["prepared, sf 2", "smart, sf 0", "shared"])
    def test_sees_that_a_step_is_frozen(self, way: str) -> None:
        entry = entry_of(sf.mark_deterministic(lambda x: x + np.random.normal()), "random")
        assert [verdict.what for verdict in zoo.judge(entry, ways=[way])] == ["frozen"]

    @pytest.mark.parametrize("way", QUICK)
    def test_sees_that_a_step_runs_anew(self, way: str) -> None:
        entry = entry_of(sf.mark_random(lambda x: x * 2), "steady")
        expected = ["cached"] if way.startswith("whole") else ["anew"]
        assert [verdict.what for verdict in zoo.judge(entry, ways=[way])] == expected

    def test_sees_that_a_few_samples_are_frozen(self) -> None:
        entry = entry_of(None, "random")
        draw = np.random.default_rng(0)
        plain, found = ([[draw.random() for _ in range(48)] for _ in range(3)] for _ in range(2))
        assert zoo.frozen(entry, plain, found) == ""
        found[1][7] = found[2][7] = found[0][7]
        assert "such as [7]" in zoo.frozen(entry, plain, found)
        still = entry_of(None, "random", draws=lambda id: id != 7)
        assert zoo.frozen(still, plain, found) == ""

    def test_sees_that_a_rare_draw_is_kept(self) -> None:
        entry = entry_of(None, "random", base=lambda record: record)
        bases = [zoo.sealed(row) for row in rows()]
        plain, found = ([list(bases) for _ in range(3)] for _ in range(2))
        for epoch, id in ((0, 3), (0, 9), (1, 20), (2, 31)):
            plain[epoch][id] = "drawn"
        found[0][5] = found[1][6] = found[2][40] = "drawn"
        assert zoo.frozen(entry, plain, found) == ""
        for epoch in found:
            epoch[11] = "drawn and kept"
        assert "[11] is kept" in zoo.frozen(entry, plain, found)
        assert "0 changes" in zoo.frozen(entry, plain, [list(bases) for _ in range(3)])
