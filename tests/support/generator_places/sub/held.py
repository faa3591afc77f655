"""A module two dots away."""

from generator_places.tools import made

FAR = made()
