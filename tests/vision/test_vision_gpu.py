"""Pictures decoded and cropped on a GPU: `python -m pytest -m gpu tests/vision`. Nothing here runs without one."""

import contextlib
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from vision_data import distance, encode, kinds, photograph, seeded

import stallfree as sf
from loader_data import Made
from on_gpu import needs_gpu, no_leaks  # noqa: F401

pytestmark = [*needs_gpu, pytest.mark.timeout(60)]
SIZE = (48, 40)
CLOSE = 3.0
"""Mean difference of two decoders: nvJPEG does not smooth the colours of subsampled pictures."""


@cache
def files() -> dict[str, bytes]:
    made = kinds(photograph(180, 241) // 4 + 90, photograph(1700, 2400) // 4 + 90)
    return {name: file for name, file in made.items() if name not in ("one pixel", "a line")}


def step(*, on_device: bool, **options: Any) -> sf.DecodeRandomResizedCrop:
    return sf.DecodeRandomResizedCrop(SIZE, scale=(0.4, 1), flip=0.5, on_device=on_device, **options)


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_every_format_gives_the_crop_of_the_cpu(layout: Any) -> None:
    expected, samples = (
        [seeded(number, step(on_device=way, layout=layout), file) for number, file in enumerate(files().values())]
        for way in (False, True)
    )
    pixels = default_collate(samples).to("cuda", non_blocking=True)
    assert pixels.is_cuda
    for name, mine, theirs in zip(files(), pixels.cpu(), expected, strict=True):
        assert distance(mine, theirs).mean() < CLOSE, name


def test_what_the_decoder_rejects_is_decoded_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.io

    samples = [step(on_device=True)(file) for file in list(files().values())[:4]]
    wanted = default_collate(samples).to("cuda")
    decode = torchvision.io.decode_jpeg

    def rejects(pictures: Any, *arguments: Any, **options: Any) -> Any:
        if any(len(picture) == len(samples[2].data) for picture in pictures):
            raise RuntimeError("Failed to decode")
        return decode(pictures, *arguments, **options)

    monkeypatch.setattr(torchvision.io, "decode_jpeg", rejects)
    assert distance(default_collate(samples).to("cuda").cpu(), wanted.cpu()).mean() < 1


def test_a_damaged_picture_is_an_error_or_garbage_and_the_next_batch_is_right() -> None:
    whole = encode(photograph(90, 120) // 4 + 90, quality=92)
    rng = np.random.default_rng(0)
    for _ in range(20):
        bad = bytearray(whole)
        for at in rng.integers(20, len(bad) - 2, 8):
            bad[at] = int(rng.integers(256))
        with contextlib.suppress(sf.StallfreeError):
            default_collate([seeded(1, step(on_device=True), bytes(bad))]).to("cuda")
        there = default_collate([seeded(1, step(on_device=True), whole)]).to("cuda")
        assert distance(there[0].cpu(), seeded(1, step(on_device=False), whole)).mean() < CLOSE


class Numbers:
    """Makes pictures of one grey, which is their number, and of sizes of many kinds."""

    def __init__(self) -> None:
        sizes = [(40 + 8 * (id % 7), 48 + 8 * (id % 5), 3) for id in range(251)]
        self.files = [encode(np.full(size, id, np.uint8), quality=95) for id, size in enumerate(sizes)]
        self.step = step(on_device=True)

    def __call__(self, id: int) -> Any:
        return self.step(self.files[id % 251]), id % 251


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_right_under_jitter_and_memory_is_flat(workers: int) -> None:
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    reserved = []
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    with sf.DataLoader(Made(4000, Numbers()), 16, shuffle=True, device="cuda", **options) as loader:
        for _ in range(6):
            count = 0
            for number, (pictures, labels) in enumerate(loader):
                torch.cuda._sleep(int(random.random() * 400_000) if number % 3 else 0)
                bad += ((pictures.int() - labels.view(-1, 1, 1, 1)).abs() > 3).sum()
                count += len(labels)
            assert count == 4000
            reserved.append(torch.cuda.memory_reserved())
    assert bad.item() == 0
    assert max(reserved) - reserved[2] <= 20 << 20
