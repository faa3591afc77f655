"""Images of Pillow in records: without pickle, the same as they were."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loader_data import same
from stallfree.errors import CodecError
from stallfree.pipeline.codec import encode, read_record, record_size, stack_build, structure_of, write_record
from stallfree.pipeline.values import BANDS, private


def image(mode: str, seed: int = 0, size: tuple[int, int] = (5, 3)) -> Any:
    """An image of noise."""
    data = np.random.default_rng(seed).integers(0, 255, size[0] * size[1] * BANDS[mode], np.uint8)
    return Image.frombytes(mode, size, data.tobytes())


def stored(value: Any, **options: Any) -> Any:
    structure, arrays = encode(value, **options)
    out = np.empty(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, out)
    return read_record(out, copy=True, **options)


@pytest.mark.parametrize("mode", BANDS)
@pytest.mark.parametrize("size", [(5, 3), (1, 1), (0, 4)])
def test_images_come_back(mode: str, size: tuple[int, int]) -> None:
    given = image(mode, size=size)
    given.info = {"dpi": (72, 72.5), "exif": b"Exif", "comment": "none"}
    made, label = stored((given, 7))
    assert same(made, given)
    assert type(made) is type(given)
    assert (made.info, label) == (given.info, 7)


def test_an_image_is_of_a_fixed_size_and_no_pickle() -> None:
    structure, _ = encode({"image": image("RGB")})
    assert structure.fixed
    assert not structure.pickled
    assert structure.has_views


def test_the_memory_is_its_own() -> None:
    structure, arrays = encode(image("L"))
    out = np.empty(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, out)
    made = read_record(out, copy=False)
    out[:] = 0
    assert same(made, image("L"))
    made.putpixel((0, 0), 9)
    assert made.getpixel((0, 0)) == 9


def test_many_images_at_once() -> None:
    images = [image("RGB", seed) for seed in range(3)]
    structure = encode(images[0])[0]
    columns = [np.stack([encode(one)[1][0] for one in images])]
    assert same(stack_build(structure, columns, 3), images)


def test_others_need_a_pickle() -> None:
    buffer = io.BytesIO()
    image("RGB").save(buffer, "PNG")
    opened = Image.open(io.BytesIO(buffer.getvalue()))
    for given in (opened, image("RGB").quantize(4), Image.new("I;16", (2, 2))):
        with pytest.raises(CodecError, match="cannot be stored without pickle"):
            encode(given)
        assert same(stored(given, allow_pickle=True), given)


def test_copies_are_private() -> None:
    given = image("RGB")
    given.info = {"dpi": 72}
    copied = private((given,))[0]
    copied.putpixel((0, 0), (1, 2, 3))
    copied.info["dpi"] = 0
    assert given.tobytes() == image("RGB").tobytes()
    assert given.info == {"dpi": 72}


@pytest.mark.parametrize(
    "key", ["p P\narray 3,5 |u1\nd []", "p RGB\narray 3,5,3 |u1", "p \nd []", "p RGB\narray 3,5,3 |u1\nx []"]
)
def test_forged_keys(key: str) -> None:
    with pytest.raises(CodecError):
        structure_of(key.encode())


@pytest.mark.parametrize(
    ("info", "leaf"),
    [("d []", "array 3,5 |u1"), ("d []", "array 3,5,3 |i1"), ("-", "array 3,5,3 |u1")],
)
def test_forged_pixels(info: str, leaf: str) -> None:
    structure = structure_of(f"p RGB\n{leaf}\n{info}".encode())
    with pytest.raises(CodecError, match="a record holds an image"):
        stack_build(structure, [np.zeros((1, structure.nbytes[0]), np.uint8)], 1)
