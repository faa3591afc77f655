"""A module that holds a generator for others."""

from generator_places.tools import made

IMPORTED = made()
LATE = made()
