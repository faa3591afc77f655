"""The tree of errors: what users catch, and what survives the way from a worker to the training process."""

from __future__ import annotations

import copy
import pickle

import pytest

import stallfree.errors as errors
from stallfree.errors import DOCUMENTATION, StallfreeError, WorkerError, missing_extra, text_of

ALL: list[type[StallfreeError]] = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
]
PLAIN = [kind for kind in ALL if kind is not WorkerError]


def test_every_error_is_a_stallfree_error() -> None:
    assert len(ALL) > 8
    assert all(issubclass(kind, StallfreeError) for kind in ALL)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("IdError", IndexError),
        ("InputError", ValueError),
        ("BatchError", RuntimeError),
        ("CapacityError", ValueError),
        ("FingerprintError", ValueError),
        ("StorageError", OSError),
        ("CodecError", TypeError),
        ("WaitError", TimeoutError),
        ("WaitError", RuntimeError),
        ("WorkerError", RuntimeError),
        ("MissingExtraError", ImportError),
        ("MissingServerError", OSError),
        ("ProducerError", Exception),
    ],
)
def test_the_builtin_that_fits_catches_it(name: str, builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="said so"):
        raise getattr(errors, name)("said so")


@pytest.mark.parametrize("kind", ALL)
def test_every_error_says_what_it_is_for(kind: type[Exception]) -> None:
    assert kind.__doc__
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_errors_survive_pickle(kind: type[Exception], protocol: int) -> None:
    back = pickle.loads(pickle.dumps(kind("what to do", page="lock-held"), protocol))
    assert type(back) is kind
    assert (text_of(back), back.page) == ("what to do", "lock-held")


@pytest.mark.parametrize("kind", ALL)
def test_the_text_ends_with_the_address_of_the_page(kind: type[StallfreeError]) -> None:
    assert str(kind("what to do")) == f"what to do\n{DOCUMENTATION}errors/{kind.page}/" if kind.page else "what to do"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_worker_error_survives_pickle(protocol: int) -> None:
    back = pickle.loads(pickle.dumps(WorkerError("3 workers died", ids=[3, 1, 2]), protocol))
    assert type(back) is WorkerError
    assert (text_of(back), back.ids) == ("3 workers died", [3, 1, 2])


def test_errors_can_be_copied() -> None:
    assert copy.deepcopy(WorkerError("died", ids=[1])).ids == [1]


def test_missing_extra_names_the_command() -> None:
    error = missing_extra("simplejpeg", "turbo", "fast JPEG decoding")
    assert "pip install 'stallfree[turbo]'" in str(error)
    assert "simplejpeg" in str(error)
    assert "fast JPEG decoding" in str(error)
