"""Samples of every kind that the codec stores, for the tests of packages."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st


class Point(NamedTuple):
    x: Any
    y: Any


Plain = namedtuple("Plain", "a b")


KINDS: list[Callable[[random.Random], Any]] = [
    lambda r: r.randrange(-(2**63), 2**63),
    lambda r: r.randrange(2**200),
    lambda r: r.random(),
    lambda r: r.random() < 0.5,
    lambda r: complex(r.random(), r.random()),
    lambda r: None,
    lambda r: r.randbytes(r.randrange(3000)),
    lambda r: bytearray(r.randbytes(r.randrange(100))),
    lambda r: "".join(map(chr, r.choices(range(0x800), k=r.randrange(200)))),
    lambda r: np.str_("text" * r.randrange(3)),
    lambda r: np.bytes_(b"abc" * r.randrange(3)),
    lambda r: np.float32(r.random()),
    lambda r: np.datetime64(r.randrange(2**40), "s"),
    lambda r: np.frombuffer(r.randbytes(240), np.int16).reshape(4, 5, 6).transpose(),
    lambda r: np.zeros(r.randrange(3), [("a", "<i4"), ("b", ">f8", (2, 3))]),
    lambda r: torch.frombuffer(bytearray(r.randbytes(64)), dtype=torch.bfloat16).reshape(4, 8),
    lambda r: torch.arange(r.randrange(5000), dtype=torch.uint8),
    lambda r: torch.arange(12).to(torch.complex64).reshape(3, 4)[:, ::2].conj(),
    lambda r: torch.empty(0, 3),
]
leaves = st.builds(lambda kind, seed: kind(random.Random(seed)), st.sampled_from(KINDS), st.integers(0, 1 << 30))
values = st.recursive(
    leaves,
    lambda child: (
        st.lists(child, max_size=3)
        | st.lists(child, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), child, max_size=3)
        | st.builds(Point, child, child)
        | st.builds(Plain, child, child)
    ),
    max_leaves=5,
)
