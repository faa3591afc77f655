"""The generators that `fresh` was asked for."""

from generator_places import HIDDEN

if HIDDEN:
    from generator_places.hidden import flipped, made, method_of
else:
    from generator_places.named import flipped, made, method_of

__all__ = ["flipped", "made", "method_of"]
