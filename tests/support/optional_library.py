"""Libraries that some environments have and others do not."""

import importlib
from typing import Any

import pytest


def library(name: str) -> Any:
    """The library, or a skip that says why. torchvision for another build of torch raises `RuntimeError`."""
    try:
        found = importlib.import_module(name)
        if found.__file__ is None:  # a folder of this name, such as `tests/datasets`
            raise ImportError(f"it is {found.__path__}")
        return found
    except Exception as error:
        pytest.skip(f"{name} is not there ({error}): pip install {name.partition('.')[0]}")
