"""Transforms that look like torchvision's, for a machine without it; the states of the global generators."""

import random
from typing import Any

import numpy as np
import torch

V1 = "torchvision.transforms.transforms"


def foreign(name: str, module: str, *bases: type, **members: Any) -> Any:
    """An instance of a class `name` that says it is from `module`; it changes nothing unless given a `__call__`."""
    members = {"__call__": lambda self, value: value} | members
    return type(name, bases, {"__module__": module, **members})()


def torchvision_compose(*steps: Any, module: str = V1) -> Any:
    def call(self: Any, value: Any) -> Any:
        for step in self.transforms:
            value = step(value)
        return value

    return foreign("Compose", module, transforms=list(steps), __call__=call)


def global_states() -> Any:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
