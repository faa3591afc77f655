"""Generators of the user's own: no name says that they are random."""

from typing import Any

from generator_places import SEED, P


class Congruence:
    """Knuth's linear congruential generator of 64 bits."""

    def __init__(self, state: int) -> None:
        self.state = state * 0x9E3779B97F4A7C15 % 2**64

    def value(self) -> float:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state / 2**64


def made() -> Any:
    return Congruence(SEED)


def flipped(x: Any, source: Any) -> Any:
    return -x if source.value() < P else x


def method_of(source: Any) -> Any:
    return source.value
