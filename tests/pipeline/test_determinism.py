"""Which steps may be cached: marks, signs of libraries, trials, and what happens when none of them helps."""

import functools
import random
import secrets
import threading
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from standins import V1, foreign, global_states, torchvision_compose
from torch import nn

import stallfree as sf
from loader_data import same
from stallfree import Compose, OnItem, StallfreeWarning, mark_deterministic, mark_random, split

V2 = "torchvision.transforms.v2._geometry"
IMAGE = np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)


def plain(value: Any) -> Any:
    return value


def verdict(transform: Any, probe: Any = None) -> tuple[bool, str]:
    """(random, reason) of the first step, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StallfreeWarning)
        first = split(transform, probe).verdicts[0]
    return first.random, first.reason


@mark_deterministic
def steady(value: Any) -> Any:
    return random.random()


@mark_deterministic
class Steady:
    __slots__ = ()

    def __call__(self, value: Any) -> Any:
        return value

    prepare = __call__


class Jittered(Steady):
    """Not marked: its base class does not speak for it."""


@mark_random
class Noise(Steady):
    pass


class Louder(Noise):
    """Marked random, as its base class."""


@dataclass(frozen=True)
class Frozen(Steady):
    pass


@pytest.mark.parametrize(("transform", "random"), [
    (steady, False), (Steady(), False), (Jittered(), True), (Noise(), True), (Louder(), True),
    (mark_deterministic(Louder()), False), (mark_random(Frozen()), True), (mark_random(foreign("Resize", V1)), True),
    (mark_deterministic(functools.partial(len)), False), (OnItem(0, steady), False), (functools.partial(steady), False),
    (foreign("Lambda", V1, lambd=mark_random(foreign("Any", "x"))), True),
    (mark_deterministic(Compose([foreign("RandomCrop", V1), plain])), False),
])  # fmt: skip
def test_marks(transform: Any, random: bool) -> None:
    expected = (True, "undecided") if type(transform) is Jittered else (random, "mark")
    assert verdict(transform) == expected


@pytest.mark.parametrize("thing", [len, np.asfortranarray, Steady().prepare, Steady(), "text".count])
def test_what_takes_no_attributes_takes_no_mark(thing: Any) -> None:
    with pytest.raises(sf.InputError, match=r"takes no attributes, so no mark: mark functools\.partial"):
        mark_random(thing)
    assert verdict(mark_random(functools.partial(thing))) == (True, "mark")


@pytest.mark.parametrize(("transform", "expected"), [
    *((foreign(name, V1), (False, "torchvision")) for name in ("Resize", "ToTensor", "NotYetKnown")),
    *((foreign(name, V2), (False, "torchvision")) for name in ("CenterCrop", "Normalize", "ToDtype")),
    *((foreign(name, V1), (True, "torchvision")) for name in ("RandomResizedCrop", "ColorJitter", "GaussianBlur")),
    *((foreign(name, V2), (True, "torchvision")) for name in ("RandomHorizontalFlip", "ElasticTransform")),
    (foreign("TrivialAugmentWide", "torchvision.transforms.autoaugment"), (True, "torchvision")),
    (foreign("RandomApply", V1, transforms=[foreign("Resize", V1)]), (True, "torchvision")),
    (foreign("MyCrop", "mine", type(foreign("RandomCrop", V1))), (True, "torchvision")),
    (foreign("MyResize", "mine", type(foreign("Resize", V1))), (True, "undecided")),
    (foreign("Lambda", V1, lambd=plain), (True, "undecided")), (foreign("Resize", "mine"), (True, "undecided")),
    (OnItem("image", foreign("Resize", V1)), (False, "torchvision")),
    (functools.partial(foreign("Pad", V2)), (False, "torchvision")),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_signs_of_torchvision(transform: Any, expected: tuple[bool, str]) -> None:
    assert verdict(transform) == expected


@pytest.mark.libraries
def test_signs_of_albumentations() -> None:
    A = pytest.importorskip("albumentations")

    class UsersFlip(A.ImageOnlyTransform):  # type: ignore[misc, name-defined]
        def apply(self, img: Any, **params: Any) -> Any:
            return img[:, ::-1]

    resize, turned = A.Resize(4, 4, p=1), A.HorizontalFlip(p=0.5)
    deterministic = [
        *(resize, A.Normalize(p=1), A.HorizontalFlip(p=1), A.GaussNoise(p=0), A.CenterCrop(4, 4, p=1)),
        *(A.PadIfNeeded(16, 16, p=1), A.LongestMaxSize(4, p=1), A.Compose([resize, A.Compose([A.Normalize(p=1)])])),
    ]
    drawing = [
        *(turned, A.GaussNoise(p=1), A.RandomCrop(4, 4, p=1), A.PadIfNeeded(16, 16, position="random", p=1)),
        *(A.LongestMaxSize([4, 8], p=1), A.Compose([resize], p=0.5), A.Compose([resize, turned])),
        *(A.OneOf([resize], p=1), UsersFlip(p=0.5)),
    ]
    assert {*map(verdict, deterministic)} == {(False, "albumentations")}
    assert {*map(verdict, drawing)} == {(True, "albumentations")}
    assert verdict(UsersFlip(p=1)) == verdict(A.Lambda(image=plain, p=1)) == (True, "undecided")
    assert not verdict(UsersFlip(p=1), IMAGE)[0]
    assert not verdict(closure_over(resize), IMAGE)[0]
    assert verdict(closure_over(turned), IMAGE)[0]


@pytest.mark.libraries
def test_signs_of_monai() -> None:
    M = pytest.importorskip("monai.transforms")

    class Own(M.Transform):  # type: ignore[misc, name-defined]
        def __call__(self, data: Any) -> Any:
            return data

    class OwnRandom(Own, M.traits.RandomizableTrait):  # type: ignore[misc, name-defined]
        pass

    deterministic = [
        *(M.ScaleIntensityd("image"), M.Spacingd("image", (1, 1, 1)), M.Compose([M.Flip()])),
        M.Compose([M.Flip(), M.ScaleIntensity()], map_items=False),
    ]
    drawing = [
        *(M.RandFlipd("image"), M.RandCropByPosNegLabeld("image", "label", (4, 4)), M.RandLambda(plain)),
        *(M.OneOf([M.Flip()]), M.Compose([M.Flip(), M.RandFlip()], lazy=True), OwnRandom()),
    ]
    assert {*map(verdict, deterministic)} == {(False, "monai")}
    assert {*map(verdict, drawing)} == {(True, "monai")}
    assert verdict(M.Lambda(plain)) == verdict(Own()) == (True, "undecided")


class OwnGenerator:
    """Draws from a generator of its own, and returns what it gets."""

    def __init__(self, generator: Any, draw: Any = lambda rng: rng.random()) -> None:
        self.parts, self.draw = {"rng": [generator]}, draw

    def __call__(self, value: Any) -> Any:
        self.draw(self.parts["rng"][0])
        return value


class Buffered:
    """Returns the same array each time, with new content."""

    def __init__(self) -> None:
        self.buffer = np.zeros(3)

    def __call__(self, value: Any) -> Any:
        self.buffer += 1
        return self.buffer


MODULE_RNG = np.random.default_rng()


def with_module_rng(value: Any) -> Any:
    return value if MODULE_RNG.random() < 0.999 else None


def closure_over(thing: Any) -> Any:
    return lambda value: thing(image=value)["image"]


@pytest.mark.parametrize("transform", [
    lambda value: value + random.random(), lambda value: value if np.random.rand() < 2 else None,
    lambda value: [value, torch.randint(2, ())], lambda value: value if secrets.randbelow(2) < 2 else 0,
    OwnGenerator(np.random.default_rng()), OwnGenerator(np.random.RandomState()), OwnGenerator(random.Random()),
    OwnGenerator(random.SystemRandom()), OwnGenerator(torch.Generator(), lambda rng: torch.rand(1, generator=rng)),
    with_module_rng, functools.partial(lambda rng, value: (rng.random(), value)[1], MODULE_RNG),
    nn.Sequential(nn.Dropout(0.5)), Buffered(),
    lambda value: np.random.default_rng(0).permutation(value),  # until the user marks the step
])  # fmt: skip
def test_a_trial_finds_randomness(transform: Any) -> None:
    value = torch.ones(4) if isinstance(transform, nn.Module) else IMAGE
    assert verdict(transform, value)[0]
    assert verdict(mark_deterministic(transform), value) == (False, "mark")


@pytest.mark.parametrize(("transform", "value"), [
    (plain, 1), (np.ascontiguousarray, IMAGE), (torch.from_numpy, IMAGE), (Image.fromarray, IMAGE),
    (lambda value: value * np.nan, np.ones(3)), (lambda value: value.rotate(90), Image.fromarray(IMAGE)),
    (lambda value: {"a": [value, None, b"x"], "b": (1.5, float("nan"))}, "text"),
    (lambda value: np.memmap(__file__, np.uint8, "r")[:value], 1000), (lambda value: value.add_(1), torch.zeros(3)),
    (nn.Sequential(nn.Dropout(0.5)).eval(), torch.ones(3)),
    (lambda value: value if not isinstance(value, Generator) else 0, 1),
    (lambda value: value if time.time() > 0 and hash(id(value)) else 0, 1),
])  # fmt: skip
def test_a_trial_finds_determinism(transform: Any, value: Any) -> None:
    assert not verdict(transform, value)[0]


def test_a_trial_leaves_no_trace() -> None:
    counted = Buffered()
    owner = OwnGenerator(np.random.default_rng(1))
    record = {"image": IMAGE.copy()}
    before = global_states()

    def spoil(value: Any) -> Any:
        value["image"][:] = 0
        return random.random(), np.random.rand(), torch.rand(())

    for transform in (counted, owner, spoil, with_module_rng):
        verdict(transform, record)
    assert same(before, global_states())
    assert owner.parts["rng"][0].random() == np.random.default_rng(1).random()
    assert (counted.buffer == 0).all()
    assert (record["image"] == IMAGE).all()


def test_split() -> None:
    resize, crop, normalise = foreign("Resize", V1), foreign("RandomCrop", V1), foreign("Normalize", V1)
    parts = split(Compose([resize, torchvision_compose(plain, crop), normalise]), 1)
    assert parts.deterministic.transforms == (resize, plain)
    assert parts.random.transforms == (crop, normalise)
    assert [v.random for v in parts.verdicts[:3]] == [False, False, True]
    assert "cached  deterministic" in str(parts)
    pipeline = Compose([lambda v: v + 1, lambda v: 6 / (v - 5), mark_random(lambda v: v - 3)])
    parts = split(pipeline, 5)  # each trial is of what the steps before gave
    assert len(parts.deterministic) == 2
    assert parts.random(parts.deterministic(5)) == pipeline(5) == 3
    assert [split(nothing).verdicts for nothing in (None, Compose([]))] == [(), ()]


def test_a_step_of_a_library_that_draws_is_random_from_then_on() -> None:
    step = foreign("Resize", V1, __call__=lambda self, value: value + random.random())
    assert [verdict(step), verdict(step, 1), verdict(step)] == [(False, "torchvision"), *[(True, "seen")] * 2]


@pytest.mark.parametrize(("transform", "probe", "why"), [
    (plain, None, "no sample"), (lambda value: value["missing"], {}, "KeyError"),
    (lambda value: threading.Lock(), 1, "cannot be compared"),
])  # fmt: skip
def test_what_cannot_be_decided_is_random_with_one_warning(transform: Any, probe: Any, why: str) -> None:
    with pytest.warns(StallfreeWarning, match=why) as caught:
        parts = split(Compose([transform, plain, plain]), probe)
    assert len(caught) == 1
    assert parts.verdicts[0].step in str(caught[0].message)
    assert "stallfree.mark_deterministic" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert [v.reason for v in parts.verdicts] == ["undecided", "after", "after"]
    with pytest.warns(StallfreeWarning, match="a step before it raised ZeroDivisionError"):
        split(Compose([mark_deterministic(lambda value: 1 / 0), plain]), 1)


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


def test_a_step_that_refers_to_what_cannot_be_looked_at_is_cached() -> None:
    """Some namespaces of libraries raise for any attribute that they do not have."""
    step = functools.partial(lambda value, kept: value + len(kept), kept=[Hostile(), (Hostile(),)])
    with sf.CachedDataset([*map(np.array, range(6))], transform=step, capacity="1MiB") as cached:
        assert [int(value) for value in cached] == [*range(2, 8)]
        assert cached.stats().resident_items == 6


def test_one_known_step_of_a_composition_does_not_speak_for_the_others() -> None:
    known = mark_deterministic(lambda value: 2 * value)
    step = functools.partial(Compose([known, lambda value: value + random.random()]))
    with pytest.warns(StallfreeWarning, match="cannot tell"):
        assert split(step).random.transforms == (step,)
