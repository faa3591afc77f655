"""A group of jobs on this host: its folder, its terms, and the coordinators started by this process."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from stallfree.errors import InputError, StorageError, WorkerError, collate_output, group_mismatch, name_invalid
from stallfree.ipc.channel import unpack_error
from stallfree.ipc.folders import SharedFolder, check_name, sweep
from stallfree.ipc.locks import FileLock
from stallfree.ipc.process import Child
from stallfree.shared.coordinator import GroupSetup, coordinate
from stallfree.shared.link import Link

_META_VERSION = 4
_START_SECONDS = 120.0

FINGERPRINTED = "the data set", "the transform", "collate_fn"
"""Keys of `Terms.same` whose values are fingerprints, which messages do not show."""


@dataclass(frozen=True)
class Terms:
    """The settings that the first job of a group decides and later jobs read.

    Attributes:
        same: values that must be equal in all jobs that give one (not None).
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
        try:
            check_name(f"group-{name}" if isinstance(name, str) and name else name)
        except InputError:
            raise name_invalid(
                f"group={name!r}: give a name of 1 to 110 of the letters a-z and A-Z, digits, '.', '_' and '-'"
            ) from None
        self.name = name
        self._attached = SharedFolder(f"group-{name}", initialize=lambda path: _write(path / "group.json", terms))
        self.folder = self._attached.path
        try:
            self.terms = _read(self.folder)
            self._check_same(terms.same)
            self._starting = FileLock(self.folder / "starting")
        except BaseException:
            self._attached.close()
            raise

    def _check_same(self, ours: dict[str, Any]) -> None:
        """Raise `InputError` if values of this job differ from the group's."""
        pairs = {key: (self.terms.same.get(key), value) for key, value in ours.items()}
        differing = [
            f"{key} differs (its code, parameters or files)"
            if key in FINGERPRINTED
            else f"it has {key}={theirs!r}, this job gives {key}={own!r}"
            for key, (theirs, own) in pairs.items()
            if theirs != own and theirs is not None and own is not None
        ]
        if differing:
            raise group_mismatch(
                f"this job does not fit into the group {self.name!r}: {'; '.join(differing)}. Give the same, or the "
                "name of another group"
            )

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

    def agree_on_seed(self, seed: int, *, drawn: bool = False) -> int:
        """Return the group's seed, after setting it to `seed` if the group has none.

        Raises `InputError` if the group has another one, unless `seed` is only drawn.
        """
        file, first = self.folder / "seed", self.terms.same["seed"]
        try:
            with contextlib.suppress(FileExistsError):
                file.symlink_to(str(seed if first is None else first))  # which exists with its content or not at all
            self.terms.same["seed"] = int(os.readlink(file))
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the seed of the group in {self.folder} cannot be read: {error}. Give another name"
            ) from error
        if not drawn:
            self._check_same({"seed": seed})
        return int(self.terms.same["seed"])

    def connect(self, setup: GroupSetup) -> Link:
        """Connect to the coordinator; starts one first if there is none.

        Raises `EOFError` if the new coordinator died at once.
        """
        link = Link.open(self.folder)
        if link is None:
            with self._starting.hold(_START_SECONDS, f"starting the group {self.name!r}"):
                link = Link.open(self.folder)
                if link is None:
                    _start(setup, self._attached)
                    link = Link.open(self.folder)
        if link is None:
            raise EOFError
        return link

    def close(self) -> None:
        """Leave the group. The last member removes the folder."""
        self._starting.close()
        self._attached.close()
        sweep(self.folder.parent)  # remove the folders of killed coordinators


def _write(path: Path, terms: Terms) -> None:
    path.write_text(json.dumps({"version": _META_VERSION, **terms.__dict__}))


def _read(folder: Path) -> Terms:
    try:
        entries = json.loads((folder / "group.json").read_bytes())
        version = entries.pop("version")
        if version == _META_VERSION:
            return Terms(**entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"the group's folder {folder} cannot be read: {error}. Give another name") from error
    raise InputError(
        f"the group in {folder} was made by another release of stallfree: give another name", page="release-mismatch"
    )


# -- coordinators that this process started --------------------------------------------------------------------------


_started: list[tuple[Path, Child]] = []


def _start(setup: GroupSetup, attached: SharedFolder) -> None:
    """Start a coordinator and wait until it accepts members. One that hangs at its start is replaced."""
    options, deadline = setup.options, time.monotonic() + _START_SECONDS
    inherited = attached if options.context.get_start_method() == "fork" else None
    parts = (("the data set", options.dataset), ("collate_fn", options.collate))
    for attempt in count():
        child = Child(
            *(coordinate, setup, inherited),
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
            error = unpack_error(problem)
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
