"""The layout of a cache, fixed at its creation and stored in `meta.json` beside its data."""

from __future__ import annotations

import json
import mmap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from stallfree.cache.memory.index import DamagedError, index_bytes, whole_pages
from stallfree.errors import capacity_too_small, release_mismatch
from stallfree.pipeline.structure import Structure, structure_of
from stallfree.units import format_size

META = "meta.json"
VERSION = 4
ALIGN = 64
LARGE_BLOCK = 16 << 10
SMALL_BLOCK = 256


@dataclass(frozen=True)
class Meta:
    """The description of one cache.

    Attributes:
        version: of the file layout.
        fingerprint: of the source, the deterministic part and the record format.
        num_ids: number of samples of the data set.
        block: bytes per block.
        num_blocks: maximum number of blocks.
        policy: name of the policy.
        scored: whether the policy keeps a score per id.
        common: key of the structure that all samples share, or "" if their sizes differ.
        capacity: requested bytes.
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
        """The structure that all samples share, or None."""
        return structure_of(self.common.encode("latin-1")) if self.common else None

    @property
    def kinds(self) -> dict[str, bool]:
        """The optional arrays of the index."""
        return {"scored": self.scored, "checked": self.on_disk}

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return index_bytes(self.num_ids, self.num_blocks, **self.kinds)

    def save(self, folder: Path) -> None:
        """Write `meta.json`."""
        fields = asdict(self)
        (folder / META).write_text(json.dumps({**fields, "check": _check(fields)}, indent=1))

    @staticmethod
    def load(folder: Path) -> Meta:
        """Read `meta.json`.

        Raises `StorageError` if it has another version, `DamagedError` if it is missing or damaged.
        """
        try:
            fields = json.loads((folder / META).read_text())
            check = fields.pop("check")
            if check != _check(fields):
                raise ValueError("its checksum is wrong")
            version = fields["version"]
            if version == VERSION:
                return Meta(**fields)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise DamagedError(
                f"the cache in {folder} cannot be read ({error}): remove it with `stallfree cache rm {folder.name}`"
            ) from error
        raise release_mismatch(
            f"the cache in {folder} was created by another version of stallfree (its format is {version}, this "
            f"version's is {VERSION}): give another name, or remove it with `stallfree cache rm {folder.name}`"
        )


def _check(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())


def chained_block(typical: int) -> int:
    """The bytes of a block if records are chains of blocks: about an eighth of `typical`, 256 B to 16 KiB."""
    block = SMALL_BLOCK
    while block < LARGE_BLOCK and block * 16 <= typical:
        block *= 2
    return block


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
    """Divide `capacity` bytes between index and blocks.

    With a `structure` of fixed size, a block is one record. Otherwise a record is a chain of blocks: `chained_block`.

    Raises `CapacityError` if the index alone exceeds the capacity.
    """
    common = ""
    if structure is not None and structure.fixed and structure.size > 0:
        block = -(-structure.size // ALIGN) * ALIGN
        common = structure.key.decode("latin-1")
        # One block per sample, and as many more as a 200th of the capacity can index: later samples may be larger.
        at_most = num_ids + capacity // 800
    else:
        block, at_most = chained_block(typical), (1 << 32) - 2
    kinds = {"scored": scored, "checked": on_disk}
    beside = whole_pages(1024 + 2 * len(common)) + mmap.PAGESIZE  # meta.json and the folder
    empty = index_bytes(num_ids, 0, **kinds) + beside

    def taken(blocks: int) -> int:
        return beside + index_bytes(num_ids, blocks, **kinds) + whole_pages(blocks * block)

    num_blocks = min(max(0, (capacity - empty) * 16 // (16 * block + 65)), at_most)  # 4 + 1/16 bytes of index each
    while num_blocks > 0 and taken(num_blocks) > capacity:
        num_blocks -= 1
    if num_blocks < 1:
        raise capacity_too_small(
            f"capacity={format_size(capacity)} holds no record: the index of {num_ids:,} samples takes "
            f"{format_size(empty)} and a block {format_size(block)}. Give {format_size(taken(8))} or more"
        )
    return Meta(VERSION, fingerprint, num_ids, block, num_blocks, policy, scored, common, capacity, on_disk)
