"""Libraries that open files natively: what they give is recorded and served, and is always the native result."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from cv2 import imread

from reads_data import contents, gone, outcome, recorded, served
from stallfree.sources.reads import native
from stallfree.sources.reads.open_calls import Tracker
from stallfree.sources.reads.recorded import Block


@pytest.fixture(autouse=True)
def _nothing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_alike", {})
    monkeypatch.setattr(native, "_failed", Counter())
    monkeypatch.setattr(native, "_modules", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a.jpg", "b.png", "ü漢.bmp"):
        picture = rng.integers(0, 256, (30, 40, 3), np.uint8)
        (folder / name).write_bytes(cv2.imencode(Path(name).suffix, picture)[1].tobytes())
    (folder / "short.jpg").write_bytes((folder / "a.jpg").read_bytes()[:-300])
    (folder / "text.jpg").write_text("no picture")
    (folder / "empty.png").touch()
    return folder


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    return bool(one == other)


def check(read: Callable[[], Any], folder: Path, files: list[str]) -> None:
    """`read` gives the same natively, recorded and served. The record has these files, and no others are needed."""
    plain = outcome(read)
    for _ in range(2):  # the first time, calls are compared
        with_record, record = recorded(read)
        assert same(with_record, plain)
        assert sorted(contents(record)) == files
    with gone(folder):
        found, block = served(read, record)
    assert same(found, plain)
    assert block.storage_bytes == 0


def test_pictures_of_cv2(folder: Path) -> None:
    def read() -> Any:
        return [
            imread(str(folder / "a.jpg")),  # the name that this module holds
            cv2.imread(str(folder / "a.jpg"), cv2.IMREAD_GRAYSCALE),
            cv2.imread(str(folder / "b.png"), flags=cv2.IMREAD_UNCHANGED),
            cv2.imread(filename=str(folder / "ü漢.bmp")),
            cv2.imread(folder / "b.png", cv2.IMREAD_REDUCED_COLOR_2),
            cv2.imread(str(folder / "nothing.jpg")),
            cv2.imread(str(folder / "text.jpg")),
        ]

    check(read, folder, ["a.jpg", "b.png", "text.jpg", "ü漢.bmp"])


class _BytesPath:
    def __fspath__(self) -> bytes:
        return b"a.jpg"


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing.jpg",),
        ("",),
        ("empty.png",),
        ("text.jpg",),
        ("short.jpg",),  # of which a part is decoded
        ("a.jpg", "colour"),
        ("a.jpg", True),
        ("a.jpg", 1, 2),
        (b"a.jpg",),
        (_BytesPath(),),
        ("a\0.jpg",),
        (3,),
        (),
    ],
)
def test_odd_calls_give_what_they_give_natively(
    folder: Path, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    def read() -> Any:
        return outcome(lambda: cv2.imread(*arguments))

    plain = read()
    for _ in range(2):
        found, record = recorded(read)
        assert same(found[1], plain)
        assert same(served(read, record)[0][1], plain)


def test_it_is_the_native_function_otherwise(folder: Path) -> None:
    recorded(lambda: None)
    assert pickle.loads(pickle.dumps(cv2.imread)) is copy.deepcopy(cv2.imread) is cv2.imread is imread
    assert cv2.imread.__name__ == "imread"
    assert cv2.imread.__doc__ == cv2.imread.__wrapped__.__doc__
    assert "imread" in repr(cv2.imread)

    class Holder:
        read = cv2.imread

    assert Holder().read(str(folder / "a.jpg")).shape == (30, 40, 3)
    assert not native._alike


def test_a_file_that_the_data_set_wrote(folder: Path) -> None:
    def read() -> Any:
        (folder / "new.png").write_bytes((folder / "b.png").read_bytes())
        return cv2.imread(str(folder / "new.png"))

    assert list(contents(recorded(read)[1])) == ["b.png"]


def test_another_result_from_memory_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = cv2.imdecode
    monkeypatch.setattr(cv2, "imdecode", lambda data, flags: decode(data, flags)[::-1])

    def read() -> Any:
        return cv2.imread(str(folder / "b.png"))

    plain = read()
    for _ in range(2):
        found, record = recorded(read)
        assert same(found[1], plain)
        assert contents(record) == {}
        assert same(served(read, record)[0][1], plain)


def test_a_call_that_fails_in_memory_stays_native(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cv2, "imdecode", lambda data, flags: calls.append(flags))

    def read() -> Any:
        return cv2.imread(str(folder / "b.png"))

    plain = read()
    for _ in range(2 * native._TRIES):
        assert same(recorded(read)[0][1], plain)
    assert len(calls) == native._TRIES


def test_a_library_that_is_imported_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run in which it is imported does not count, as its files were not seen; the next one does.

    A process that serves a record without having imported it runs twice: the first time it goes to storage.
    """
    (folder / "late_library.py").write_text(
        "import os\ndef read(path):\n file = os.open(path, os.O_RDONLY)\n data = os.read(file, 99)\n os.close(file)\n"
        " return data\n"
    )

    def replace(module: ModuleType) -> None:
        def serve(real: Any, path: str) -> Any:
            return native._from_memory("late", path, lambda: real(path), lambda data: bytes(data[:99]))

        native.replace_held(module.read, native._Instead(module.read, "late_library.read", serve))

    monkeypatch.setitem(native._missing, "late_library", replace)
    monkeypatch.syspath_prepend(folder)

    def read() -> Any:
        import late_library  # type: ignore[import-not-found]

        return late_library.read(str(folder / "a.jpg"))

    block, tracker = Block(), Tracker()
    try:
        found = tracker.run(block, read)
        assert block.stale
        again, record = recorded(read, tracker)
        assert again[1] == found
        assert list(contents(record)) == ["a.jpg"]
        for missing in (False, True):
            del sys.modules["late_library"]
            recorded(lambda: None)  # sees that there are fewer modules
            monkeypatch.setitem(native._missing, "late_library", replace)
            if missing:
                (folder / "a.jpg").rename(folder / "away")
            assert tracker.run(Block(record), read) == found
    finally:
        sys.modules.pop("late_library", None)


@pytest.fixture
def torchvision_io(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`read_file` of `torchvision.io`: the real one, or the same operator where it is not installed."""
    try:
        import torchvision.io  # type: ignore[import-not-found]
    except ImportError:
        library = torch.library.Library("image", "FRAGMENT")
        library.define("read_file(str filename) -> Tensor")
        library.impl("read_file", _read_file, "CompositeExplicitAutograd")
        module: Any = ModuleType("torchvision.io.image")
        module.read_file = lambda path: torch.ops.image.read_file(str(path))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(native._missing, module.__name__, native._replace_read_file)
        yield module
        library._destroy()
        torch.ops.image.__dict__.pop("read_file", None)
    else:
        yield torchvision.io.image


def _read_file(path: str) -> torch.Tensor:
    if not os.path.exists(path):
        raise RuntimeError(f"[Errno 2] No such file or directory: '{path}'")
    size = os.path.getsize(path)
    if not size:
        raise RuntimeError("Expected a non empty file")
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_files_of_torchvision(folder: Path, torchvision_io: Any) -> None:
    read_file = torchvision_io.read_file

    def read() -> Any:
        missing = [outcome(partial(read_file, folder.parent / name)) for name in ("nothing", "empty")]
        data = read_file(folder / "b.png")
        data[0] += 1  # belongs to the caller
        return data, read_file(str(folder / "a.jpg")), missing, outcome(lambda: torch.ops.image.read_file(3))

    (folder.parent / "empty").touch()
    check(read, folder, ["a.jpg", "b.png"])
    assert torch.jit.script(_scripted)(str(folder / "a.jpg")).tolist() == list((folder / "a.jpg").read_bytes())


def _scripted(path: str) -> torch.Tensor:
    return torch.ops.image.read_file(path)  # type: ignore[no-any-return]


def test_sound_files(folder: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    sound = np.random.default_rng(0).uniform(-0.4, 0.4, (90_000, 2))
    names = ["a.flac", "a.ogg", "a.wav"]
    for name in names:
        soundfile.write(folder / name, sound, 16_000)

    def read() -> Any:
        found = [outcome(lambda: soundfile.read(folder / "b.png")), outcome(lambda: soundfile.read("/nothing.wav"))]
        for name in names:
            path = str(folder / name)
            found += [*soundfile.read(path), *soundfile.read(folder / name, start=500, frames=20, dtype="int16")]
            with soundfile.SoundFile(path) as file:
                file.seek(70_000)
                found += [file.read(100), file.name, file.frames, file.closed]
        return found

    found, record = recorded(read)
    assert same(found, outcome(read))
    assert sorted(contents(record)) == [*names, "b.png"]
    assert all(native._alike.values())

    def part() -> Any:
        return soundfile.read(folder / "a.wav", start=500, frames=20)

    _, record = recorded(part)
    assert 80 < len(contents(record)["a.wav"][1]) < 100_000 + io.DEFAULT_BUFFER_SIZE  # of 360,044
    plain = part()
    with gone(folder):
        assert same(served(part, record)[0][1], plain)


def test_files_that_torchaudio_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that has the arguments of `torchaudio.load`; its formats are not of interest here."""

    def load(uri: Any, frame_offset: int = 0, num_frames: int = -1, **options: Any) -> tuple[torch.Tensor, int]:
        data = np.fromfile(uri, np.uint8) if isinstance(uri, (str, Path)) else np.frombuffer(uri.read(), np.uint8)
        return torch.from_numpy(data[frame_offset:][: num_frames if num_frames >= 0 else None].copy()), 16_000

    module: Any = ModuleType("torchaudio")
    module.load = load
    monkeypatch.setitem(sys.modules, "torchaudio", module)
    monkeypatch.setitem(native._missing, "torchaudio", native._replace_load_audio)

    def read() -> Any:
        path = str(folder / "a.jpg")
        return [
            module.load(path),
            module.load(folder / "b.png", 3, num_frames=5),
            module.load(io.BytesIO(b"ab")),
            outcome(lambda: module.load(str(folder / "nothing")))[0],
            outcome(lambda: module.load(uri=3))[0],
        ]

    check(read, folder, ["a.jpg", "b.png"])
