"""Named values of loaders and caches, and where they go."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import stallfree as sf
from stallfree.analysis.metrics import Hook, Metrics, PrometheusCollector, PrometheusServer, TensorBoardHook
from stallfree.errors import InputError, MissingExtraError

LOADER_NAMES = [
    "stallfree_loader_batches_total",
    "stallfree_loader_samples_total",
    "stallfree_loader_hits_total",
    "stallfree_loader_misses_total",
    "stallfree_loader_storage_bytes_total",
    "stallfree_loader_fetch_seconds_total",
    "stallfree_loader_prep_seconds_total",
    "stallfree_loader_wait_seconds_total",
    "stallfree_loader_queue_depth",
    "stallfree_loader_retries_total",
    "stallfree_loader_workers_replaced_total",
    "stallfree_loader_skips_total",
    "stallfree_loader_private_copies_total",
    "stallfree_loader_staging_bytes",
    "stallfree_loader_workers",
    "stallfree_loader_stall_fetch_seconds",
    "stallfree_loader_stall_prep_seconds",
]
CACHE_NAMES = [
    "stallfree_cache_hits_total",
    "stallfree_cache_misses_total",
    "stallfree_cache_evictions_total",
    "stallfree_cache_rejected_total",
    "stallfree_cache_damaged_total",
    "stallfree_cache_storage_reads_total",
    "stallfree_cache_storage_bytes_total",
    "stallfree_cache_resident_items",
    "stallfree_cache_resident_bytes",
    "stallfree_cache_capacity_bytes",
    "stallfree_cache_used_bytes",
    "stallfree_cache_tier_hits_total",
    "stallfree_cache_tier_rejected_total",
    "stallfree_cache_hit_ratio",
]
WINDOW_NAMES = [
    "stallfree_smart_cache_epoch",
    "stallfree_smart_cache_window_start",
    "stallfree_smart_cache_replace_num",
    "stallfree_smart_cache_lag",
    "stallfree_smart_cache_late_epochs_total",
    "stallfree_smart_cache_wait_seconds_total",
    "stallfree_smart_cache_skips_total",
]


@pytest.fixture
def dataset() -> Iterator[sf.CachedDataset]:
    with sf.CachedDataset(list(torch.arange(10)), capacity="4MiB") as dataset:
        yield dataset


@pytest.fixture
def loader(dataset: sf.CachedDataset) -> Iterator[sf.DataLoader]:
    with sf.DataLoader(dataset, 4) as loader:
        yield loader


def test_names_and_values(dataset: sf.CachedDataset, loader: sf.DataLoader) -> None:
    metrics = Metrics(train=loader, cache=dataset)
    assert list(metrics.values()) == [f"train/{name}" for name in LOADER_NAMES] + [
        f"cache/{name}" for name in CACHE_NAMES
    ]
    assert metrics.values()["train/stallfree_loader_batches_total"] == 0
    list(loader)
    list(loader)
    values = metrics.values()
    assert values["train/stallfree_loader_batches_total"] == 6
    assert values["train/stallfree_loader_samples_total"] == 20
    assert values["train/stallfree_loader_wait_seconds_total"] == loader.stats().wait_seconds > 0
    assert values["train/stallfree_loader_stall_prep_seconds"] == loader.stats().stall_prep_seconds
    assert values["cache/stallfree_cache_hits_total"] == dataset.stats().hits > 0
    assert values["cache/stallfree_cache_resident_items"] == 10
    assert values["cache/stallfree_cache_hit_ratio"] == dataset.stats().hit_ratio
    assert all(type(value) is float for value in values.values())
    assert Metrics(cache=dataset.cache).values().keys() == {f"cache/{name}" for name in CACHE_NAMES}


def test_names_of_a_smart_cache() -> None:
    data = list(torch.arange(10))
    with sf.SmartCacheDataset(data, None, cache_num=5, replace_rate=0.2) as dataset:
        values = Metrics(window=dataset).values()
        assert list(values) == [f"window/{name}" for name in CACHE_NAMES[:-1] + WINDOW_NAMES + CACHE_NAMES[-1:]]
        assert values["window/stallfree_smart_cache_replace_num"] == 1


def test_names_of_a_shared_loader() -> None:
    class Shared:
        def stats(self) -> sf.SharedStats:
            return sf.SharedStats(*range(len(fields(sf.SharedStats))))

    values = Metrics(group=Shared()).values()
    own = [f"stallfree_shared_loader_{name}" for name in ("takeovers_total", "jobs")]
    assert list(values) == [f"group/{name}" for name in (*LOADER_NAMES[:-2], *own, *LOADER_NAMES[-2:])]
    assert values["group/stallfree_shared_loader_jobs"] == len(fields(sf.SharedStats)) - 1


@pytest.mark.parametrize("source", [None, 7, [1], torch.utils.data.DataLoader([1]), type("S", (), {"stats": dict})()])
def test_what_has_no_statistics(source: Any) -> None:
    with pytest.raises(InputError, match=r"train=.* has no statistics"):
        Metrics(train=source)


def test_no_sources() -> None:
    with pytest.raises(InputError, match="was given nothing"):
        Metrics()


class Kept:
    """A hook of one's own."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(values)))


def test_a_hook_of_ones_own(loader: sf.DataLoader) -> None:
    metrics, kept = Metrics(train=loader), Kept()
    hook: Hook = kept
    for step, _ in enumerate(loader):
        hook.write(metrics.values(), step)
    assert [(step, values["train/stallfree_loader_batches_total"]) for step, values in kept.rows] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tensorboard(own: bool, loader: sf.DataLoader, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path)) if own else None
    hook = TensorBoardHook(tmp_path if writer is None else writer)
    metrics = Metrics(train=loader)
    for step, _ in enumerate(loader):
        hook.write(metrics.values(), 10 * step)
    hook.close()
    assert scalars(tmp_path, "train/stallfree_loader_samples_total") == [(0, 4), (10, 8), (20, 10)]
    if writer is not None:
        writer.add_scalar("mine", 1.0, 0)  # still open
        writer.close()
        assert scalars(tmp_path, "mine") == [(0, 1.0)]


def test_tensorboard_wants_a_folder_or_a_writer() -> None:
    with pytest.raises(InputError, match="give the path of a folder, or a SummaryWriter"):
        TensorBoardHook(7)


def test_tensorboard_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"stallfree\[tensorboard\]"):
        TensorBoardHook(tmp_path)


# -- Prometheus -------------------------------------------------------------------------------------------------------


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(name of the metric, label) and value, as a scraper reads them."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels["name"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_reads_the_present(dataset: sf.CachedDataset, loader: sf.DataLoader) -> None:
    with PrometheusServer(Metrics(train=loader, test=sf.DataLoader(dataset), cache=dataset), port=0) as server:
        assert server._server.server_address[0] == "127.0.0.1"
        before = scrape(server.port)
        assert {name for name, _ in before} == {*LOADER_NAMES, *CACHE_NAMES}
        assert {label for _, label in before} == {"train", "test", "cache"}
        list(loader)
        after = scrape(server.port)
    name = "stallfree_loader_samples_total"
    assert (before[name, "train"], after[name, "train"], after[name, "test"]) == (0, 10, 0)
    assert after["stallfree_cache_capacity_bytes", "cache"] == dataset.stats().capacity_bytes
    server.close()


def test_a_port_that_is_taken(loader: sf.DataLoader) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InputError, match=r"nothing can listen on 127\.0\.0\.1"):
            PrometheusServer(Metrics(train=loader), port=other.getsockname()[1])


def test_a_registry_of_ones_own(loader: sf.DataLoader) -> None:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(Metrics(train=loader)))
    list(loader)
    assert registry.get_sample_value("stallfree_loader_batches_total", {"name": "train"}) == 3


def test_prometheus_is_an_extra(monkeypatch: pytest.MonkeyPatch, loader: sf.DataLoader) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"stallfree\[prometheus\]"):
        PrometheusServer(Metrics(train=loader))
    with pytest.raises(MissingExtraError, match=r"stallfree\[prometheus\]"):
        PrometheusCollector(Metrics(train=loader))
