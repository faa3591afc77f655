"""The user's line for warnings."""

import os
import sys

_OURS = os.path.dirname(__file__) + os.sep


def users_level() -> int:
    """The `stacklevel` with which a warning names the user's line, for whichever function of this package warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level
