"""Pictures: how they are decoded; a folder of them: order, labels, where it may be, and what is wrong with some."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np
import pytest
from pictures import encode, picture
from PIL import Image

from stallfree import DecodeImage, ImageFolder, InputError
from stallfree.pipeline.compose import Source, mark_of
from stallfree.sources import files

ORDER = ["cat/1.JPG", "cat/2.jpg", "cat/more/0.png", "dog/a.jpg", "dog/b.jpeg"]  # of torchvision's ImageFolder
LABELS = [0, 0, 0, 1, 1]


def test_order_and_labels_are_those_of_torchvision(image_root: Path) -> None:
    folder = ImageFolder(image_root)
    assert isinstance(folder, Source)
    assert folder.classes == ["cat", "dog"]
    assert folder.class_to_idx == {"cat": 0, "dog": 1}
    expected = [(str(image_root / name), label) for name, label in zip(ORDER, LABELS, strict=True)]
    assert list(folder.samples) == expected
    assert folder.targets.tolist() == LABELS
    assert not folder.targets.flags.writeable


def test_a_folder_comes_before_the_files_of_one_with_a_longer_name(tmp_path: Path) -> None:
    names = ["c/z.jpg", "c/a/b.jpg", "c/a-b/c.jpg", "c/a/a.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    ordered = [Path(path).relative_to(tmp_path).as_posix() for path, _ in ImageFolder(tmp_path).samples]
    assert ordered == ["c/z.jpg", "c/a/a.jpg", "c/a/b.jpg", "c/a-b/c.jpg"]


def test_samples_are_pictures(image_root: Path) -> None:
    folder = ImageFolder(image_root, lambda image: image[:10])
    data, label = folder.fetch(3)
    assert (data, label) == ((image_root / "dog/a.jpg").read_bytes(), 1)
    image, label = folder[3]
    assert (image.shape, image.dtype, type(label)) == ((10, 32, 3), np.uint8, int)
    np.testing.assert_array_equal(folder.pipeline((data, label))[0], image)
    assert [step_label for _, step_label in folder] == LABELS
    assert isinstance(ImageFolder(image_root, output="pil")[0][0], Image.Image)
    assert ImageFolder(image_root, mode="L")[0][0].shape == (24, 32)


def test_extensions(image_root: Path) -> None:
    assert len(ImageFolder(image_root, extensions=[".jpg"])) == 3
    (image_root / "dog/x.scan").write_bytes(encode(picture(9)))
    (image_root / "cat/x.SCAN").write_bytes(encode(picture(9)))
    assert [Path(path).suffix for path, _ in ImageFolder(image_root, extensions=".scan").samples] == [".SCAN", ".scan"]


def test_links_are_followed_but_not_in_circles(image_root: Path) -> None:
    (image_root / "horse").symlink_to(image_root / "dog")
    (image_root / "dog/round").symlink_to(image_root / "dog")
    folder = ImageFolder(image_root)
    assert folder.classes == ["cat", "dog", "horse"]
    assert folder.targets.tolist() == [*LABELS, 2, 2]


def test_urls(image_root: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(image_root), "/stallfree-folder", recursive=True)
    check_same("memory://stallfree-folder", image_root, "memory://stallfree-folder/cat/1.JPG")
    check_same("memory:///stallfree-folder/", image_root, "memory:///stallfree-folder/cat/1.JPG")
    memory.rm("/stallfree-folder", recursive=True)
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "pictures")
    check_same(f"zip://pictures::file://{archive}", image_root, f"zip://pictures/cat/1.JPG::file://{archive}")


def test_http_url(image_root: Path, serve: Callable[[Path], str]) -> None:
    pytest.importorskip("aiohttp")
    (image_root / "cat").rename(image_root / "big cat")
    url = serve(image_root)
    check_same(url, image_root, f"{url}/big%20cat/1.JPG")


def check_same(url: str, root: Path, first: str) -> None:
    remote, local = ImageFolder(url), ImageFolder(root)
    assert remote.classes == local.classes
    assert [remote.fetch(id) for id in range(len(remote))] == [local.fetch(id) for id in range(len(local))]
    assert remote.where(0) == first


@pytest.mark.parametrize(("root", "message"), [
    ("missing", "cannot be listed"), ("dog", "has no folders: pictures are expected"),
    ("memory://nowhere", "cannot be listed|has no folders"), (3, "give a str or a pathlib.Path"),
    (".", r"2 of 4 classes in .* have no picture: 'empty', 'texts'\."),
])  # fmt: skip
def test_bad_roots(image_root: Path, root: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(image_root)
    Path("empty").mkdir()
    Path("texts").mkdir()
    Path("texts/a.txt").touch()
    with pytest.raises(InputError, match=message):
        ImageFolder(root)


JPEG = encode(picture())


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with each of the decoders."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(files, "_simplejpeg", lambda: None)


@pytest.mark.parametrize(
    "kind", ["RGB JPEG", "L JPEG", "CMYK JPEG", "RGBA PNG", "LA PNG", "P PNG", "1 PNG", "RGB WEBP"]
)
def test_every_kind_becomes_rgb(kind: str, decoder: None) -> None:
    mode, form = kind.split()
    image = picture().quantize(16) if mode == "P" else picture().convert(mode)
    data = encode(image, form, progressive=True, **({"transparency": 3} if mode == "P" else {}))
    array: Any = DecodeImage()(data)
    expected = np.array(DecodeImage("pil")(data))
    assert array.dtype == np.uint8
    assert array.shape == (24, 32, 3)
    assert np.abs(array.astype(int) - expected).max() <= 3
    np.testing.assert_array_equal(array, pickle.loads(pickle.dumps(DecodeImage()))(data))
    array[0, 0] = 0  # writable: transforms work in place


@pytest.mark.parametrize("data", [JPEG, encode(picture(), "PNG"), encode(picture().convert("L"))])
def test_greyscale_has_two_dimensions(data: bytes, decoder: None) -> None:
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
def test_what_is_no_whole_picture(data: bytes, output: Literal["numpy", "pil"], decoder: None) -> None:
    kind, words = (InputError, f"no whole picture in these {len(data)} bytes") if output == "numpy" else (OSError, ".")
    with pytest.raises(kind, match=words):  # that of Pillow, as under torchvision
        DecodeImage(output)(data)


def test_fingerprint_tells_decoders_and_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    assert mark_of(DecodeImage()) is False
    prints = {DecodeImage().fingerprint(), DecodeImage("pil").fingerprint(), DecodeImage(mode="L").fingerprint()}
    assert DecodeImage().fingerprint() in prints
    monkeypatch.setattr(files, "_simplejpeg", lambda: None)
    prints.add(DecodeImage().fingerprint())
    assert len(prints) == 4
