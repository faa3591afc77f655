"""Pictures that stay encoded until they are on the device give what the CPU's step gives. Here the device is a CPU."""

import contextlib
import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torch.utils.data import default_collate
from vision_data import distance, encode, kinds, photograph, seeded

import stallfree as sf
from stallfree.vision import encoded

SIZE = (24, 20)
RANGE: dict[str, Any] = {"scale": (0.3, 1.0), "flip": 0.5}


def on_device(**options: Any) -> sf.DecodeRandomResizedCrop:
    return sf.DecodeRandomResizedCrop(SIZE, **{**RANGE, **options}, on_device=True)


STAYS_ENCODED = {"4:2:0", "4:4:4", "4:2:2", "grey", "odd", "with EXIF", "restarts", "one pixel", "a line", "large"}


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_every_format_gives_the_crop_of_the_cpu(engine: None, layout: Any) -> None:
    here, there = sf.DecodeRandomResizedCrop(SIZE, layout=layout, **RANGE), on_device(layout=layout)
    files = kinds(photograph(90, 121), photograph(401, 699))
    expected, samples = [], []
    for number, file in enumerate(files.values()):
        expected.append(seeded(number, here, file))
        state = random.getstate()
        samples.append(seeded(number, there, file))
        assert random.getstate() == state
    pictures = default_collate(samples)
    draws = random.getstate(), torch.get_rng_state().tolist()
    pixels = pictures.to("cpu", non_blocking=True)
    assert (random.getstate(), torch.get_rng_state().tolist()) == draws
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    for name, sample, mine, theirs in zip(files, samples, pixels, expected, strict=True):
        assert (sample.data == files[name]) == (name in STAYS_ENCODED), name
        assert distance(mine, theirs).mean() < 2, name


def test_resizing_is_that_of_torch() -> None:
    file = encode(photograph(75, 141), quality=95, subsampling=0)
    decoded = torch.from_numpy(np.array(sf.DecodeImage()(file))).permute(2, 0, 1)[None]
    for seed in range(8):
        size = (7 + 11 * seed, 60 - 5 * seed)
        step = sf.DecodeRandomResizedCrop(size, layout="CHW", flip=0.5, on_device=True)
        (top, left, height, width), mirror = seeded(seed, step.draw, 75, 141)
        part = decoded[:, :, top : top + height, left : left + width]
        wanted = interpolate(part, size, mode="bilinear", antialias=True)[0]
        assert distance(seeded(seed, step, file).to("cpu"), wanted.flip(2) if mirror else wanted).max() <= 1


def test_batches_are_resized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [encode(photograph(40 + 7 * number, 90 - 5 * number)) for number in range(9)]
    step = on_device(layout="CHW")
    pictures = default_collate([step(file) for file in files])
    whole = pictures.to("cpu")
    for limit in (1, 30_000, 80_000):
        monkeypatch.setattr(encoded, "_BYTES_AT_ONCE", limit)
        assert distance(pictures.to("cpu"), whole).max() <= 1


@pytest.mark.parametrize(("form", "workers"), [(None, 0), ("fetched", 1), ("prepared", 1)])
def test_a_loader_gives_the_same_crops_with_either_placement(tmp_path: Path, form: Any, workers: int) -> None:
    paths = [tmp_path / f"{number}.jpg" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_bytes(encode(photograph(50 + number, 80, number), quality=95, progressive=number == 5))
    epochs: list[Any] = []
    for step, device in ((sf.DecodeRandomResizedCrop(SIZE, **RANGE), None), (on_device(), "cpu")):
        plain = sf.FileDataset(paths, range(12), step)
        data: Any = plain if form is None else sf.CachedDataset(plain, capacity="1MB", form=form)
        with sf.DataLoader(data, 5, shuffle=True, seed=3, num_workers=workers, device=device) as loader:
            epochs.append([(pictures.clone(), labels.tolist()) for _ in range(2) for pictures, labels in loader])
        if form is not None:
            data.close()
    for (pixels, labels), (mine, same) in zip(*epochs, strict=True):
        assert labels == same
        assert distance(mine, pixels).mean() < 2


@pytest.mark.parametrize(("loader", "workers"), [(sf.DataLoader, 2), (torch.utils.data.DataLoader, 0)])
def test_without_a_device_the_loop_or_a_prefetcher_sends_the_pictures(loader: Any, workers: int) -> None:
    data = [(on_device()(encode(photograph(30, 40, seed))), seed) for seed in range(6)]
    batches = list(loader(data, 3, num_workers=workers))
    assert [numbers.tolist() for _, numbers in batches] == [[0, 1, 2], [3, 4, 5]]
    sent = sf.DevicePrefetcher(loader(data, 3), "cpu", transform_on_device=lambda batch: batch[0].float())
    for (pictures, _), pixels in zip(batches, sent, strict=True):
        assert not isinstance(pictures, torch.Tensor)
        assert torch.equal(pictures.to("cpu").float(), pixels)
        assert pixels.shape == (3, *SIZE, 3)


def test_single_samples_and_copies() -> None:
    step = on_device()
    sample = step(encode(photograph(30, 40)))
    (alone,) = torch.utils.data.DataLoader([sample], batch_size=None)  # type: ignore[arg-type]
    batch = pickle.loads(pickle.dumps(default_collate([sample])))
    results = [each.to("cpu") for each in (sample, pickle.loads(pickle.dumps(sample)), alone)] + [batch.to("cpu")[0]]
    results += sf.DataLoader([sample], batch_size=None, device="cpu")
    assert all(torch.equal(each, results[0]) for each in results)
    assert "on_device=True" in repr(step)


def test_what_cannot_be_decoded_is_named() -> None:
    file, step = encode(photograph(60, 80)), on_device()
    with pytest.raises(sf.InputError, match="no whole picture"):
        step(file[: len(file) // 2])
    damaged = bytearray(file)
    damaged[damaged.index(b"\xff\xdb") + 4] = 0x7F  # the number of a quantization table
    with pytest.raises(sf.InputError, match="picture 1 of the batch"):
        default_collate([step(file), step(bytes(damaged))]).to("cpu")
    with pytest.raises(sf.InputError, match="several sizes"):
        default_collate([step(file), sf.DecodeRandomResizedCrop(9, on_device=True)(file)]).to("cpu")


def test_headers_with_any_bytes_are_read_without_an_error() -> None:
    file, rng = encode(photograph(20, 30), exif=b"Exif\0\0" + bytes(20)), random.Random(0)
    head = file.index(b"\xff\xda")
    for _ in range(3000):
        data = bytearray(file)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(head)] = rng.randrange(256)
        size = encoded.baseline_size(bytes(data[: rng.randrange(len(data))]) if rng.random() < 0.2 else bytes(data))
        if size is not None:
            with contextlib.suppress(OSError), Image.open(io.BytesIO(data)) as image:
                assert image.size == size[::-1]
