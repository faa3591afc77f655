"""Clara's training configuration: JSON with placeholders in its strings, and components with names and arguments."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stallfree.errors import StallfreeError, clara_configuration
from stallfree.sources.paths import canonical, read_file

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_COMPONENT = ("name", "path", "args", "search")
"""The keys of a component. `search` is used only by Clara's AutoML and ignored here."""


@dataclass(frozen=True)
class Component:
    """An object named in a configuration, with its arguments.

    Attributes:
        place: its position, such as "train.pre_transforms[2]".
        name: name of a registered class; or empty.
        path: "module.Class" of a user class; or empty.
        args: arguments of its constructor.
    """

    place: str
    name: str
    path: str
    args: dict[str, Any]


class Variables:
    """The values of placeholders: those at the top of `config`, overridden by `given`."""

    def __init__(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        own = {name: value for name, value in config.items() if not isinstance(value, dict)}
        self._values: dict[str, Any] = {**own, **given}

    def fill(self, value: Any, place: str) -> Any:
        """Return `value` with all placeholders replaced, at any depth.

        A string that is a single placeholder becomes the variable itself, a number for instance. Raises `InputError`
        for an undefined placeholder, and for one that refers to itself.
        """
        if isinstance(value, str):
            return self._text(value, place, ())
        if isinstance(value, dict):
            return {key: self.fill(item, f"{place}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item, f"{place}[{number}]") for number, item in enumerate(value)]
        return value

    def _text(self, text: str, place: str, within: tuple[str, ...]) -> Any:
        whole = _PLACEHOLDER.fullmatch(text)
        if whole is not None:
            return self._value(whole[1], text, place, within)
        return _PLACEHOLDER.sub(lambda found: str(self._value(found[1], text, place, within)), text)

    def _value(self, name: str, text: str, place: str, within: tuple[str, ...]) -> Any:
        if name in within:
            chain = " -> ".join(f"{{{part}}}" for part in (*within, name))
            raise clara_configuration(
                f"{place}: the placeholder {{{name}}} stands for itself ({chain}): give {name}=..."
            )
        if name not in self._values:
            raise clara_configuration(
                f"{place} is {text!r}, and nothing says what {{{name}}} stands for: pass it as load(..., {name}=...), "
                f'or put "{name}" at the top of the configuration'
            )
        value = self._values[name]
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        return self._text(value, place, (*within, name)) if isinstance(value, str) else value


def read_json(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Return the JSON object in the file at `path`, local or a fsspec URL. `what` is its name in messages.

    Raises `InputError` if the file cannot be read, is not JSON, or contains anything but an object.
    """
    path = canonical(path)
    try:
        data = read_file(path)
    except StallfreeError:
        raise
    except Exception as error:
        raise clara_configuration(f"{what} {path!r} cannot be read ({error}): give the path of a JSON file") from error
    try:
        found = json.loads(data)
    except ValueError as error:
        raise clara_configuration(f"{what} {path!r} is no valid JSON ({error}): correct it there") from error
    if not isinstance(found, dict):
        raise clara_configuration(f"{what} {path!r} holds a {type(found).__name__}, expected an object: {{...}}")
    return found


def component(entry: Any, place: str) -> Component:
    """Return the component that `entry` describes. Raises `InputError` if it is invalid."""
    if not isinstance(entry, dict):
        raise clara_configuration(f'{place} is {entry!r}, expected an object: {{"name": ..., "args": {{...}}}}')
    unknown = sorted(entry.keys() - set(_COMPONENT))
    if unknown:
        raise clara_configuration(f"{place} has the unknown key {unknown[0]!r}: use {', '.join(_COMPONENT[:-1])}")
    name, path, args = entry.get("name", ""), entry.get("path", ""), entry.get("args", {})
    if not isinstance(name, str) or not isinstance(path, str) or bool(name) == bool(path):
        raise clara_configuration(
            f'{place} has name={name!r} and path={path!r}: give one of them, "name" for what is known here, "path" for '
            'a class of your own ("module.Class")'
        )
    if not isinstance(args, dict):
        raise clara_configuration(f'{place}.args is {args!r}, expected an object: {{"argument": value, ...}}')
    return Component(place, name, path, args)
