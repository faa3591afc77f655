"""With `on_lag="wait"`, a job that takes no more batches is detached after a while, without errors in others."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import stallfree as sf
from stallfree.shared import shared_loader
from stallfree.shared.preparation import Setup


def test_a_job_that_stands_still_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loader, "Setup", lambda **fields: Setup(**{**fields, "lag_seconds": 0.3}))
    data = TensorDataset(torch.arange(400))
    slow = sf.SharedLoader(data, group="lag", batch_size=4, multiprocessing_context="fork")
    with slow, sf.SharedLoader(data, group="lag", batch_size=4) as quick:
        behind, ahead = iter(slow), iter(quick)
        first = next(behind)[0].tolist()
        assert [id for batch in ahead for id in batch[0].tolist()] == list(range(400))
        assert [*first, *(id for batch in behind for id in batch[0].tolist())] == list(range(400))
        assert slow.stats().alone > 0
        assert quick.stats().alone == 0
