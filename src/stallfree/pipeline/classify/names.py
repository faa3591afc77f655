from typing import Any


def random_name(thing: Any) -> str | None:
    return None
