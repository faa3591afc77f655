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
`page`, or one of the functions below the classes.
"""

from collections.abc import Sequence
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

argument_conflict = partial(InputError, page="argument-conflict")
batch_timeout = partial(WaitError, page="batch-timeout")
cache_ids = partial(InputError, page="cache-ids")
cache_not_found = partial(InputError, page="cache-not-found")
cache_required = partial(InputError, page="cache-required")
capacity_too_large = partial(CapacityError, page="capacity-too-large")
capacity_too_small = partial(CapacityError, page="capacity-too-small")
clara_configuration = partial(InputError, page="clara-configuration")
clara_field = partial(InputError, page="clara-field")
collate_output = partial(InputError, page="collate-output")
cut_attribute = partial(InputError, page="cut-attribute")
cut_random = partial(InputError, page="cut-random")
cut_refused = partial(InputError, page="cut-refused")
dataset_changed = partial(InputError, page="dataset-changed")
dataset_empty = partial(InputError, page="dataset-empty")
dataset_random = partial(InputError, page="dataset-random")
dataset_type = partial(InputError, page="dataset-type")
device_unknown = partial(InputError, page="device-unknown")
file_unreadable = partial(InputError, page="file-unreadable")
file_unwritable = partial(InputError, page="file-unwritable")
folder_gone = partial(StorageError, page="folder-gone")
folder_owner = partial(FingerprintError, page="folder-owner")
group_mismatch = partial(InputError, page="group-mismatch")
group_timeout = partial(WaitError, page="group-timeout")
image_folder = partial(InputError, page="image-folder")
image_unreadable = partial(InputError, page="image-unreadable")
iterable_unsupported = partial(InputError, page="iterable-unsupported")
iteration_over = partial(StallfreeError, page="iteration-over")
job_failed = partial(InputError, page="job-failed")
job_function = partial(InputError, page="job-function")
launch_environment = partial(InputError, page="launch-environment")
lock_held = partial(WaitError, page="lock-held")
loss_update = partial(InputError, page="loss-update")
main_guard = partial(WorkerError, page="main-guard")
name_invalid = partial(InputError, page="name-invalid")
network_interface = partial(InputError, page="network-interface")
no_fingerprint = partial(InputError, page="no-fingerprint")
no_files = partial(InputError, page="no-files")
nodes_missing = partial(WaitError, page="nodes-missing")
not_picklable = partial(InputError, page="not-picklable")
object_closed = partial(InputError, page="object-closed")
port_unavailable = partial(InputError, page="port-unavailable")
prefetcher_process = partial(InputError, page="prefetcher-process")
ranks_conflict = partial(InputError, page="ranks-conflict")
release_mismatch = partial(StorageError, page="release-mismatch")
run_too_large = partial(InputError, page="run-too-large")
sampler_mismatch = partial(InputError, page="sampler-mismatch")
sampler_output = partial(InputError, page="sampler-output")
seed_agreement = partial(InputError, page="seed-agreement")
server_address = partial(InputError, page="server-address")
server_missing = partial(MissingServerError, page="server-missing")
server_refused = partial(InputError, page="server-refused")
server_unreachable = partial(StorageError, page="server-unreachable")
state_format = partial(InputError, page="state-format")
state_mismatch = partial(InputError, page="state-mismatch")
stop_iteration = partial(BatchError, page="stop-iteration")
storage_full = partial(StorageError, page="storage-full")
tar_samples = partial(InputError, page="tar-samples")
tar_unreadable = partial(InputError, page="tar-unreadable")
transform_input = partial(InputError, page="transform-input")
unit_format = partial(InputError, page="unit-format")
value_unstorable = partial(CodecError, page="value-unstorable")
window_late = partial(WaitError, page="window-late")
