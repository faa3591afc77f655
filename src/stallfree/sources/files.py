"""Data sets of files: a list of paths, or a folder of pictures with one folder per class; decoding of pictures."""

import io
import os
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

import numpy as np

from stallfree.errors import InputError, StallfreeError, argument_conflict, image_folder, image_unreadable
from stallfree.pipeline.compose import Compose, OnItem, Out, flatten, in_place, mark_deterministic
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.raising import short_traceback
from stallfree.sources.mapped import BaseSource, require_samples
from stallfree.sources.paths import LabelList, PathList, canonical, is_url, joined, open_url, read_file

if TYPE_CHECKING:
    from PIL import Image

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_JPEG = b"\xff\xd8\xff"
_TURBO_COLORSPACE = {"RGB": "RGB", "L": "GRAY"}


@cache
def _simplejpeg() -> Any:
    """Return the binding of libjpeg-turbo that the extra `turbo` installs; None without it."""
    with suppress(ImportError):
        return import_module("simplejpeg")
    return None


@in_place
@mark_deterministic
class DecodeImage:
    """Decodes an image from its encoded bytes.

    Reads JPEG, PNG, WebP and all else that Pillow reads. The same bytes give the same image.

    JPEG is decoded by `simplejpeg` where that is installed (`pip install 'stallfree[turbo]'`) and an array is asked
    for, everything else by Pillow. The two may differ by a few units in some pixels, so their `fingerprint` differs.
    Alpha is dropped, palettes, CMYK and greyscale are converted, and the orientation noted in EXIF is not applied.

    Args:
        output: `"numpy"` for a writable uint8 array of shape (H, W, 3), or (H, W) in mode `"L"`; `"pil"` for a
            `PIL.Image.Image`, which the transforms of torchvision v1 work on.
        mode: `"RGB"` or `"L"` (greyscale).

    Raises:
        InputError: for another `output` or `mode`, and when called with bytes that are no whole picture;
            with `output="pil"` that is Pillow's error.

    Example:
        ```python
        decode = sf.DecodeImage()
        image = decode(Path("pictures/a/0.jpg").read_bytes())
        assert image.shape == (24, 24, 3)
        ```
    """

    def __init__(self, output: Literal["numpy", "pil"] = "numpy", mode: Literal["RGB", "L"] = "RGB") -> None:
        if output not in ("numpy", "pil"):
            raise InputError(f"output={output!r} is unknown: give 'numpy' or 'pil'")
        if not isinstance(mode, str) or mode not in _TURBO_COLORSPACE:
            raise InputError(f"mode={mode!r} is unknown: give 'RGB' or 'L'")
        self.output, self.mode = output, mode

    def __call__(self, data: bytes, out: Out | None = None) -> "np.ndarray[Any, Any] | Image.Image":
        if self.output == "pil":
            return self._pillow(data)
        turbo = _simplejpeg()
        if turbo is not None and data[:3] == _JPEG:
            with suppress(ValueError):  # of an unknown kind, or damaged: Pillow reads it, or says what is wrong
                array: np.ndarray[Any, Any] = turbo.decode_jpeg(data, colorspace=_TURBO_COLORSPACE[self.mode])
                return array[:, :, 0] if self.mode == "L" else array
        return np.array(self._pillow(data))

    def _pillow(self, data: bytes) -> "Image.Image":
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as image:
                return image.convert(self.mode)
        except Exception as error:
            if self.output == "pil":  # as under torchvision
                raise
            raise image_unreadable(f"no whole picture in these {len(data)} bytes: {error}") from error

    def fingerprint(self) -> str:
        """Return the output, the mode and the decoders with their versions, which decide the pixels."""
        import PIL

        turbo = _simplejpeg() if self.output == "numpy" else None
        decoders = f"pillow {PIL.__version__}" + (f", simplejpeg {turbo.__version__}" if turbo else "")
        return f"DecodeImage(output={self.output}, mode={self.mode}; {decoders})"

    def __repr__(self) -> str:
        return f"DecodeImage(output={self.output!r}, mode={self.mode!r})"


class FileDataset(BaseSource):
    """Files as samples: `(transform(decode(bytes)), label)`, or without the label where there are none.

    Fetch and prep are separate: `fetch(id)` gives `(bytes, label)` (only the bytes without labels), and `pipeline`
    does what follows. Safe in threads, in forked processes and under spawn. Millions of paths take one buffer, not one
    object each, so workers share them.

    Args:
        paths: local paths or fsspec URLs (`s3://`, `memory://`, ..., and `https://` with `stallfree[http]`), one per
            sample. Relative local paths are taken from the directory that is current now.
        labels: one label per path; None for samples without.
        transform: called with the decoded picture (with the bytes, without `decode`), never with the label. A `Compose`
            is split into its steps. None changes nothing.
        decode: the first step, for instance `DecodeImage()`. None leaves the bytes as they are.

    Raises:
        InputError: no paths, a path that is no text, or another number of labels than of paths.

    Example:
        ```python
        data = sf.FileDataset(["pictures/a/0.jpg", "pictures/b/1.jpg"], [0, 1], decode=sf.DecodeImage())
        image, label = data[1]
        assert label == 1
        ```
    """

    @short_traceback
    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        labels: Sequence[Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Callable[[bytes], Any] | None = None,
    ) -> None:
        if isinstance(paths, (str, bytes, os.PathLike, type)) or not isinstance(paths, Iterable):
            raise InputError(f"paths={paths!r:.80} is no list of paths: give a list, also for one path")
        if labels is not None and not isinstance(labels, Sized):
            raise InputError(f"labels={labels!r:.80} has no length: give a list with one label per path, or None")
        self._paths = PathList(canonical(path) for path in paths)
        require_samples(len(self._paths), "This FileDataset", "Give at least one path.")
        self._labels = None if labels is None else LabelList(labels)
        if self._labels is not None and len(self._labels) != len(self._paths):
            raise InputError(f"{len(self._labels)} labels for {len(self._paths)} paths: give one label per path")
        steps: list[Callable[[Any], Any]] = ([] if decode is None else [decode]) + list(flatten(transform))
        self.pipeline = Compose(steps if self._labels is None else [OnItem(0, step) for step in steps])

    def __len__(self) -> int:
        return len(self._paths)

    def _record(self, id: int) -> Any:
        data = read_file(self._paths[id])
        return data if self._labels is None else (data, self._labels[id])

    def _where(self, id: int) -> str:
        return self._paths[id]

    def fingerprint(self) -> str:
        """Changes when a path, a label or the size of a file changes.

        Sizes are those of at most 256 local files, evenly spread.
        """
        labels = None if self._labels is None else self._labels.values
        return f"FileDataset {self._paths.fingerprint()} {fingerprint(type(self), labels)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} files, first {self._paths[0]!r})"


class FilesOf(FileDataset):
    """The files of a data set of another library, which may change: `dataset`."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)


class ImageFolder(FileDataset):
    """Pictures in `root/CLASS/.../name.jpg`, in the order and with the labels of torchvision's `ImageFolder`.

    A sample is `(transform(picture), label)`. The picture is a uint8 array of shape (H, W, 3), as fast as it can be
    had; transforms that want a `PIL.Image`, such as those of torchvision v1, need `output="pil"`. When the first step
    of `transform` takes the encoded bytes itself, as `DecodeRandomResizedCrop` does (its class has `takes_encoded`), it
    gets them.

    Attributes:
        root: the folder, absolute, or its URL.
        classes: the names of the classes, sorted; their positions are the labels.
        class_to_idx: the label of each class.

    Args:
        root: a local folder or an fsspec URL that can be listed.
        transform: called with the picture. None changes nothing.
        output: `"numpy"` or `"pil"`, see `DecodeImage`.
        mode: `"RGB"` or `"L"`, see `DecodeImage`.
        extensions: the files that count, by the end of their name in any case.

    Raises:
        InputError: there is no such folder, it has no folders of classes, or a class has no picture; `output` or `mode`
            is given to no purpose, as `transform` decodes.

    Example:
        ```python
        data = sf.ImageFolder("pictures", transform=resize)
        image, label = data[0]
        assert data.classes == ["a", "b"] and label == 0
        ```
    """

    @short_traceback
    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        output: Literal["numpy", "pil"] = "numpy",
        mode: Literal["RGB", "L"] = "RGB",
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
    ) -> None:
        allowed = [extensions] if isinstance(extensions, str) else extensions
        if not isinstance(allowed, (list, tuple)) or not all(isinstance(ending, str) for ending in allowed):
            raise InputError(f"extensions={extensions!r:.80}: give endings of files, such as ('.jpg', '.png')")
        endings = tuple(ending.lower() for ending in allowed)
        self.root = canonical(root)
        try:
            listed = _list_url(self.root) if is_url(self.root) else _list_local(self.root)
        except StallfreeError:
            raise
        except Exception as error:
            raise image_folder(f"root={self.root!r} cannot be listed ({error}): give a folder of folders") from error
        files = {name: [file for file in listed[name] if file.lower().endswith(endings)] for name in sorted(listed)}
        if not files:
            raise image_folder(f"{self.root!r} has no folders: pictures are expected in {self.root}/CLASS/")
        empty = [name for name, inside in files.items() if not inside]
        if empty:
            names = ", ".join(map(repr, empty[:5])) + (" ..." if len(empty) > 5 else "")
            raise image_folder(
                f"{len(empty)} of {len(files)} classes in {self.root!r} have no picture: {names}. Remove their "
                f"folders, or name the ending of their files with extensions= (now {', '.join(endings)})"
            )
        self.classes = [unquote(name) if self.root.startswith("http") else name for name in files]
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        # folder by folder, and by name within each
        paths = [
            joined(self.root, f"{name}/{file}") for name in files for file in sorted(files[name], key=os.path.split)
        ]
        labels = [label for label, name in enumerate(files) for _ in files[name]]
        first = [*flatten(transform), None][0]
        decodes = getattr(type(first), "takes_encoded", False)
        if decodes and (output, mode) != ("numpy", "RGB"):
            raise argument_conflict(f"output={output!r}, mode={mode!r} with {first!r}, which decodes: leave them out")
        super().__init__(paths, labels, transform, decode=None if decodes else DecodeImage(output, mode))

    @property
    def samples(self) -> list[tuple[str, int]]:
        """The path and label of each sample, in a new list."""
        return list(zip(self._paths, self.targets.tolist(), strict=True))

    @property
    def targets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The label of every sample, read-only."""
        labels: Any = self._labels
        return labels.values  # type: ignore[no-any-return]


def _list_local(root: str) -> dict[str, list[str]]:
    """Return the files beneath each folder in `root`, relative to it. Links are followed, but not to a folder above."""

    def fail(error: OSError) -> None:
        raise error

    files: dict[str, list[str]] = {entry.name: [] for entry in os.scandir(root) if entry.is_dir()}
    for name, inside in files.items():
        top = os.path.join(root, name)
        for folder, folders, names in os.walk(top, onerror=fail, followlinks=True):
            real = os.path.realpath(folder) + os.sep
            folders[:] = [
                each for each in folders if not real.startswith(os.path.realpath(f"{folder}/{each}") + os.sep)
            ]
            inside += [os.path.join(folder[len(top) + 1 :], file) for file in names]
    return files


def _list_url(root: str) -> dict[str, list[str]]:
    """The same for an fsspec URL, in one listing. Folders without any file do not count there."""
    filesystem, top = open_url(root)
    top = top.rstrip("/")
    files: dict[str, list[str]] = {}
    for name in filesystem.find(top):
        folder, _, file = str(name)[len(top) + 1 :].partition("/")
        if file:
            files.setdefault(folder, []).append(file)
    return files
