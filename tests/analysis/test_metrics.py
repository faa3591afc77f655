"""Named values of loaders and caches, and where they go."""

import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import stallfree as sf

LOADER = """batches_total samples_total hits_total misses_total storage_bytes_total fetch_seconds_total
    prep_seconds_total wait_seconds_total queue_depth retries_total workers_replaced_total skips_total
    private_copies_total staging_bytes workers stall_fetch_seconds stall_prep_seconds"""
CACHE = """hits_total misses_total evictions_total rejected_total damaged_total storage_reads_total storage_bytes_total
    resident_items resident_bytes capacity_bytes used_bytes tier_hits_total tier_rejected_total hit_ratio"""
WINDOW = "epoch window_start replace_num lag late_epochs_total wait_seconds_total skips_total"
LOADER_NAMES, CACHE_NAMES, WINDOW_NAMES, SHARED_NAMES = (
    [f"stallfree_{prefix}_{word}" for word in words.split()]
    for prefix, words in {
        "loader": LOADER, "cache": CACHE, "smart_cache": WINDOW, "shared_loader": "takeovers_total jobs"
    }.items()
)  # fmt: skip


@pytest.fixture
def dataset() -> Iterator[sf.CachedDataset]:
    with sf.CachedDataset(list(torch.arange(10)), capacity="4MiB") as dataset:
        yield dataset


@pytest.fixture
def loader(dataset: sf.CachedDataset) -> Iterator[sf.DataLoader]:
    with sf.DataLoader(dataset, 4) as loader:
        yield loader


def test_names_and_values(dataset: sf.CachedDataset, loader: sf.DataLoader) -> None:
    metrics = sf.Metrics(train=loader, cache=dataset)
    names = [f"train/{name}" for name in LOADER_NAMES] + [f"cache/{name}" for name in CACHE_NAMES]
    assert list(metrics.values()) == names
    assert not any(metrics.values()[name] for name in names[:8]), "nothing was counted yet"
    list(loader), list(loader)
    values = metrics.values()
    assert [values[f"train/stallfree_loader_{name}_total"] for name in ("batches", "samples")] == [6, 20]
    assert values["train/stallfree_loader_wait_seconds_total"] == loader.stats().wait_seconds > 0
    assert values["train/stallfree_loader_stall_prep_seconds"] == loader.stats().stall_prep_seconds
    assert values["cache/stallfree_cache_hits_total"] == dataset.stats().hits > 0
    assert values["cache/stallfree_cache_resident_items"] == 10
    assert all(type(value) is float for value in values.values())


def test_names_of_special_loaders_and_caches() -> None:
    with sf.SmartCacheDataset(list(torch.arange(10)), None, cache_num=5, replace_rate=0.2) as dataset:
        values = sf.Metrics(window=dataset).values()
    assert list(values) == [f"window/{name}" for name in CACHE_NAMES[:-1] + WINDOW_NAMES + CACHE_NAMES[-1:]]
    assert values["window/stallfree_smart_cache_replace_num"] == 1
    last = len(fields(sf.SharedStats)) - 1
    shared = type("Shared", (), {"stats": lambda self: sf.SharedStats(*range(last + 1))})()
    values = sf.Metrics(group=shared).values()
    assert list(values) == [f"group/{name}" for name in (*LOADER_NAMES[:-2], *SHARED_NAMES, *LOADER_NAMES[-2:])]
    assert values["group/stallfree_shared_loader_jobs"] == last


@pytest.mark.parametrize("own", [False, True])
def test_tensorboard(own: bool, loader: sf.DataLoader, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    hook = sf.TensorBoardHook(tmp_path if own else writer)
    for step, _ in enumerate(loader):
        hook.write(sf.Metrics(train=loader).values(), 10 * step)
    hook.close()
    writer.add_scalar("mine", 1.0, 0)  # still open
    writer.close()
    log = EventAccumulator(str(tmp_path))
    log.Reload()
    found = [(event.step, event.value) for event in log.Scalars("train/stallfree_loader_samples_total")]
    assert found == [(0, 4), (10, 8), (20, 10)]
    assert "mine" in log.Tags()["scalars"]


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(name of the metric, label) and value, as a scraper reads them."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(one.name, one.labels["name"]): one.value for family in families for one in family.samples}


def test_a_scrape_reads_the_present(dataset: sf.CachedDataset, loader: sf.DataLoader) -> None:
    with sf.PrometheusServer(sf.Metrics(train=loader, test=sf.DataLoader(dataset), cache=dataset), port=0) as server:
        before = scrape(server.port)
        assert {name for name, _ in before} == {*LOADER_NAMES, *CACHE_NAMES}
        assert {label for _, label in before} == {"train", "test", "cache"}
        list(loader)
        after = scrape(server.port)
    name = "stallfree_loader_samples_total"
    assert (before[name, "train"], after[name, "train"], after[name, "test"]) == (0, 10, 0)


def test_what_cannot_be_used(loader: sf.DataLoader) -> None:
    metrics = sf.Metrics(train=loader)
    for source in (None, torch.utils.data.DataLoader([1]), type("S", (), {"stats": dict})()):
        with pytest.raises(sf.InputError, match=r"train=.* has no statistics"):
            sf.Metrics(train=source)
    with pytest.raises(sf.InputError, match="was given nothing"):
        sf.Metrics()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(sf.InputError, match=r"nothing can listen on 127\.0\.0\.1"):
            sf.PrometheusServer(metrics, port=other.getsockname()[1])
