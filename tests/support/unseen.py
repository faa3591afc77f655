"""What the first look at a data set does not show: the samples that it does not make, and draws without a name.

The draws are from the global generators, through a library whose names do not say so.
"""

import sys
from pathlib import Path

from stallfree.datasets.probe import LOOKS
from stallfree.pipeline.classify import spread
from stallfree.pipeline.objects import LIBRARIES

sys.path.append(str(Path(__file__).with_name("site-packages")))
import spiced

LIBRARIES.add("spiced")


def unseen_ids(count: int) -> list[int]:
    """The ids in a data set of `count` samples that the first look does not make."""
    return sorted({*range(count)} - {*spread(count, LOOKS)})


def fraction() -> float:
    return spiced.Taste().amount()


def integer(below: int) -> int:
    return spiced.Taste().grain(below)
