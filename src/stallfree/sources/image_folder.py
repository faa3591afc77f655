"""A folder of pictures with one folder per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np

from stallfree.errors import InputError, StallfreeError, argument_conflict, image_folder
from stallfree.pipeline.compose import flatten
from stallfree.sources.decode import DecodeImage
from stallfree.sources.files import FileDataset
from stallfree.sources.paths import PathList, canonical, is_url, open_url

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


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
        endings = tuple(allowed)
        self.root = canonical(root)
        found = _list_url(self.root) if is_url(self.root) else _list_local(self.root)
        found = {name: [file for file in files if _ends(file, endings)] for name, files in sorted(found.items())}
        _require_pictures(found, self.root, endings)
        self.classes = [unquote(name) if self.root.startswith("http") else name for name in found]
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        paths = [_join(self.root, f"{name}/{file}") for name, files in found.items() for file in _sorted(files)]
        labels = np.repeat(np.arange(len(found)), [len(files) for files in found.values()])
        super().__init__(paths, labels.tolist(), transform, decode=_decoder(transform, output, mode))

    @property
    def samples(self) -> Samples:
        """`(path, label)` of every sample, made when asked for."""
        return Samples(self._paths, self.targets)

    @property
    def targets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The label of every sample, read-only."""
        assert self._labels is not None
        view: np.ndarray[Any, np.dtype[np.int64]] = self._labels.values.view()
        view.flags.writeable = False
        return view


class Samples(Sequence[tuple[str, int]]):
    """The paths and labels of an `ImageFolder`, as a list of pairs that is not kept in memory."""

    def __init__(self, paths: PathList, labels: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._paths = paths
        self._labels = labels

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(zip(self._paths[index], self._labels[index].tolist(), strict=True))
        return self._paths[index], int(self._labels[index])


def _decoder(
    transform: Callable[[Any], Any] | None, output: Literal["numpy", "pil"], mode: Literal["RGB", "L"]
) -> DecodeImage | None:
    """The first step, unless `transform` begins with one that takes encoded bytes."""
    steps = flatten(transform)
    if not steps or not getattr(type(steps[0]), "takes_encoded", False):
        return DecodeImage(output, mode)
    if (output, mode) != ("numpy", "RGB"):
        raise argument_conflict(
            f"output={output!r}, mode={mode!r} with {steps[0]!r}, which decodes the pictures itself: leave them out"
        )
    return None


def _ends(file: str, endings: tuple[str, ...]) -> bool:
    return file.lower().endswith(tuple(ending.lower() for ending in endings))


def _sorted(files: list[str]) -> list[str]:
    """Folder by folder, and by name within each."""
    return sorted(files, key=os.path.split)


def _require_pictures(found: dict[str, list[str]], root: str, endings: tuple[str, ...]) -> None:
    if not found:
        raise image_folder(f"{root!r} has no folders: pictures are expected in {root}/CLASS/, one folder per class")
    empty = [name for name, files in found.items() if not files]
    if empty:
        names = ", ".join(map(repr, empty[:5])) + (" ..." if len(empty) > 5 else "")
        raise image_folder(
            f"{len(empty)} of {len(found)} classes in {root!r} have no picture: {names}. Remove their folders, or name "
            f"the ending of their files with extensions= (now {', '.join(endings)})"
        )


def _unlisted(root: str, error: Exception) -> InputError:
    return image_folder(f"root={root!r} cannot be listed ({error}): give a folder that holds one folder per class")


def _list_local(root: str) -> dict[str, list[str]]:
    """The files beneath each folder in `root`, their paths relative to that folder. Links are followed."""
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir()]
    except OSError as error:
        raise _unlisted(root, error) from error
    return {name: [file[len(name) + 1 :] for file in _walk(root, name, ())] for name in names}


def _walk(root: str, folder: str, above: tuple[tuple[int, int], ...]) -> list[str]:
    """All files beneath `root/folder`, relative to `root`; a link back to a folder `above` is not entered again."""
    path = os.path.join(root, folder)
    status = os.stat(path)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return []
    files: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            inner = f"{folder}/{entry.name}"
            files += _walk(root, inner, (*above, here)) if entry.is_dir() else [inner]
    return files


def _list_url(root: str) -> dict[str, list[str]]:
    """The same for an fsspec URL, in one listing. Folders without any file do not count there."""
    try:
        filesystem, top = open_url(root)
        top = top.rstrip("/")
        names = filesystem.find(top)
    except StallfreeError:
        raise
    except Exception as error:
        raise _unlisted(root, error) from error
    found: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = str(name)[len(top) + 1 :].partition("/")
        if file:
            found.setdefault(folder, []).append(file)
    return found


def _join(root: str, inner: str) -> str:
    """`root/inner`; in a chained URL (`zip://train::s3://bucket/a.zip`), within the first part that has a path."""
    if not is_url(root):
        return os.path.join(root, inner)
    parts = root.split("::")
    first = next((i for i, part in enumerate(parts) if "://" in part), 0)
    parts[first] += inner if parts[first].endswith("/") else f"/{inner}"
    return "::".join(parts)
