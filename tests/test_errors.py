"""The tree of errors: what users catch, and what survives the way from a worker to the training process."""

import copy
import pickle

import pytest

import stallfree.errors as errors
from stallfree.errors import DOCUMENTATION, StallfreeError, WorkerError, text_of

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
ALL: list[type[StallfreeError]] = [kind for kind in KINDS if issubclass(kind, StallfreeError)]
BUILTINS: dict[str, type[Exception]] = {
    "IdError": IndexError, "InputError": ValueError, "BatchError": RuntimeError, "CapacityError": ValueError,
    "FingerprintError": ValueError, "StorageError": OSError, "CodecError": TypeError, "WaitError": TimeoutError,
    "WorkerError": RuntimeError, "MissingExtraError": ImportError, "MissingServerError": OSError,
    "ProducerError": Exception, "PlatformError": NotImplementedError,
}  # fmt: skip
"""The error of Python that catches each."""


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_is_caught_as_pythons_own_is_pickled_and_ends_with_its_page(kind: type[StallfreeError]) -> None:
    assert kind.__doc__
    assert kind.__name__ in (errors.__doc__ or "")
    assert issubclass(kind, BUILTINS.get(kind.__name__, StallfreeError))
    assert str(kind("what to do")) == f"what to do\n{DOCUMENTATION}errors/{kind.page}/" if kind.page else "what to do"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(kind("what to do", page="lock-held"), protocol))
        assert type(again) is kind
        assert (text_of(again), again.page) == ("what to do", "lock-held")


def test_all_are_listed() -> None:
    assert set(BUILTINS) <= {kind.__name__ for kind in ALL}
    assert all(issubclass(kind, StallfreeError | Warning) for kind in KINDS)
    assert issubclass(errors.WaitError, RuntimeError)


def test_worker_errors_keep_their_ids() -> None:
    error = WorkerError("3 workers died", ids=[3, 1, 2])
    for again in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(again), text_of(again), again.ids) == (WorkerError, "3 workers died", [3, 1, 2])
