"""The transform pipeline of a sample: its steps, their cacheable part and its key, and their random generators."""

from stallfree.pipeline.classify.determinism import (
    Split,
    StallfreeWarning,
    Verdict,
    mark_deterministic,
    mark_random,
    split,
)
from stallfree.pipeline.compose import Compose, OnItem, Transform, flatten
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import Randomness, draw_seed, peek_seed, sample_seed

__all__ = [
    "Compose",
    "OnItem",
    "Randomness",
    "Source",
    "Split",
    "StallfreeWarning",
    "Transform",
    "Verdict",
    "draw_seed",
    "fingerprint",
    "flatten",
    "mark_deterministic",
    "mark_random",
    "peek_seed",
    "sample_seed",
    "split",
]
