"""The errors that stallfree raises, all in one tree.

StallfreeError
├── InputError (ValueError)            a value that the user gave cannot be used
│   ├── CapacityError                  a size that is no size, negative, or more than the machine can give
│   └── FingerprintError               a cache of that name belongs to other data or to another user
├── StorageError (OSError)             the folder of a cache cannot be made, locked or read
├── CodecError (TypeError)             a value that cannot be stored without pickle
├── SampleError                        one sample could not be fetched or prepared; `.id`, `.where`. It is also of the
│                                      type that the data set raised, such as FileNotFoundError
├── WorkerError                        worker processes died on the same batch; `.ids`
├── WaitError (TimeoutError)           a wait reached its limit; the message says for what
├── MissingServerError (OSError)       no server for a store is installed, or it cannot be started
├── PlatformError (NotImplementedError) this operating system lacks what is needed; the message says what to use
├── ProducerError                      the process that loads for a `ProcessPrefetcher` ended
└── MissingExtraError (ImportError)    an optional package is not installed; the message names the extra
"""

from __future__ import annotations


def text_of(error: BaseException) -> str:
    """`str(error)`, also where the error's own `__str__` fails."""
    try:
        return str(error)
    except Exception as problem:
        return f"(its text cannot be made: {type(problem).__name__})"


class StallfreeError(Exception):
    """The base of every error that stallfree raises on purpose.

    Example:
        ```python
        try:
            for images, labels in loader:
                train(images, labels)
        except sf.StallfreeError as error:
            print(error)
        ```
    """


class InputError(StallfreeError, ValueError):
    """A value given by the caller cannot be used.

    The message says what was given, what was expected, what to do.

    Example:
        ```python
        try:
            loader = sf.DataLoader(dataset, batch_size=0)
        except sf.InputError as error:
            print(error)
        ```
    """


class CapacityError(InputError):
    """A capacity is no valid size, or more than the machine has.

    Example:
        ```python
        try:
            cached = sf.CachedDataset(dataset, capacity="900000GiB")
        except sf.CapacityError as error:
            print(error)  # says how much there is
        ```
    """


class FingerprintError(InputError):
    """A cache of this name belongs to other data, another pipeline or another user.

    Example:
        ```python
        cached = sf.CachedDataset(dataset, capacity="1MiB", name="train")
        try:
            other = sf.CachedDataset(sf.ImageFolder("pictures"), capacity="1MiB", name="train")
        except sf.FingerprintError as error:
            print(error)  # another transform: choose another name
        ```
    """


class StorageError(StallfreeError, OSError):
    """The folder or a file of a cache cannot be made, locked or read.

    Example:
        ```python
        Path("file").touch()
        try:
            cached = sf.CachedDataset(dataset, capacity="1MiB", store="file")
        except sf.StorageError as error:
            print(error)  # not a folder
        ```
    """


class CodecError(StallfreeError, TypeError):
    """A value cannot be stored as it is and pickle is not allowed here.

    Example:
        ```python
        with sf.CacheLoader(capacity="1MiB", name="values") as cache:
            try:
                value = cache.get("key", lambda key: torch.Generator())
            except sf.CodecError as error:
                print(error)  # a generator cannot be stored
        ```
    """


class SampleError(StallfreeError):
    """One sample could not be fetched or prepared.

    What the data set raised is `__cause__`. The error is of that type too, with its attributes: `except
    FileNotFoundError` catches it, and `.errno` and `.filename` are there. Two exceptions: `StopIteration`, which would
    end a loop, and types from which no class can be derived together with this one.

    Attributes:
        id: the sample's id (its index in the data set); -1 if another loader has passed on the text alone.
        where: what is known about its place, for instance the path; may be empty.

    Example:
        ```python
        loader = sf.DataLoader(sf.FileDataset(["missing.jpg"]))
        try:
            batches = list(loader)
        except sf.SampleError as error:
            print(error.id, error.where)
        ```
    """

    def __init__(self, message: str, *, id: int = -1, where: str = "") -> None:
        Exception.__init__(self, message)  # not that of the other type, which may take other arguments
        self.id = id
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        return _make_sample_error, (str(self), self.id, self.where)


def _make_sample_error(message: str, id: int, where: str) -> SampleError:
    return SampleError(message, id=id, where=where)


class WorkerError(StallfreeError, RuntimeError):
    """Worker processes died several times on one batch, or one died on its stream.

    It is also a `RuntimeError`, as in torch's loader.

    Attributes:
        ids: the ids of the samples of that batch.

    Example:
        ```python
        loader = sf.DataLoader(dataset, batch_size=4, num_workers=1)
        try:
            batches = list(loader)
        except sf.WorkerError as error:
            print(error.ids)  # of the batch on which workers died
        ```
    """

    def __init__(self, message: str, *, ids: list[int]) -> None:
        super().__init__(message)
        self.ids = ids

    def __reduce__(self) -> tuple[object, ...]:
        return _make_worker_error, (str(self), self.ids)


def _make_worker_error(message: str, ids: list[int]) -> WorkerError:
    return WorkerError(message, ids=ids)


class WaitError(StallfreeError, TimeoutError):
    """A wait reached its limit.

    The message says what was waited for and how long.

    Example:
        ```python
        loader = sf.DataLoader(dataset, batch_size=4, num_workers=1, timeout=60)
        try:
            batches = list(loader)
        except sf.WaitError as error:
            print(error)  # names the batch that was not ready within 60 s
        ```
    """


class MissingServerError(StallfreeError, OSError):
    """No server for a store is installed, or it does not keep running.

    Example:
        ```python
        # needs Redis
        try:
            store = sf.RedisStore(capacity_per_node="64GiB")
        except sf.MissingServerError:
            store = "memory"
        ```
    """


class PlatformError(StallfreeError, NotImplementedError):
    """The operating system lacks what this part needs.

    The message says what to use in its place.

    Example:
        ```python
        # needs a script with a main guard
        try:
            batches = sf.ProcessPrefetcher(make_loader, device)
        except sf.PlatformError:  # not Linux
            batches = sf.DevicePrefetcher(make_loader(), device)
        ```
    """


class ProducerError(StallfreeError):
    """The process that loads for a `ProcessPrefetcher` ended.

    Make a new prefetcher.

    Example:
        ```python
        # needs a script with a main guard
        try:
            for images, labels in batches:  # a ProcessPrefetcher
                train(images, labels)
        except sf.ProducerError as error:
            print(error)
        ```
    """


class MissingExtraError(StallfreeError, ImportError):
    """An optional package is not installed. The message names the extra that installs it.

    Example:
        ```python
        try:
            hook = sf.TensorBoardHook("logs")
        except sf.MissingExtraError as error:
            print(error)  # names the command: pip install 'stallfree[tensorboard]'
        ```
    """


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for an optional `package` that `purpose` needs and that `pip install 'stallfree[extra]'` brings."""
    return MissingExtraError(
        f"{purpose} needs the package {package!r}, which is not installed: pip install 'stallfree[{extra}]'"
    )
