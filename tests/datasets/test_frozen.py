"""No cache freezes an augmentation, wherever its random numbers come from."""

import pytest

import frozen as fr
import generator_places

PLACES = sorted(generator_places.fresh(1))
SEEDS = range(2, 22)
SOME = ("class_attribute", "context_variable", "lazy_global", "python_generator", "two_dots_away")
COUNT = 32


def still(way: str, place: str, seed: int, *, hidden: bool, workers: int = 0) -> list[int]:
    """The samples that do not change after epoch 3 if each is flipped with p = 0.5."""
    step = generator_places.fresh(seed, hidden=hidden)[place]
    return fr.frozen_in(way, fr.rows(COUNT), step, range(COUNT), workers)


def most(ids: list[int]) -> bool:
    """Whether more samples of the four late epochs are the same than chance allows: 4 of 32 are expected."""
    return len(ids) > COUNT // 2


@pytest.mark.parametrize(
    ("way", "place", "hidden", "workers"),
    [
        *(("step", place, False, 0) for place in PLACES[::2]),
        *(("data set", place, True, 0) for place in sorted({*PLACES[1::2], *SOME})),
        *((way, SOME[0], True, 0) for way in ("auto", "auto, cut")),
        *(("step", place, True, 2) for place in SOME[:2]),
    ],
)
def test_a_flip_by_a_seeded_generator(way: str, place: str, hidden: bool, workers: int) -> None:
    assert len(PLACES) >= 25
    assert not most(still(way, place, 1, hidden=hidden, workers=workers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "hidden", "workers"),
    [
        ("step", False, 0),
        ("data set", False, 0),
        ("step", True, 2),
        ("auto", True, 2),
        *((w, True, 0) for w in fr.WAYS),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_by_many_seeds(place: str, way: str, hidden: bool, workers: int) -> None:
    assert [seed for seed in SEEDS if most(still(way, place, seed, hidden=hidden, workers=workers))] == []


@pytest.mark.parametrize("way", ["step", "data set"])
def test_a_rare_flip(way: str) -> None:
    """Of 1,000 samples that are flipped with p = 0.02, 75 are expected to differ between late epochs."""
    step = generator_places.fresh(1, p=0.02, hidden=True)["class_attribute"]
    assert len(fr.frozen_in(way, fr.rows(1000), step, range(1000))) < 975
