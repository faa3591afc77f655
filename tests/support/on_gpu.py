"""What the tests on a GPU share."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from children import PATIENCE

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Replaces the fixture of all tests: the driver opens descriptors and keeps them."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("stallfree"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"the test left the thread {thread.name} behind"
