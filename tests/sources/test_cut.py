"""`cut`: data sets split at their own transforms, with the same samples; what cannot be split is refused."""

import collections
import copy
import pickle
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import neg as negative
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

import stallfree as sf
from loader_data import same
from stallfree import InputError, OnItem
from stallfree.pipeline.compose import Source
from stallfree.sources.cut import cut_any

COUNT = 24


class Base(Dataset[Any]):
    """Arrays and labels; `get` makes a sample of the data set and the id."""

    log = ""

    def __init__(self, transform: Any = None, target_transform: Any = None, get: Any = None) -> None:
        self.transform, self.target_transform, self.get = transform, target_transform, get

    def __len__(self) -> int:
        return COUNT

    def read(self, id: int) -> Any:
        if self.log:  # in slow storage, which notes each read
            time.sleep(0.002)
            with open(self.log, "ab") as log:
                log.write(b".")
        return torch.full((2, 3), float(id)).numpy()

    def augment(self, image: Any) -> Any:
        return image + random.random()

    def __getitem__(self, id: int) -> Any:
        return (self.transform(self.read(id)), id) if self.get is None else self.get(self, id)


@dataclass(frozen=True)
class Frozen(Base):
    transform: Any = None
    get: Any = None


Pair = collections.namedtuple("Pair", "image label")


def noisy(value: Any) -> Any:
    return value + random.random() + torch.rand(()).item() + np.random.rand()


def tripled(value: Any) -> Any:
    return value * 3


def both(image: Any, mask: Any) -> Any:
    shift = random.random()
    return image + shift, mask - shift


def named(**parts: Any) -> Any:
    shift = random.random()
    return {name: value + shift for name, value in parts.items()}


def lists(**parts: Any) -> Any:
    return {name: [random.random() + value for value in values] for name, values in parts.items()}


def row(sample: Any) -> Any:
    return sample | {"image": sample["image"] + random.random()}


def crops(image: Any, shift: int) -> Any:
    return [image + random.random(), image + shift, image]


def guarded(data: Base, id: int) -> Any:
    image, label = data.read(id), id
    if data.transform:
        image = data.transform(image)
    if data.target_transform is not None:
        label = data.target_transform(label)
    return image, label


def over_subset(data: Base, id: int) -> Any:
    """As the usual wrapper does that gives a part of a data set a transform."""
    image, label = data.target_transform[id]
    return data.transform(image), label


def by_name(data: Base, id: int) -> Any:
    made = data.transform(image=data.read(id), mask=data.read(id) + 1)
    return made["image"], made["mask"], id


def by(get: Any, transform: Any = noisy, target_transform: Any = None) -> Callable[[], Any]:
    return lambda: Base(transform, target_transform, get)


FLAT: dict[str, Callable[[], Any]] = {
    "if self.transform": by(guarded), "a composition": by(None, sf.Compose([tripled, noisy])),
    "two attributes": by(guarded, noisy, negative),
    "label first": by(lambda data, id: (data.target_transform(id), data.transform(data.read(id)))[::-1], noisy, noisy),
    "in a dict": by(lambda data, id: {"image": data.transform(data.read(id)), "more": [id, {"twice": 2 * id}]}),
    "alone": by(lambda data, id: data.transform(data.read(id))), "a subset": lambda: Subset(Base(noisy), range(3, 21)),
    "over a subset": by(over_subset, noisy, Subset(Base(get=guarded), range(COUNT)[::-1])),
    "frozen": lambda: Frozen(noisy),
    "a data set in it": by(lambda data, id: data.target_transform[id], None, Base(noisy)),
    "two views": by(lambda data, id: ([data.transform(data.read(id)) for _ in "ab"], id)),
    "a chain": by(lambda data, id: (data.target_transform(data.transform(data.read(id))), id), noisy, tripled),
    "in a list": by(lambda data, id: (data.target_transform[0](data.read(id)), id), None, [noisy]),
}  # fmt: skip
PLANNED: dict[str, Callable[[], Any]] = {
    "unpacked": by(lambda data, id: (*data.transform(data.read(id), data.read(id) + 1), id), both),
    "by name": by(by_name, named),
    "items": by(lambda data, id: {name: part[0] for name, part in data.transform(a=[id], b=[-id]).items()}, lists),
    "a dict in, a dict out": by(lambda data, id: data.transform({"image": data.read(id), "label": id}), row),
    "some samples": by(lambda data, id: (data.transform(data.read(id)) if id % 3 else data.read(id), id)),
    "joined": lambda: ConcatDataset([Base(noisy, get=guarded), Base(tripled, negative, guarded)]),
    "crops": by(
        lambda data, id: ([data.target_transform(crop) for crop in data.transform(data.read(id), 1)], id), crops, noisy
    ),
    "a named tuple": by(lambda data, id: Pair(data.transform(data.read(id)), id)),
    "unused": by(lambda data, id: (data.transform(0), data.target_transform(data.read(id)))[1:], noisy, noisy),
    "in two places": by(lambda data, id: (data.transform(data.read(id)),) * 2),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "arithmetic on the output": (by(lambda data, id: data.transform(data.read(id)) / 255), "operand type(s) for /"),
    "draws of its own": (
        by(lambda data, id: data.transform(data.read(id) + random.random())),
        "outside of the transform",
    ),
    "a generator made inside": (by(None, lambda image: image + np.random.default_rng().random()), "differs each time"),
    "no transform": (lambda: [torch.zeros(2)] * 9, "no attribute of list holds a transform"),
}
WORDS = {
    **dict.fromkeys(("two attributes", "label first", "a chain", "crops", "unused"), "transform and target_transform"),
    "a subset": "dataset.transform", "a data set in it": "target_transform.transform",
    "in a list": "target_transform.0",
    "joined": "datasets.0.transform and datasets.1.transform and datasets.1.target_transform",
}  # fmt: skip
"""Where those are cut whose transform is not in `transform` alone."""


def seeded(dataset: Any, id: int) -> Any:
    random.seed(id)
    np.random.seed(id)
    torch.manual_seed(id)
    return dataset[id]


def agree(data: Source, dataset: Any) -> None:
    """Raise unless all samples of `data` are those of `dataset`, from equal states of the generators."""
    for id in range(len(dataset)):
        assert same(seeded(data, id), seeded(dataset, id)), id


@pytest.mark.parametrize("name", [*FLAT, *PLANNED])
def test_samples_are_the_same(name: str) -> None:
    dataset = (FLAT | PLANNED)[name]()
    before = dict(vars(dataset))
    data, said = cut_any(dataset)
    assert isinstance(data, Source), said
    assert said == f"cut at {WORDS.get(name, 'transform')}"
    assert len(data) == len(dataset)
    assert not data.threads  # type: ignore[attr-defined]
    agree(pickle.loads(pickle.dumps(data)) if name == "by name" else data, dataset)
    assert vars(dataset) == before
    steps = all(type(step) is OnItem or step is noisy for step in data.pipeline)
    assert steps is (name in FLAT), "steps on places of a sample are classified one by one"


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_is_given(name: str) -> None:
    make, why = REFUSED[name]
    source, said = cut_any(make())
    assert source is None
    assert why in said


@pytest.mark.parametrize("name", ["a composition", "unpacked", "joined", "draws of its own"])
def test_batches_under_auto(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by `cache="auto"` alone, with the batches of no cache; a sample that is cut is read once."""
    make, words = REFUSED[name] if name in REFUSED else ((FLAT | PLANNED)[name], WORDS.get(name, "transform"))
    log = tmp_path / "log"
    monkeypatch.setattr(Base, "log", str(log))
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5, "num_workers": 1}
    with sf.DataLoader(make(), **options) as loader:
        plain = [list(loader) for _ in range(2)]
    with sf.DataLoader(make(), cache="auto", capacity="4MiB", **options) as loader:
        batches = [list(loader)]
        read = log.stat().st_size
        batches.append(list(loader))
        assert words in loader.decision
        assert (log.stat().st_size == read) is (name not in REFUSED)
    assert same(batches, plain)
    assert not same(batches[0], batches[1])


def test_readers_are_no_transforms_and_this_process_makes_no_sample() -> None:
    calls = []

    def counted(data: Base, id: int) -> Any:
        calls.append(id)
        return data.transform(torch.tensor(data.loader(id))), id  # type: ignore[attr-defined]

    data = Base(noisy, get=counted)
    data.loader = float  # type: ignore[attr-defined]
    assert cut_any(data)[1] == "cut at transform"
    assert not calls


def test_fetch_gives_what_the_transform_is_called_with() -> None:
    data = sf.cut(Base(sf.Compose([tripled, noisy])), "transform")
    assert same(data.fetch(4), (np.full((2, 3), 4, np.float32), 4))
    assert [str(step) for step in data.pipeline] == ["OnItem(0, test_cut.tripled)", "OnItem(0, test_cut.noisy)"]
    method = Base(get=lambda data, id: (data.augment(data.read(id)), id))
    agree(sf.cut(method, "augment"), method)
    one = Base(noisy, tripled, guarded)
    agree(sf.cut(one, "transform"), one)  # one of two


def picture(id: int) -> Any:
    return (np.arange(192).reshape(8, 8, 3) * (2 * id + 7) % 251).astype(np.uint8)


@pytest.mark.filterwarnings("error::stallfree.StallfreeWarning")
@pytest.mark.libraries
def test_albumentations() -> None:
    """A composition has a length and items, as a data set has; a step keeps the parameters of its last call."""
    albumentations = pytest.importorskip("albumentations")

    def with_mask(data: Base, id: int) -> Any:
        made = data.transform(image=picture(id), mask=picture(id)[..., 0])
        return made["image"], made["mask"]

    flips = albumentations.Compose([albumentations.HorizontalFlip(), albumentations.RandomCrop(4, 4)], seed=3)
    masks = sf.cut(Base(flips, get=with_mask), "transform")
    image, mask = masks[1]
    assert image.shape == (4, 4, 3)
    assert np.array_equal(image[..., 0], mask)
    assert sf.split(masks.pipeline).verdicts[0].random
    data = Base(flips, get=lambda data, id: (data.transform(image=picture(id))["image"], id))
    source, words = cut_any(data)
    assert source is not None, words
    assert same(source.fetch(2), (picture(2), 2))
    assert type(source.pipeline.transforms[0]) is OnItem
    with sf.CachedDataset(source, capacity="4MiB") as cached:
        for _ in range(2):
            data[0]
            assert sum(len(ids) for _, ids in sf.DataLoader(cached, batch_size=8)) == COUNT


def test_files_that_are_closed_after_the_call(tmp_path: Path) -> None:
    for id in range(3):
        Image.fromarray(np.full((5, 4, 3), 10 * id, np.uint8)).save(tmp_path / f"{id}.png")

    def opened(data: Base, id: int) -> Any:
        with Image.open(tmp_path / f"{id % 3}.png") as image:
            return data.transform(image), id

    data = sf.cut(Base(np.asarray, get=opened), "transform")
    assert [data[id][0].max() for id in range(3)] == [0, 10, 20]


def test_buffers_that_are_used_again() -> None:
    buffer = np.zeros(2)

    def reused(data: Base, id: int) -> Any:
        buffer[:] = id
        return data.transform(buffer)

    data = sf.cut(Base(tripled, get=reused), "transform")
    records = [data.fetch(id) for id in range(4)]
    assert [data.pipeline(record).tolist() for record in records] == [[0, 0], [3, 3], [6, 6], [9, 9]]


def test_the_fingerprint_is_that_of_the_rest() -> None:
    one = sf.cut(Base(noisy, 1), "transform").fingerprint()
    assert one == sf.cut(Base(tripled, 1), "transform").fingerprint()
    assert one != sf.cut(Base(noisy, 2), "transform").fingerprint()


class Late(Base):
    file: Any = None

    def read(self, id: int) -> Any:
        self.file = self.file or threading.Lock()  # as a handle, it has no fingerprint and no pickle
        return super().read(id)


def test_what_is_opened_while_cut_looks_is_opened_again() -> None:
    """In a data set that opens its file late, each process has to open it for itself."""
    dataset = Late(tripled)
    data = sf.cut(dataset, "transform")
    data.fingerprint()
    assert dataset.file is None
    assert data[1][1] == 1
    agree(pickle.loads(pickle.dumps(data)), Late(tripled))


def test_threads_do_not_share_what_they_record() -> None:
    def slow(data: Base, id: int) -> Any:
        made = data.transform(data.read(id))
        time.sleep(0.002)
        return made, id

    data = sf.cut(Base(tripled, get=slow), "transform")
    with ThreadPoolExecutor(4) as pool:
        assert [image[0, 0] for image, _ in pool.map(data.fetch, range(COUNT))] == list(range(COUNT))


def as_tensor(image: Any) -> Any:
    return torch.from_numpy(image) * 1.0


def caught(output: Any) -> Any:
    try:
        return output.mean()
    except Exception:
        return output


USES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda output: output.shape, "the attribute 'shape'"), "caught": (caught, "the attribute 'mean'"),
    "reflected": (lambda output: 1 - output, "unsupported operand"),
    "comparison": (lambda output: bool((output == 3).any()), "__eq__"),
    "truth": (lambda output: 1 if (output if type(output) is not torch.Tensor else output.max()) else 0, "__bool__"),
    "torch": (lambda output: torch.stack([output, output]), "__torch_function__"),
    "tensor": (torch.as_tensor, "array_interface"), "numpy": (lambda output: np.stack([output]), "__array"),
    "slice": (lambda output: output[:1], "type slice"), "text": (lambda output: f"{output}", "__format__"),
    "copy": (copy.deepcopy, "__deepcopy__"), "length": (len, "without the output"),
    "type": (lambda output: isinstance(output, torch.Tensor), "differs if the transform runs after"),
    "hidden": (lambda output: SimpleNamespace(inner=SimpleNamespace(output=output)), "differs|compared|__reduce_ex__"),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_uses_of_the_output_are_refused(name: str) -> None:
    use, said = USES[name]
    dataset = Base(as_tensor, get=lambda data, id: (use(data.transform(data.read(id))), id))
    with pytest.raises(InputError, match=said) as caught:
        sf.cut(dataset, "transform")
    assert "Base cannot be cut at 'transform'" in str(caught.value)
    assert "sample 0" in str(caught.value)


Fixed = type("Fixed", (Base,), {"__init__": lambda self: None, "get": None, "transform": property(lambda self: noisy)})


@pytest.mark.parametrize(("make", "names", "said"), [
    (lambda: Base(noisy), ["tranform"], r"Base has no attribute 'tranform' .*: name one .* such as transform"),
    (lambda: Base(3), ["transform"], "has no attribute 'transform' that can be called"),
    (lambda: Base(noisy), ["inner.transform"], r"no attribute 'inner\.transform'"),
    (lambda: Base(noisy), [], "got no attribute"),
    (lambda: Base(noisy, noisy), ["transform", "target_transform"], "does not call its target_transform for any"),
    (Fixed, ["transform"], "make the transform a plain attribute"),
    (lambda: sf.cut(Base(noisy), "transform"), ["transform"], "apart already"),
    (lambda: Subset(Base(noisy), []), ["dataset.transform"], "length 0"),  # type: ignore[arg-type]
])  # fmt: skip
def test_what_cannot_be_cut(make: Callable[[], Any], names: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        sf.cut(make(), *names)


@pytest.mark.parametrize(("draw", "said"), [
    (lambda id: random.random(), "when sample 0 was read, it drew"),
    (lambda id: random.random() if id == COUNT - 1 else 0, f"when sample {COUNT - 1} was read, it drew"),
    (lambda id: np.random.default_rng().random(), "it returned something else for the same input"),
    (lambda id: random.random() if id < 0 else 0, r"its code names random\.random in "),
])  # fmt: skip
def test_own_draws_are_refused(draw: Callable[[int], Any], said: str) -> None:
    with pytest.raises(InputError, match=f"outside of the transform it draws .*{said}"):
        sf.cut(Base(tripled, get=lambda data, id: (data.transform(data.read(id) + draw(id)), id)), "transform")


def changed_later(data: Base, id: int) -> Any:
    """Changes the array after the transform got it, and in it its output."""
    image = data.read(id)
    made = data.transform(image)
    image += 5
    return made, id


def keeping(data: Base, id: int) -> Any:
    data.target_transform = data.target_transform or {}
    if id not in data.target_transform:
        data.target_transform[id] = data.transform(data.read(id))
    return data.target_transform[id]


def lagging(data: Base, id: int) -> Any:
    before, data.target_transform = data.target_transform, data.transform(data.read(id))
    return data.target_transform, before


@pytest.mark.parametrize(("dataset", "said"), [
    (Base(lambda image: image, get=changed_later), "sample 0 differs if the transform runs after"),
    (Base(lambda image: image + np.random.default_rng().random()), "sample 0 differs each time"),
    (Base(tripled, get=keeping), "keeps its samples"),
    (Base(tripled, get=lagging), r"cut at 'transform': when sample \d+ was made, .* kept from another sample"),
    (Base(np.negative, get=lambda data, id: data.transform(id) * data.transform.nin), "the attribute 'nin' of the"),
    (Base(lambda id: iter(range(3)), get=lambda data, id: [*data.transform(id)]), "'range_iterator' has no len"),
])  # fmt: skip
def test_samples_that_cannot_be_made_later(dataset: Base, said: str) -> None:
    with pytest.raises(InputError, match=said):
        sf.cut(dataset, "transform")
    assert dataset.target_transform is None


def test_a_sample_unlike_those_that_were_compared() -> None:
    dataset = Base(tripled, get=lambda data, id: data.read(id) if id == 1 else data.transform(data.read(id)))
    data = sf.cut(dataset, "transform")
    with pytest.raises(InputError, match=r"for sample 1, Base calls its transforms in another way.*check=\[1\]"):
        data.fetch(1)
    agree(sf.cut(dataset, "transform", check=[1]), dataset)


def test_unpacked_to_another_length() -> None:
    lists = Base(lambda id: [id] * (3 if id == 1 else 2), get=lambda data, id: list(data.transform(id)))
    data = sf.cut(lists, "transform")
    assert data[4] == [4, 4]
    with pytest.raises(InputError, match="returned 3 values, and 2 when the data set was cut"):
        data[1]


def test_a_transform_that_is_replaced_later() -> None:
    dataset = Base(noisy)
    data = sf.cut(dataset, "transform")
    dataset.transform = tripled
    with pytest.raises(InputError, match="the transform of Base was changed"):
        data.fetch(0)


def damaged(data: Base, id: int) -> Any:
    if id in data.target_transform:
        raise OSError("damaged")
    return data.transform(id), id


def test_samples_that_cannot_be_read_are_left_out() -> None:
    data = sf.cut(Base(tripled, {0, 1}, damaged), "transform")
    assert data[3] == (9, 3)
    with pytest.raises(OSError, match=r"damaged\n.*fetching sample 1"):
        data[1]
    with pytest.raises(OSError, match=r"damaged\n.*fetching sample 0"):
        sf.cut(Base(tripled, set(range(COUNT)), damaged), "transform")
