"""Entries made of albumentations, MONAI, and stand-ins for torchvision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from standins import V1, foreign, torchvision_compose
from zoo_entry import images, named, random_entry, rows, steady_entry, tensors

# -- albumentations --------------------------------------------------------------------------------------------------


@steady_entry(images)
def albumentations_resize() -> Any:
    import albumentations as A

    return A.Compose([A.Resize(16, 16), A.Normalize()])


@random_entry(images, prefix=True)
def albumentations_resize_then_noise() -> Any:
    import albumentations as A

    return [A.Resize(16, 16), A.GaussNoise(p=1)]


@random_entry(images, coarse=True)
def albumentations_lambda() -> Any:
    import albumentations as A

    return A.Lambda(image=lambda image, **_: image + np.random.randint(0, 100), p=1)


# -- MONAI -----------------------------------------------------------------------------------------------------------


def channels_first() -> list[Any]:
    return [np.ascontiguousarray(pixels.transpose(2, 0, 1)).astype(np.float32) for pixels in images()]


def with_keys() -> list[Any]:
    return [{"image": array, "id": id} for id, array in enumerate(channels_first())]


@steady_entry(with_keys)
def monai_scale_by_key() -> Any:
    from monai import transforms

    return transforms.Compose([transforms.NormalizeIntensityd("image"), transforms.CenterSpatialCropd("image", (8, 8))])


@random_entry(with_keys, prefix=True)
def monai_scale_then_noise_by_key() -> Any:
    from monai import transforms

    return transforms.Compose([transforms.ScaleIntensityd("image"), transforms.RandGaussianNoised("image", prob=1.0)])


@random_entry(with_keys, draws=lambda id: id % 4 == 1)
def monai_lambda_for_some() -> Any:
    from monai import transforms

    class Augmentd(transforms.MapTransform):
        def __call__(self, data: Any) -> Any:
            out = dict(data)
            if out["id"] % 4 == 1:
                out["image"] = out["image"] + np.random.normal()
            return out

    return Augmentd(["image"])


# -- torchvision -----------------------------------------------------------------------------------------------------


steady_entry(tensors)(
    lambda: torchvision_compose(foreign("Normalize", V1, __call__=lambda self, x: (x - 0.5) / 0.5)),
    "torchvision_normalise",
)


@random_entry(tensors, prefix=True)
def torchvision_normalise_then_erase() -> Any:
    def erase(self: Any, x: Any) -> Any:
        return x * (torch.rand(64) > 0.5)

    return torchvision_compose(
        foreign("Normalize", V1, __call__=lambda self, x: (x - 0.5) / 0.5), foreign("RandomErasing", V1, __call__=erase)
    )


@random_entry(rows)
def torchvision_subclass_that_draws() -> Any:
    base = type(foreign("Resize", V1))
    member = {"__call__": lambda self, x: x + np.random.default_rng().normal()}
    return type("MyResize", (base,), {"__module__": __name__, **member})()


@random_entry(named, prefix=True)
def on_item_then_random() -> Any:
    import stallfree as sf

    return [sf.OnItem("x", lambda x: np.sort(x)), sf.OnItem("x", lambda x: x + np.random.default_rng().normal())]
