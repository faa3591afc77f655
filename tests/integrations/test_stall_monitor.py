"""The callback for Lightning: what it logs and prints, with a stand-in for Lightning; and in training, where it is."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import stallfree as sf
from stallfree.errors import InputError, MissingExtraError

NAME = "stallfree.integrations.lightning"
LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The callback's module on a stand-in for Lightning, and a clock in `.now`."""
    stand_in = ModuleType("pytorch_lightning")
    stand_in.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    for name in LIGHTNINGS:
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    found: Any = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    found.now = 100.0
    monkeypatch.setattr(found, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def counts(kind: Any, **values: Any) -> Any:
    return kind(**dict.fromkeys(kind.__dataclass_fields__, 0) | values)


class Loader:
    """A loader of a cache, both with the counts that the test sets."""

    wait = fetch = 0.0
    misses = resident = 0

    def __init__(self) -> None:
        self.dataset = SimpleNamespace(stats=lambda: counts(sf.CacheStats, resident_items=self.resident))

    def stats(self) -> sf.LoaderStats:
        waits = {"wait_seconds": self.wait, "fetch_seconds": 2 * self.fetch}
        return counts(sf.LoaderStats, misses=self.misses, num_workers=2, **waits)  # type: ignore[no-any-return]


def run_of(loaders: Any) -> Any:
    """A trainer and its module, as far as the callback sees them."""
    logged, state = list[Any](), {"train_dataloader": loaders, "current_epoch": 0, "is_global_zero": True}
    return SimpleNamespace(logged=logged, log_dict=logged.append, **state)


def logged(wait: float, fill: float, fetch: float, prep: float) -> Any:
    names = ["stallfree/wait", "stallfree/cache_fill", "stallfree/fetch_stall", "stallfree/prep_stall"]
    return pytest.approx(dict(zip(names, (wait, fill, fetch, prep), strict=True)))


def test_shares_of_each_epoch(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = Loader(), Loader()
    a.wait, a.fetch = 3.0, 1.0
    run = run_of({"a": a, "both": [b, "no loader"]})
    monitor = module.StallMonitor()
    monitor.on_train_start(run, run)
    monitor.on_train_epoch_start(run, run)
    a.wait, a.fetch, b.wait = 5.0, 2.5, 1.0  # a: 2 s more, of which 1.5 are fetch; b: 1 s of prep
    module.now += 8
    monitor.on_validation_start(run, run)
    module.now += 100
    monitor.on_validation_end(run, run)
    module.now += 2
    monitor.on_train_epoch_end(run, run)
    run.current_epoch, run.is_global_zero = 1, False
    monitor.on_train_epoch_start(run, run)
    module.now += 4
    b.wait, b.fetch = 1.1, 0.1
    monitor.on_train_epoch_end(run, run)
    assert run.logged == [logged(0.3, 0, 0.15, 0.15), logged(0.025, 0, 0.025, 0)]
    assert capsys.readouterr().out.splitlines() == [
        "epoch 0: waited for data 30.0% of 10.0 s (fetch stall 15.0%, prep stall 15.0%): storage is too slow; a larger "
        "cache (CachedDataset) or faster storage helps"
    ]


@pytest.mark.parametrize(("wait", "fetch", "kept", "advice"), [
    (4.0, 0.4, 0, ": prep is too slow; more num_workers, or prepared samples in a cache (CachedDataset), help"),
    (4.0, 4.0, 75, ": the cache was being filled; later epochs wait less"),
    (4.0, 4.0, 25, ": storage is too slow; a larger cache (CachedDataset) or faster storage helps"), (0.4, 0.4, 0, ""),
])  # fmt: skip
def test_the_line_says_the_reason(module: Any, capsys: Any, wait: float, fetch: float, kept: int, advice: str) -> None:
    """Of 100 samples that were fetched, the cache kept so many, which no later epoch waits for."""
    loader = Loader()
    run, monitor = run_of(loader), module.StallMonitor()
    monitor.on_train_epoch_start(run, run)
    loader.wait, loader.fetch, loader.misses, loader.resident = wait, fetch, 100, kept
    module.now += 10
    monitor.on_train_epoch_end(run, run)
    fill = fetch * kept / 1000
    assert run.logged == [logged(wait / 10, fill, fetch / 10 - fill, (wait - fetch) / 10)]
    line = capsys.readouterr().out.rstrip()
    assert line.startswith(f"epoch 0: waited for data {wait * 10:.1f}% of 10.0 s (")
    assert line.endswith(f"%){advice}")
    assert (f"cache fill {fill:.1%}, " in line) == (kept > 0)


@pytest.mark.parametrize("loaders", [None, torch.utils.data.DataLoader([1, 2]), ["x"]])  # type: ignore[arg-type]
def test_no_loader_of_ours(module: Any, loaders: Any) -> None:
    with pytest.raises(InputError, match=r"found no loader of stallfree: train_dataloader returned .*leave out the"):
        module.StallMonitor().on_train_start(run_of(loaders), None)


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", *LIGHTNINGS):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(MissingExtraError, match=r"StallMonitor needs the package 'lightning'.*stallfree\[lightning\]"):
        importlib.import_module(NAME)


@pytest.mark.slow
def test_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    models: Any = importlib.import_module("lightning.pytorch.demos.boring_classes")
    sys.modules.pop(NAME, None)
    monitor, shown = importlib.import_module(NAME).StallMonitor(), list[dict[str, float]]()

    class Shown(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            shown.append(dict(trainer.callback_metrics))

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": 3, "accelerator": "cpu", "callbacks": [monitor, Shown()]} | dict.fromkeys(names, False)
    data = torch.arange(40.0)[:, None].repeat(1, 32)
    with sf.CachedDataset(data, capacity="4MiB") as cached, sf.DataLoader(cached, 8, num_workers=1) as train:
        lightning.Trainer(**options).fit(models.BoringModel(), train, sf.DataLoader(cached, 8))
    sys.modules.pop(NAME, None)
    assert len(shown) == len(capsys.readouterr().out.splitlines()) == 3
    for metrics in shown:
        wait, *others = (float(metrics[f"stallfree/{n}"]) for n in ("wait", "cache_fill", "fetch_stall", "prep_stall"))
        assert wait == pytest.approx(sum(others))
        assert 0 <= wait <= 1
