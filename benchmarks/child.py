"""Runs one contender in a fresh process: `python -m benchmarks.child MODULE:FUNCTION '{"batch": 64, ...}'`.

The function is called with those of the parameters that it names, and returns its figures: numbers, or lists of numbers
whose median counts. The last line of standard output is JSON. Needs the standard library only, because it also runs in
the environments of the peers.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ["stallfree", "torch", "numpy", "simplejpeg", "nibabel", "ray", "redis", "hiredis", "ffcv", "tensorflow"]
PACKAGES += ["monai", "tensorsocket", "torchvision"]


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    parameters = json.loads(sys.argv[2])
    accepted = inspect.signature(function).parameters
    figures = function(**{key: value for key, value in parameters.items() if key in accepted})
    print(json.dumps({"figures": figures, "versions": versions()}), flush=True)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that were imported, and the GPU."""
    imported = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        if package in sys.modules:
            try:
                imported[package] = version(package)
            except PackageNotFoundError:
                imported[package] = getattr(sys.modules[package], "__version__", "unknown")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        imported["GPU"] = torch.cuda.get_device_name()
    return imported


if __name__ == "__main__":
    main()
