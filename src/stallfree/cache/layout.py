"""What a cache is made of, decided once when it is made, and kept in `meta.json` beside its data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from stallfree.cache.index import index_bytes
from stallfree.errors import CapacityError, StorageError
from stallfree.pipeline.codec import Structure, structure_of
from stallfree.units import format_size

VERSION = 1
ALIGN = 64
LARGE_BLOCK = 16 << 10
SMALL_BLOCK = 256


@dataclass(frozen=True)
class Meta:
    """The description of one cache.

    Attributes:
        version: of the files' layout.
        fingerprint: of the source, the deterministic part and the record format.
        num_ids: number of samples of the data set.
        block: bytes per block.
        num_blocks: blocks at most.
        policy: name of the policy.
        common: key of the structure that all samples share, or "" if their sizes differ.
        capacity: bytes asked for.
        on_disk: whether the arena is read by system calls.
    """

    version: int
    fingerprint: str
    num_ids: int
    block: int
    num_blocks: int
    policy: str
    scored: bool
    common: str
    capacity: int
    on_disk: bool

    def structure(self) -> Structure | None:
        """The structure that all samples share, if they do."""
        return structure_of(self.common.encode("latin-1")) if self.common else None

    def save(self, folder: Path) -> None:
        """Write `meta.json`."""
        (folder / "meta.json").write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(folder: Path) -> Meta:
        """Read `meta.json`. Raises `StorageError` if it is missing, damaged or of another version."""
        try:
            fields = json.loads((folder / "meta.json").read_text())
            if fields.get("version") != VERSION:
                raise ValueError(f"version {fields.get('version')}, this is version {VERSION}")
            return Meta(**fields)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{folder} holds no cache that can be read ({error}): remove it with `stallfree cache rm {folder.name}`"
            ) from error


def plan_layout(
    num_ids: int,
    capacity: int,
    *,
    fingerprint: str,
    policy: str,
    scored: bool,
    on_disk: bool,
    structure: Structure | None,
    typical: int,
) -> Meta:
    """Share `capacity` bytes between index and blocks.

    With a `structure` of fixed size a block is one record; else records of about `typical` bytes are chained from blocks of
    an eighth of that, at least 256 bytes and at most 16 KiB. Raises `CapacityError` if the index alone is larger.
    """
    common = ""
    if structure is not None and structure.fixed and structure.size > 0:
        block = -(-structure.size // ALIGN) * ALIGN
        common = structure.key.decode("latin-1")
        at_most = num_ids
    else:
        block = SMALL_BLOCK
        while block < LARGE_BLOCK and block * 16 <= typical:
            block *= 2
        at_most = (1 << 32) - 2
    empty = index_bytes(num_ids, 0, scored=scored, checked=on_disk)
    num_blocks = min(max(0, (capacity - empty) // (block + 8)), at_most)
    while num_blocks > 0 and index_bytes(num_ids, num_blocks, scored=scored, checked=on_disk) + num_blocks * block > capacity:
        num_blocks -= 1
    if num_blocks < 1:
        raise CapacityError(
            f"capacity={format_size(capacity)} holds no record: the index of {num_ids:,} samples takes "
            f"{format_size(empty)} and a block {format_size(block)}. Give {format_size(empty + 8 * (block + 4096))} or more"
        )
    return Meta(VERSION, fingerprint, num_ids, block, num_blocks, policy, scored, common, capacity, on_disk)
