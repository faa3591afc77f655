"""A group of jobs on this host: its folder, its terms, and the coordinators started by this process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from stallfree.errors import InputError, StorageError, WorkerError, collate_output, group_mismatch, name_invalid
from stallfree.ipc.folders import SharedFolder, check_name, sweep
from stallfree.ipc.locks import FileLock
from stallfree.ipc.process import Child
from stallfree.ipc.remote import unpack_error
from stallfree.shared.coordinator import Setup, coordinate

_Found = TypeVar("_Found")

_META_VERSION = 3
_START_SECONDS = 120.0

_WORDS = {
    "data set": "the data set",
    "transform": "the transform",
    "collate_fn": "collate_fn",
}


@dataclass(frozen=True)
class Terms:
    """The settings that the first job of a group decides and later jobs read.

    Attributes:
        same: values that must be equal in all jobs that give one (not None). Messages show the values, except
            for the keys of `_WORDS`, which are fingerprints.
        chunk: samples prepared as one batch: those of a batch of the first job, in all of its ranks.
        workers: number of worker processes of the group.
        ahead: batches in flight.
        staging: bytes of the ring, or None.
    """

    same: dict[str, Any]
    chunk: int
    workers: int
    ahead: int
    staging: int | None


class Group:
    """One job's attachment to the group `name`, which is created if it does not exist.

    Attributes:
        folder: the group's folder.
        terms: the group's terms.

    Raises `InputError` if this job's terms differ from the group's.
    """

    def __init__(self, name: str, terms: Terms) -> None:
        self.name = _checked(name)
        self._attached = SharedFolder(f"group-{name}", initialize=lambda path: _write(path / "group.json", terms))
        self.folder = self._attached.path
        try:
            self.terms = _read(self.folder)
            pairs = {key: (self.terms.same.get(key), value) for key, value in terms.same.items()}
            differing = [key for key, pair in pairs.items() if pair[0] != pair[1] and None not in pair]
            if differing:
                raise group_mismatch(
                    f"this job does not fit into the group {name!r}: "
                    + "; ".join(_difference(key, self.terms.same.get(key), terms.same[key]) for key in differing)
                    + ". Give the same, or the name of another group"
                )
            self._starting = FileLock(self.folder / "starting")
            self._members = FileLock(self.folder / "members")
        except BaseException:
            self._attached.close()
            raise

    def check_sizes(self, batch_size: int, ranks: int, own_collate: bool) -> None:
        """Raise `InputError` if batches of this size cannot be made of the group's chunks."""
        chunk, unit = self.terms.chunk, batch_size * ranks
        if own_collate and batch_size != chunk:
            raise collate_output(
                f"batch_size={batch_size} on {ranks} ranks, and the group {self.name!r} has batches of {chunk}: those "
                "of a collate_fn cannot be split or joined; use one rank, and the same batch_size in all jobs"
            )
        if chunk % unit and unit % chunk:
            size = f"batch_size={batch_size}" + (f" on each of {ranks} ranks" if ranks > 1 else "")
            raise collate_output(
                f"{size} does not match the group {self.name!r}, whose first job has batches of {chunk} samples: give "
                "a multiple or a divisor of that"
            )

    def agree_on_seed(self, seed: int) -> int:
        """Return the group's seed, after setting it to `seed` if the group has none."""
        file, draft = self.folder / "seed", self.folder / f"seed-{os.getpid()}-{secrets.token_hex(4)}"
        given = self.terms.same["seed"]
        try:
            draft.write_text(str(seed if given is None else given))
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)
            return int(file.read_text())
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the seed of the group in {self.folder} cannot be read: {error}. Give another name"
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    def claim(self) -> int:
        """Take a lock that marks this process as a live member; it ends with the process or with `release`."""
        return self._members.claim_any()

    def release(self, claim: int) -> None:
        """Release the lock that `claim` returned."""
        self._members.release(claim)

    def reach(self, setup: Setup, connect: Callable[[Path], _Found | None]) -> _Found:
        """Return the result of `connect` for the folder; starts a coordinator first if there is none.

        Raises `EOFError` if the new coordinator died at once.
        """
        found = connect(self.folder)
        if found is None:
            with self._starting.hold(_START_SECONDS, f"starting the group {self.name!r}"):
                found = connect(self.folder)
                if found is None:
                    _start(setup, self._attached)
                    found = connect(self.folder)
        if found is None:
            raise EOFError
        return found

    def close(self) -> None:
        """Leave the group. The last member removes the folder."""
        self._members.close()
        self._starting.close()
        self._attached.close()
        sweep(self.folder.parent)  # remove the folders of killed coordinators

    def __reduce__(self) -> Any:
        raise TypeError("a group belongs to the process that joined it")


def _checked(name: Any) -> str:
    try:
        check_name(f"group-{name}" if isinstance(name, str) and name else name)
    except InputError:
        raise name_invalid(
            f"group={name!r}: give a name of 1 to 110 of the letters a-z and A-Z, digits, '.', '_' and '-'"
        ) from None
    return str(name)


def _write(path: Path, terms: Terms) -> None:
    path.write_text(json.dumps({"version": _META_VERSION, **terms.__dict__}))


def _read(folder: Path) -> Terms:
    try:
        given = json.loads((folder / "group.json").read_bytes())
        version = given.pop("version")
        if version != _META_VERSION:
            raise InputError(
                f"the group in {folder} was made by another release of stallfree: give another name",
                page="release-mismatch",
            )
        return Terms(**given)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise StorageError(f"the group's folder {folder} cannot be read: {error}. Give another name") from error


def _difference(key: str, theirs: Any, ours: Any) -> str:
    if key in _WORDS:
        return f"{_WORDS[key]} differs (its code, parameters or files)"
    return f"it has {key}={theirs!r}, this job gives {key}={ours!r}"


# -- coordinators that this process started --------------------------------------------------------------------------


_started: list[tuple[Path, Child]] = []


def _start(setup: Setup, attached: SharedFolder) -> None:
    """Start a coordinator and wait until it accepts members. One that hangs at its start is replaced."""
    options, deadline = setup.options, time.monotonic() + _START_SECONDS
    inherited = attached if options.context.get_start_method() == "fork" else None
    parts = (("the data set", options.dataset), ("collate_fn", options.collate))
    for attempt in count():
        child = Child(
            coordinate,
            setup,
            inherited,
            context=options.context,
            name="stallfree-coordinator",
            parts=parts,
            attempt=attempt,
            leads=True,
        )
        try:
            problem = child.wait_until_reported(deadline - time.monotonic())
            if problem is None:
                _started.append((setup.folder, child))
                return
            error: BaseException = unpack_error(problem)
        except (EOFError, TimeoutError):
            error = EOFError()  # the child was killed before it reported
        except WorkerError as no_guard:
            error = no_guard
        hangs = child.overdue and time.monotonic() < deadline
        child.end(0.0)
        if not hangs:
            raise error


def reap(seconds: float, folder: Path) -> None:
    """Wait up to `seconds` for each coordinator of the group in `folder` that this process started; it is ending."""
    for started in list(_started):
        child = started[1]
        if child.join(seconds if started[0] == folder else 0.0) is not None:
            _started.remove(started)
            child.end(0.0)
