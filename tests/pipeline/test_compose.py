"""Compose, OnItem and flatten: one flat row of steps, whatever the library, with the meaning unchanged."""

import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from standins import V1, foreign, torchvision_compose
from torch import nn

from stallfree import Compose, InputError, OnItem, mark_deterministic
from stallfree.pipeline.compose import flatten

Pair = namedtuple("Pair", ["image", "label"])


def add_one(value: Any) -> Any:
    return value + 1


def double(value: Any) -> Any:
    return value * 2


class Backwards(Compose):
    def __call__(self, value: Any) -> Any:
        return Compose(reversed(self.transforms))(value)


identity, hooked = nn.Identity(), nn.Sequential(nn.Identity())
hooked.register_forward_hook(lambda *_: None)
KEPT: list[Any] = [
    *(foreign("RandomApply", V1, transforms=[add_one]), foreign("Compose", "somewhere.else", transforms=[add_one])),
    *(Backwards([add_one, double]), hooked, mark_deterministic(Compose([add_one, double])), OnItem(0, add_one)),
]


@pytest.mark.parametrize(("transform", "steps"), [
    (None, ()), (add_one, (add_one,)),
    (Compose([add_one, Compose([double, Compose([add_one])])]), (add_one, double, add_one)),
    (torchvision_compose(add_one, torchvision_compose(double)), (add_one, double)),
    (torchvision_compose(add_one, double, module="torchvision.transforms.v2._container"), (add_one, double)),
    (nn.Sequential(identity, nn.Sequential(identity)), (identity, identity)),
    (Compose([torchvision_compose(Compose([add_one]))]), (add_one,)), (OnItem(0, Compose([])), ()),
    *((kept, (kept,)) for kept in KEPT),
])  # fmt: skip
def test_steps(transform: Any, steps: tuple[Any, ...]) -> None:
    assert flatten(transform) == steps
    row = Compose([] if transform is None else [transform])
    assert (row.transforms, len(row), list(row)) == (steps, len(steps), [*steps])


@pytest.mark.parametrize(("key", "container", "changed"), [
    (0, (0, "cat"), (1, "cat")), (-1, ("cat", 1), ("cat", 2)), (1, ["cat", 1], ["cat", 2]),
    (0, Pair(1, "cat"), Pair(2, "cat")), ("image", {"image": 1, "label": "cat"}, {"image": 2, "label": "cat"}),
    ((0, 1), {(0, 1): 1}, {(0, 1): 2}), ("image", OrderedDict(label="cat", image=1), OrderedDict(label="cat", image=2)),
])  # fmt: skip
def test_on_item_changes_one_element_of_a_new_container(key: Any, container: Any, changed: Any) -> None:
    copy = pickle.loads(pickle.dumps(container))
    result = OnItem(key, add_one)(container)
    assert result == changed
    assert type(result) is type(container)
    assert container == copy


def test_on_item_of_a_composition_is_a_row_of_on_items() -> None:
    steps = flatten(OnItem(0, Compose([add_one, OnItem(1, torchvision_compose(double, double))])))
    expected = [OnItem(0, add_one), OnItem(0, OnItem(1, double)), OnItem(0, OnItem(1, double))]
    assert list(map(repr, steps)) == list(map(repr, expected))


@pytest.mark.parametrize(("use", "message"), [
    (lambda: OnItem(0, add_one)(5), "got a int"),
    (lambda: OnItem(3, add_one)((1, 2)), "tuple of 2 that has no element 3"),
    (lambda: OnItem("image", add_one)({"label": 1}), "no element 'image'"),
    (lambda: OnItem(0, 7), "7, which cannot be called"),  # type: ignore[arg-type]
    (lambda: Compose([add_one, "resize"]), "Compose got 'resize', which cannot be called"),  # type: ignore[list-item]
    (lambda: Compose(add_one), "give a list"),  # type: ignore[arg-type]
])  # fmt: skip
def test_bad_input_is_named(use: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        use()


@pytest.mark.libraries
def test_monai_steps_still_map_over_lists() -> None:
    monai = pytest.importorskip("monai.transforms")
    patches = monai.Lambda(lambda value: [value, value * 10])
    whole = monai.Compose([patches, monai.Lambda(add_one), monai.Compose([monai.Lambda(double)])])
    assert len(flatten(whole)) == 3
    assert Compose([whole])(3) == whole(3) == [8, 62]
    for options in ({"map_items": False}, {"lazy": True}, {"unpack_items": True}):
        compose = monai.Compose([monai.Lambda(add_one), monai.Lambda(double)], **options)
        assert flatten(compose) == (compose,)
    flip = monai.RandFlip(prob=0.5)
    choices = monai.Compose([flip, monai.OneOf([monai.Flip(), flip])])
    before = flip.R.get_state()[1].tolist()
    assert [type(step.transforms[0]).__name__ for step in flatten(choices)] == ["RandFlip", "OneOf"]
    assert flip.R.get_state()[1].tolist() == before


@pytest.mark.libraries
def test_albumentations_steps_take_mappings_and_arrays() -> None:
    A = pytest.importorskip("albumentations")
    image = np.zeros((8, 8, 3), np.uint8)
    pipeline = Compose([A.Resize(4, 6, p=1), A.Compose([A.ToFloat(max_value=255, p=1)])])
    assert pipeline(image).shape == (4, 6, 3)
    both = pickle.loads(pickle.dumps(pipeline))({"image": image, "mask": image[:, :, 0]})
    assert (both["image"].shape, both["mask"].shape) == ((4, 6, 3), (4, 6))
    assert OnItem(0, A.Resize(4, 6, p=1))((image, 1))[0].shape == (4, 6, 3)
    with pytest.raises(InputError, match="Resize got a str"):
        Compose([A.Resize(4, 4)])("text")
