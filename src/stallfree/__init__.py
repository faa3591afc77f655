"""Keeps the accelerator fed while a neural network trains on PyTorch.

`__init__.pyi` lists the public names. Each is imported with its first use: all together take half a second.
"""

import ast
import importlib.metadata
from pathlib import Path

__version__ = importlib.metadata.version("stallfree")

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_MODULES = {node.names[0].name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom)}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES and name != "cache":  # a package, for those who write their own policy or tier
        raise AttributeError(f"module 'stallfree' has no attribute {name!r}")
    module = _MODULES.get(name, "stallfree")
    value: object = importlib.import_module(f"stallfree.{name}" if module == "stallfree" else module)
    value = value if module == "stallfree" else getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
