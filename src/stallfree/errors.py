"""The errors that stallfree raises, all in one tree.

StallfreeError
├── InputError (ValueError)            a value that the user gave cannot be used
│   ├── CapacityError                  a size that is no size, negative, or more than the machine can give
│   ├── IdError (IndexError)           an id that is outside of the data set
│   └── FingerprintError               a cache of that name belongs to other data or to another user
├── StorageError (OSError)             the folder of a cache cannot be made, locked or read
├── CodecError (TypeError)             a value that cannot be stored without pickle
├── BatchError (RuntimeError)          an error of the user's code that cannot be raised here as it is
├── WorkerError                        worker processes died on the same batch; `.ids`
├── WaitError (TimeoutError)           a wait reached its limit; the message says for what. Also a RuntimeError
├── MissingServerError (OSError)       no server for a store is installed, or it cannot be started
├── PlatformError (NotImplementedError) this operating system lacks what is needed; the message says what to use
├── ProducerError                      the loading process of a `ProcessPrefetcher` ended
└── MissingExtraError (ImportError)    an optional package is not installed; the message names the extra

Errors of the user's code (data set, transform, `collate_fn`, `worker_init_fn`, sampler) are raised as they are, with a
note that names the sample.

Each kind of error has a page in `docs/errors`, whose address is the last line of its text. A kind is a class with its
`page`, or a function such as `lock_held(message)`, named in the table below the classes.
"""

from collections.abc import Callable, Sequence
from functools import partial

DOCUMENTATION = "https://stallfree.readthedocs.io/"
"""The address of the documentation. `pyproject.toml` and `mkdocs.yml` contain the same."""


def text_of(error: object) -> str:
    """The text of an error without the address of its page, also where the error's own `__str__` fails."""
    try:
        return str(error.args[0] if isinstance(error, StallfreeError) and error.args else error)
    except Exception as problem:
        return f"(its text cannot be made: {type(problem).__name__})"


class StallfreeWarning(UserWarning):
    """Warns of something that works, but not optimally; the message recommends an action.

    Example:
        ```python
        import warnings

        warnings.simplefilter("error", sf.StallfreeWarning)  # in tests: raise it
        ```
    """


class StallfreeError(Exception):
    """The base of every error that stallfree raises on purpose.

    Attributes:
        page: the name of the page in the documentation that describes this kind of error; its address ends the text.

    Example:
        ```python
        try:
            for images, labels in loader:
                train(images, labels)
        except sf.StallfreeError as error:
            print(error)
        ```
    """

    page = ""

    def __init__(self, message: str = "", *, page: str = "") -> None:
        super().__init__(message)
        self.page = page or self.page

    def __str__(self) -> str:
        return f"{self.args[0]}\n{DOCUMENTATION}errors/{self.page}/" if self.page else str(self.args[0])


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

    page = "argument-value"


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

    page = "unit-format"


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

    page = "cache-mismatch"


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

    page = "folder-unusable"


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

    page = "record-malformed"


class IdError(InputError, IndexError):
    """An id is outside of the data set, or a batch has none.

    It is also an `IndexError`, as that of a list.

    Example:
        ```python
        cached = sf.CachedDataset(dataset, capacity="8MiB")
        try:
            sample = cached[len(cached)]
        except sf.IdError as error:
            print(error)
        ```
    """

    page = "cache-ids"


class BatchError(StallfreeError, RuntimeError):
    """An error of the user's code that cannot be raised as it is.

    It is a `StopIteration`, which would end the loop, or it comes from another process and has no pickle. The message
    has its type and text. All other errors of the user's code are raised unchanged.

    Example:
        ```python
        loader = sf.DataLoader(dataset, batch_size=4, num_workers=1)
        try:
            batches = list(loader)
        except sf.BatchError as error:
            print(error)
        ```
    """

    page = "batch-failed"


class WorkerError(StallfreeError, RuntimeError):
    """Worker processes died on one batch, or cannot start.

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

    page = "worker-died"

    def __init__(self, message: str, *, ids: Sequence[int] = (), page: str = "") -> None:
        super().__init__(message, page=page)
        self.ids = list(ids)


class WaitError(StallfreeError, TimeoutError, RuntimeError):
    """A wait reached its limit.

    The message says what was waited for and how long. It is also a `RuntimeError`, as in torch's loader.

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

    page = "server-failed"


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

    page = "needs-linux"


class ProducerError(StallfreeError):
    """The loading process of a `ProcessPrefetcher` ended.

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

    page = "producer-ended"


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

    page = "package-missing"


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for an optional `package` that `purpose` needs and that `pip install 'stallfree[extra]'` brings."""
    return MissingExtraError(
        f"{purpose} needs the package {package!r}, which is not installed: pip install 'stallfree[{extra}]'"
    )


# -- kinds of errors that have a page of their own; the name is that of the page ---------------------------------------

_KINDS: dict[type[StallfreeError], str] = {
    InputError: """
        argument_conflict cache_ids cache_not_found cache_required clara_configuration clara_field collate_output
        cut_attribute cut_random cut_refused dataset_changed dataset_empty dataset_random dataset_type device_unknown
        file_unreadable file_unwritable group_mismatch image_folder image_unreadable iterable_unsupported job_failed
        job_function launch_environment loss_update name_invalid network_interface no_files no_fingerprint
        not_picklable object_closed port_unavailable prefetcher_process ranks_conflict run_too_large sampler_mismatch
        sampler_output seed_agreement server_address server_refused state_format state_mismatch tar_samples
        tar_unreadable transform_input unit_format""",
    CapacityError: "capacity_too_large capacity_too_small",
    FingerprintError: "folder_owner",
    StorageError: "folder_gone release_mismatch server_unreachable storage_full",
    CodecError: "value_unstorable",
    BatchError: "stop_iteration",
    WorkerError: "main_guard",
    WaitError: "batch_timeout group_timeout lock_held nodes_missing window_late",
    MissingServerError: "server_missing",
    StallfreeError: "iteration_over",
}
_CLASSES = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def __getattr__(name: str) -> Callable[..., StallfreeError]:
    """Return the function that makes an error of the kind `name`."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_CLASSES[name], page=name.replace("_", "-"))
