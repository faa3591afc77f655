"""Checks on two small images that stallfree's entropy decoding gives the same pixels as libjpeg's."""

from __future__ import annotations

import base64
import ctypes

import numpy as np
import numpy.typing as npt

OF_LIBJPEG, OWN, OWN_ALONE = range(3)
"""Modes of `stallfree_decode`: libjpeg's decoding; stallfree's where possible; stallfree's or an error."""

_REFUSED = 4
_HEIGHT, _WIDTH = 17, 35
_PARTS = ((0, 0, _HEIGHT, _WIDTH, _HEIGHT, _WIDTH), (3, 17, 9, 12, 9, 12), (0, 0, _HEIGHT, _WIDTH, 4, 8))
"""Top, left, height, width, height and width of the result: the whole image, some columns, and a lower resolution."""

_COLOUR = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMUFRUVDA8XGB"
    "YUGBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBT/wAARCAAR"
    "ACMDASIAAhEBAxEB/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAAAgEDAwIEAwUFBAQAAAF9AQIDAAQRBRIhMUEGE1FhBy"
    "JxFDKBkaEII0KxwRVS0fAkM2JyggkKFhcYGRolJicoKSo0NTY3ODk6Q0RFRkdISUpTVFVWV1hZWmNkZWZnaGlqc3R1dnd4eXqDhIWGh4iJipKT"
    "lJWWl5iZmqKjpKWmp6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi4+Tl5ufo6erx8vP09fb3+Pn6/8QAHwEAAwEBAQEBAQEBAQAAAA"
    "AAAAECAwQFBgcICQoL/8QAtREAAgECBAQDBAcFBAQAAQJ3AAECAxEEBSExBhJBUQdhcRMiMoEIFEKRobHBCSMzUvAVYnLRChYkNOEl8RcYGRom"
    "JygpKjU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6goOEhYaHiImKkpOUlZaXmJmaoqOkpaanqKmqsrO0tba3uLm6wsPExc"
    "bHyMnK0tPU1dbX2Nna4uPk5ebn6Onq8vP09fb3+Pn6/9oADAMBAAIRAxEAPwDn9NvI2ZVRg2ejAdB6Z+ua24NSijjALjI53k7Sa8j0/wAQcA+a"
    "dvXAJ2jP1rZi8RL5eQxcgc5yMHp1/DvXrLKfYrU68Blc3BXR6fomqKniHTDkBzdREkn/AGxkfy/z19P1XXYwgy+CRjJPTJ7/AM/z96+ZdN8Uhd"
    "VsHWQDbcx8jjPzDJ6112ueOVEhO8bgeB/j+v5VhOk6cWkcGbZHUq020jvptetxKw5ODjO4DNFeLP47kjdlSYbQcD5h/hRXlc9Toz8ulw9Vu9Py"
    "PMLL/j3i/wCAfyNacH+sb/eb+tFFfqNb4JH9M5d8H3fkS2n/ACErT/rqv81re17/AFX/AAOiivi8T8H9djTGfBL5nGt94/WiiivGPz8//9k="
)
"""A colour image with half as many chroma samples as pixels per side, and the standard tables with all code lengths."""

_GREY = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcpLDAxNDQ0Hyc5PT"
    "gyPC4zNDL/wAALCAARACMBAREA/8QAGQAAAwADAAAAAAAAAAAAAAAAAgMEAQUG/8QAKhAAAQMDAAgHAQAAAAAAAAAAAQACEQMEITEzQVFhcYGx"
    "BRMUFUNT0fD/2gAIAQEAAD8AW2qAJJ0IXVWRExuwl0q7W3dEk58xvdbmrdNyQRw2JHqmfZHBc2LzBznRKF15ImYKmF9FxTkzDx3VtbxM5EgcCp"
    "/cgdL46hSVdvL9WK+sqf25RfK3m3unv1g6pW1f/9k="
)
"""A greyscale image with custom tables."""


def problem_of(library: ctypes.CDLL) -> str:
    """Return the reason for libjpeg to decode the entropy; "" if stallfree's decoding gives the same pixels."""
    for data in (_COLOUR, _GREY):
        for part in _PARTS:
            expected, right = _decoded(library, data, part, OF_LIBJPEG)
            problem, found = _decoded(library, data, part, OWN_ALONE)
            if problem == _REFUSED:
                return "the decoder of this libjpeg cannot be replaced"
            if problem != expected:
                return "stallfree's decoding reported damage in an intact image"
            if not np.array_equal(right, found):
                return "stallfree's decoding gave other pixels than libjpeg's"
    return ""


def _decoded(
    library: ctypes.CDLL, data: bytes, part: tuple[int, ...], entropy: int
) -> tuple[int, npt.NDArray[np.uint8]]:
    out = np.zeros((*part[4:], 3), np.uint8)
    problem: int = library.stallfree_decode(data, len(data), *part, 0, 0, entropy, out.ctypes.data)
    return problem, out
