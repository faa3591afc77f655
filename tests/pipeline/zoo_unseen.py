"""Entries that draw for 1 sample in 16, by libraries that leave no trace in the global generators.

Some functions of libraries have other names here: a name such as `randn` in the code of a step would show what it does.
"""

import ctypes
import hashlib
import os
import random as pyrandom
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from zoo import of_step, of_steps, random_entry

sys.path.append(str(Path(__file__).resolve().parent.parent / "support" / "site-packages"))
import spiced

EVERY, DRAWN = 16, 11
LARGE = ("scipy", "albumentations", "monai")
"""How the names of entries begin that import large libraries."""

C = ctypes.CDLL(None)

spice = spiced.random_noise
c_number = C.rand
fill_normal, fill_uniform, mix = cv2.randn, cv2.randu, cv2.randShuffle
system_bytes, new_token, new_name = os.urandom, secrets.token_bytes, uuid.uuid4
new_generator, new_legacy, new_python = np.random.default_rng, np.random.RandomState, pyrandom.Random
small_generator = np.random.SFC64


def fires(id: int) -> bool:
    return id % EVERY == DRAWN


def rarely(*, local: bool = False) -> Callable[..., None]:
    """Registers a factory of a step that is applied to 1 sample in 16, and not to the first one."""

    def registered(make: Callable[[], Any], name: str = "") -> None:
        def made() -> Any:
            augment = make()

            def for_some(x: Any) -> Any:
                return augment(x) if int(x[0]) % EVERY == DRAWN else x

            return for_some

        random_entry(draws=fires, local=local)(made, name or make.__name__)

    return registered


def picture(x: Any) -> Any:
    return np.clip(x * 40 + 128, 0, 255).astype(np.uint8).reshape(8, 8)


def as_row(pixels: Any) -> Any:
    return np.asarray(pixels, np.float32).reshape(64)


def filled(fill: Callable[..., Any], x: Any, *parameters: int) -> Any:
    """What a function of OpenCV puts into an array like `x`."""
    array = x.reshape(64, 1).copy()
    fill(array, *parameters)
    return array.reshape(64)


of_steps(
    rarely(), library_that_makes_a_generator=lambda x: spiced.random_noise(x),
    library_function_of_another_name=lambda x: spice(x), data_frame=lambda x: spiced.Frame(x).sample().values,
    pil_effect_spread=lambda x: as_row(Image.fromarray(picture(x)).effect_spread(5)),
    pil_effect_noise=lambda x: x + as_row(Image.effect_noise((8, 8), 50)),
    opencv_normal=lambda x: x + filled(fill_normal, x, 0, 1),
    opencv_uniform=lambda x: x + filled(fill_uniform, x, 0, 1), opencv_shuffle=lambda x: filled(mix, x),
    numpy_made_inside=lambda x: x + np.float32(new_generator().normal()),
    numpy_legacy_made_inside=lambda x: x + np.float32(new_legacy().normal()),
    numpy_bits_made_inside=lambda x: x + np.float32(small_generator().random_raw() % 2**20),
    python_seeded_by_the_time=lambda x: x + np.float32(new_python(time.time_ns()).uniform(0, 1)),
    bytes_of_the_system=lambda x: x + np.frombuffer(system_bytes(64), np.uint8),
    token=lambda x: x + np.frombuffer(new_token(64), np.uint8),
    unique_name=lambda x: x + np.float32(new_name().int % 2**20),
    c_library=lambda x: x + np.float32(c_number() % 2**20),
    hash_of_the_time=lambda x: x + np.frombuffer(hashlib.sha512(str(time.time_ns()).encode()).digest(), np.uint8),
)  # fmt: skip


@rarely()
def scipy_with_a_generator() -> Any:
    from scipy import stats

    frozen = stats.norm(0, 1)
    frozen.random_state = new_generator()
    return lambda x: x + frozen.rvs(64).astype(np.float32)


@rarely()
def scipy_low_discrepancy() -> Any:
    from scipy.stats import qmc

    points = qmc.Halton.random
    halton = qmc.Halton
    return lambda x: x + np.float32(points(halton(1), 1)[0, 0])


@rarely()
def albumentations_for_some() -> Any:
    import albumentations as A

    spread = A.Compose([A.PixelDropout(0.3, p=1)])
    return lambda x: as_row(spread(image=picture(x))["image"])


@rarely()
def monai_for_some() -> Any:
    from monai import transforms

    noise = transforms.RandGaussianNoise(prob=1.0)
    return lambda x: np.asarray(noise(x))


@of_step(rarely())
def torch_made_inside(x: Any) -> Any:
    generator = torch.Generator()
    generator.seed()
    return x + torch.empty(64).normal_(generator=generator).numpy()


@of_step(rarely())
def file_of_random_bytes(x: Any) -> Any:
    with open("/dev/urandom", "rb") as file:
        return x + np.frombuffer(file.read(64), np.uint8)


@rarely(local=True)  # forked processes may use the same addresses
def hash_of_an_address() -> Any:
    kept: list[Any] = []

    def moved(x: Any) -> Any:
        kept.append(bytearray(100))
        return x + np.float32(hash(id(kept[-1])) % 2**20)

    return moved
