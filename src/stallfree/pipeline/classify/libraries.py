"""The randomness that torchvision, albumentations and MONAI declare for their transforms.

Classes are recognised by name and module, so that no library is imported here.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

from stallfree.pipeline._objects import class_functions, code_names, comes_from
from stallfree.pipeline.compose import OnItem, flatten, is_albumentations, is_monai_compose
from stallfree.pipeline.marks import drew, mark_of

_TORCHVISION_RANDOM = {
    *("AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianBlur", "GaussianNoise", "JPEG"),
    *("MixUp", "RandAugment", "ScaleJitter", "TrivialAugmentWide"),
}  # and all names that start with Random
_TORCHVISION_STEADY = {
    *(
        "CenterCrop",
        "ClampBoundingBoxes",
        "ClampKeyPoints",
        "ConvertBoundingBoxFormat",
        "ConvertImageDtype",
        "FiveCrop",
    ),
    *("Grayscale", "Identity", "ImageClassification", "LinearTransformation", "Normalize", "ObjectDetection"),
    *("OpticalFlow", "PILToTensor", "Pad", "RGB", "Resize", "SanitizeBoundingBoxes", "SanitizeKeyPoints", "Scale"),
    *("SemanticSegmentation", "SetClampingMode", "TenCrop", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor"),
    *("ToTensor", "UniformTemporalSubsample", "VideoClassification"),
}
_ALBUMENTATIONS_DRAWS = {"py_random", "random_generator", "random", "random_utils"}
_ALBUMENTATIONS_BY_SETTING = {
    *("CenterCrop", "CenterCrop3D", "Crop", "LongestMaxSize", "PadIfNeeded", "PadIfNeeded3D", "SmallestMaxSize"),
}
_MONAI_WRAPPERS = {"Lambda", "Lambdad", "TorchIO", "TorchIOd", "TorchVision", "TorchVisiond"}


def known(transform: Any) -> tuple[bool, str] | None:
    """Return whether `transform` is random, and the mark or library that declares it; None if none does."""
    mark = mark_of(transform)
    if mark is not None:
        return mark, "mark"
    if drew(transform):
        return True, "seen"
    inner = _wrapped(transform)
    if inner is not None:
        return known(inner)
    parts = flatten(transform)
    if parts and parts[0] is not transform:
        signs = [known(part) for part in parts]
        random_ones = [sign for sign in signs if sign is not None and sign[0]]
        return random_ones[0] if random_ones else None if None in signs else signs[0]
    for library, sign in (("torchvision", _torchvision), ("albumentations", _albumentations), ("monai", _monai)):
        random = sign(transform)
        if random is not None:
            return random, library
    return None


def may_draw(transform: Any) -> bool:
    """Return whether random draws of the deterministic `transform` are harmless, by its mark or its library.

    A composition of albumentations draws to decide whether to run, even if it always runs.
    """
    return mark_of(transform) is False or known(transform) == (False, "albumentations")


def _wrapped(transform: Any) -> Any:
    """Return the transform to which `transform` only passes its value; None if there is none."""
    if type(transform) is OnItem:
        return transform.transform
    if isinstance(transform, functools.partial):
        return transform.func
    if type(transform).__name__ == "Lambda" and comes_from(type(transform), "torchvision.transforms"):
        return transform.lambd
    if is_monai_compose(transform) and len(transform.transforms) == 1:
        return transform.transforms[0]
    return None


def _all_of(transforms: Any) -> bool | None:
    """Return whether one of `transforms` is random; None if none is known to be random and not all are known."""
    verdicts = [known(transform) for transform in transforms]
    if any(verdict is not None and verdict[0] for verdict in verdicts):
        return True
    return None if None in verdicts else False


def _torchvision(transform: Any) -> bool | None:
    if isinstance(transform, FunctionType):
        functional = transform.__module__ or ""
        if functional.startswith("torchvision.transforms.") and "functional" in functional:
            return transform.__name__.startswith("gaussian_noise")
        return None
    for cls in type(transform).__mro__:
        if comes_from(cls, "torchvision.transforms"):
            if cls.__name__.startswith("Random") or cls.__name__ in _TORCHVISION_RANDOM:
                return True
            if cls is type(transform) and cls.__name__ in _TORCHVISION_STEADY:
                return False
    return None


def _albumentations(transform: Any) -> bool | None:
    """Deterministic are library transforms that always (`p=1`) or never run, and whose code draws no random numbers."""
    if not is_albumentations(transform):
        return None
    cls = type(transform)
    if 0 < transform.p < 1:
        return True
    if hasattr(transform, "transforms"):
        if cls.__name__ in ("Compose", "Sequential") and comes_from(cls, "albumentations"):
            return False if transform.p <= 0 else _all_of(transform.transforms)
        return True
    if not comes_from(cls, "albumentations") or cls.__name__ == "Lambda":
        return None
    if transform.p <= 0:
        return False
    if cls.__name__ in _ALBUMENTATIONS_BY_SETTING:
        places = (getattr(transform, name, None) for name in ("position", "pad_position"))
        sizes = getattr(transform, "max_size", None)
        return "random" in map(_text, places) or (isinstance(sizes, (list, tuple)) and len(sizes) > 1)
    own = cls.__mro__[: [base.__name__ for base in cls.__mro__].index("BasicTransform")]
    names = {name for base in own for function in class_functions(base) for name in code_names(function.__code__)}
    return bool(names & _ALBUMENTATIONS_DRAWS)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _monai(transform: Any) -> bool | None:
    """Random are subclasses of `RandomizableTrait`; deterministic are other library transforms, except wrappers."""
    cls = type(transform)
    if is_monai_compose(transform):
        return _all_of(transform.transforms)
    if any(
        base.__name__ in ("RandomizableTrait", "Randomizable") and comes_from(base, "monai") for base in cls.__mro__
    ):
        return True
    steady = (
        comes_from(cls, "monai")
        and cls.__name__ not in _MONAI_WRAPPERS
        and any(base.__name__ == "Transform" and comes_from(base, "monai.transforms") for base in cls.__mro__)
    )
    return False if steady else None
