"""Decoding of pictures."""

import pickle
from typing import Any, Literal

import numpy as np
import pytest
from pictures import encode, picture
from PIL import Image

from stallfree.errors import InputError
from stallfree.pipeline.compose import mark_of
from stallfree.sources import files
from stallfree.sources.files import DecodeImage

JPEG = encode(picture())


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with each of the decoders."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(files, "_simplejpeg", lambda: None)
    name: str = request.param
    return name


def palette() -> Image.Image:
    image = picture().quantize(16)
    image.info["transparency"] = 3
    return image


@pytest.mark.parametrize(
    "data",
    [
        JPEG,
        encode(picture(), progressive=True),
        encode(picture().convert("L")),
        encode(picture().convert("CMYK")),
        encode(picture().convert("RGBA"), "PNG"),
        encode(picture().convert("LA"), "PNG"),
        encode(palette(), "PNG"),
        encode(picture().convert("1"), "PNG"),
        encode(picture(), "WEBP"),
        encode(picture(), "BMP"),
    ],
    ids=["rgb", "progressive", "grey", "cmyk", "alpha", "grey-alpha", "palette", "bits", "webp", "bmp"],
)
def test_every_kind_becomes_rgb(data: bytes, decoder: str) -> None:
    array: Any = DecodeImage()(data)
    expected = np.array(DecodeImage("pil")(data))
    assert array.dtype == np.uint8
    assert array.shape == (24, 32, 3)
    assert np.abs(array.astype(int) - expected).max() <= 3
    np.testing.assert_array_equal(array, pickle.loads(pickle.dumps(DecodeImage()))(data))
    array[0, 0] = 0  # writable: transforms work in place


@pytest.mark.parametrize("data", [JPEG, encode(picture(), "PNG"), encode(picture().convert("L"))])
def test_greyscale_has_two_dimensions(data: bytes, decoder: str) -> None:
    array: Any = DecodeImage(mode="L")(data)
    expected = np.array(picture().convert("L")).astype(int)
    assert array.shape == (24, 32)
    assert np.abs(array - expected).mean() < 8


@pytest.mark.parametrize("output", ["numpy", "pil"])
@pytest.mark.parametrize(
    "data",
    [b"", b"this is no picture", b"\xff\xd8\xff", JPEG[:100], JPEG[: len(JPEG) // 2], encode(picture(), "PNG")[:-40]],
    ids=["empty", "text", "magic", "head", "half", "png"],
)
def test_what_is_no_whole_picture(data: bytes, output: Literal["numpy", "pil"], decoder: str) -> None:
    with pytest.raises(InputError, match=f"no whole picture in these {len(data)} bytes"):
        DecodeImage(output)(data)


def test_fingerprint_tells_decoders_and_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    assert mark_of(DecodeImage()) is False
    prints = {DecodeImage().fingerprint(), DecodeImage("pil").fingerprint(), DecodeImage(mode="L").fingerprint()}
    assert DecodeImage().fingerprint() in prints
    monkeypatch.setattr(files, "_simplejpeg", lambda: None)
    prints.add(DecodeImage().fingerprint())
    assert len(prints) == 4
