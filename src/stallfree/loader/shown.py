"""How loaders are shown: by `repr`, and in the attributes that other libraries look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert


def shown_collate(collate_fn: Callable[[Any], Any] | None, *, single: bool) -> tuple[Callable[[Any], Any], Any]:
    """`collate_fn` of a loader, as torch's loader has it, and the user's own function, None where it is torch's."""
    default = default_convert if single else default_collate
    return collate_fn or default, None if collate_fn is default else collate_fn


def shown(loader: object, **arguments: Any) -> str:
    """The `repr` of a loader: its data set, its batches, and those of `arguments` that were given."""
    dataset: Any = loader.dataset  # type: ignore[attr-defined]
    kind = type(dataset)
    ours = kind.__module__.split(".")[0] == "stallfree"  # the `repr` of others may be that of all their data
    data = repr(dataset) if ours else f"<{kind.__name__} of {len(dataset)} samples>"
    given = [f"{name}={value!r}" for name, value in arguments.items() if value is not None and value is not False]
    return f"{type(loader).__name__}({', '.join([data, *given])})"
