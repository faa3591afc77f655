"""How loaders are shown: by `repr`, and in the attributes that other libraries look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert


def own_collate(collate_fn: Callable[[Any], Any], *, single: bool) -> Callable[[Any], Any] | None:
    """The user's function; None if `collate_fn` is the one that torch's loader takes by itself."""
    return None if collate_fn is (default_convert if single else default_collate) else collate_fn


def shown_by(*names: str) -> Callable[[Any], str]:
    """A `__repr__` of loaders: the data set, and the attributes `names` that were given."""

    def shown(loader: Any) -> str:
        dataset = loader.dataset
        kind = type(dataset)
        ours = kind.__module__.split(".")[0] == "stallfree"  # the `repr` of others may be that of all their data
        data = repr(dataset) if ours else f"<{kind.__name__} of {len(dataset)} samples>"
        values = {name: getattr(loader, name) for name in names}
        given = [f"{name}={value!r}" for name, value in values.items() if value is not None and value is not False]
        return f"{type(loader).__name__}({', '.join([data, *given])})"

    return shown
