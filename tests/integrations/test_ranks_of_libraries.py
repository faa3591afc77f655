"""Two processes that train one model: each sees the samples that it sees with torch's loader, or a warning says not.

The processes do the same with both loaders and compare what they were given; and the examples run under torchrun.
"""

import gc
import logging
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler, SubsetRandomSampler

import stallfree as sf
from children import Child
from loader_data import Made
from stallfree import StallfreeWarning

SAMPLES, EPOCHS = 14, 2
Seen = list[list[list[int]]]  # by epoch and batch
POINTS = Made(SAMPLES, lambda id: {"x": torch.tensor([float(id)]), "labels": id})


def in_two_processes(function: Callable[[int], None]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> None:
        rank_and_job = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in (rank_and_job | where).items()})
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", StallfreeWarning)
        function(rank)
        gc.collect()  # ends loaders, which a forked process does not do when it ends

    assert [child.wait() for child in [Child(run, rank) for rank in range(2)]] == [0, 0]


def seen_in(loader: Any, epochs: int = EPOCHS) -> Seen:
    return [[batch["labels"].tolist() for batch in loader] for _ in range(epochs)]


def torch_loader(**options: Any) -> Any:
    return torch.utils.data.DataLoader(POINTS, batch_size=3, **options)


def own_loader(**options: Any) -> sf.DataLoader:
    return sf.DataLoader(POINTS, batch_size=3, num_workers=1, **options)


def both_ranks(seen: Seen) -> list[list[int]]:
    """The ids of both ranks, by epoch."""
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, seen)
    return [sorted(id for part in everywhere for batch in part[epoch] for id in batch) for epoch in range(len(seen))]


def plain(rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    for shuffle in (False, True):
        theirs, mine = (DistributedSampler(POINTS, shuffle=shuffle, seed=3) for _ in range(2))
        pair = torch_loader(sampler=theirs), own_loader(sampler=mine)
        for epoch in (0, 1, 7):
            theirs.set_epoch(epoch), mine.set_epoch(epoch)
            assert seen_in(pair[0], 1) == seen_in(pair[1], 1)
        loader = own_loader(shuffle=shuffle)
        with pytest.warns(StallfreeWarning, match="each of the 2 ranks gets all samples. Give ranks='auto'"):
            ids = sorted(id for batch in seen_in(loader, 1)[0] for id in batch)
        assert ids == list(range(SAMPLES))  # as with torch's
        assert both_ranks(seen_in(own_loader(shuffle=shuffle, ranks="auto"))) == [list(range(SAMPLES))] * EPOCHS


Cases = dict[str, Callable[[], dict[str, Any]]]
CASES: Cases = {
    "in order": dict, "shuffled": lambda: {"shuffle": True},
    "shuffled, drop_last": lambda: {"shuffle": True, "drop_last": True},
    "a sampler": lambda: {"sampler": SequentialSampler(POINTS)},
}  # fmt: skip
ALL: Cases = CASES | {
    "a subset": lambda: {"sampler": SubsetRandomSampler(range(1, SAMPLES), torch.Generator().manual_seed(1))},
    "a list": lambda: {"sampler": [*reversed(range(SAMPLES))]},
}


def accelerated(cases: list[str], rank: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for case in cases:
        torch.manual_seed(4)
        expected = seen_in(accelerator.prepare(torch_loader(**ALL[case]())))
        torch.manual_seed(4)
        loader = accelerator.prepare(own_loader(**ALL[case]()))
        assert seen_in(loader) == expected, case
        assert isinstance(loader, sf.DataLoader)
        assert accelerator.prepare(loader) is loader
        assert len(loader) == len(expected[0])
        for _ in loader:
            end = accelerator.gradient_state.end_of_dataloader
        assert end
        loader.close()
    partitioned = own_loader(shuffle=True, ranks="auto")
    assert accelerator.prepare(partitioned) is partitioned
    assert both_ranks(seen_in(partitioned)) == [list(range(SAMPLES))] * EPOCHS


def split(rank: int) -> None:
    """Other settings of the accelerator, a custom batch sampler, resuming, and loaders without batches."""
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration

    settings = DataLoaderConfiguration(split_batches=True, even_batches=False, use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    options = {"batch_size": 4, "shuffle": True}
    for given in (options, {"batch_sampler": BatchSampler(SequentialSampler(POINTS), 2, False)}):
        kinds = (torch.utils.data.DataLoader, sf.DataLoader)
        theirs, mine = (accelerator.prepare(kind(POINTS, **given)) for kind in kinds)
        assert seen_in(mine) == seen_in(theirs)
        assert seen_in(skip_first_batches(mine, 2), 1) == seen_in(skip_first_batches(theirs, 2), 1)
    seeded = [seen_in(accelerator.prepare(sf.DataLoader(POINTS, seed=9, **options)), 1) for _ in range(2)]
    assert seeded[0] == seeded[1]
    own = own_loader(sampler=DistributedSampler(POINTS))
    assert accelerator.prepare(own) is own


def lightning(cases: list[str], rank: int) -> None:
    import lightning.pytorch as pl

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Line(pl.LightningModule):
        def __init__(self, make: Callable[[], Any]) -> None:
            super().__init__()
            self.line, self.make, self.seen = torch.nn.Linear(1, 1), make, []  # type: ignore[var-annotated]

        def on_train_epoch_start(self) -> None:
            self.seen.append([])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen[-1].append(batch["labels"].tolist())
            return self.line(batch["x"]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Hook(Line):
        def train_dataloader(self) -> Any:
            return self.make()

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")

    def train(kind: Any, make: Callable[[], Any], **settings: Any) -> Any:
        settings = dict.fromkeys(names, False) | {"max_epochs": EPOCHS, "strategy": "ddp", "devices": 2} | settings
        model, trainer = kind(make), pl.Trainer(accelerator="cpu", **settings)
        trainer.fit(model) if kind is Hook else trainer.fit(model, make())
        assert type(trainer.train_dataloader) is type(make())
        return model.seen

    for case in cases:
        for kind in (Line, Hook):
            expected = train(kind, lambda: torch_loader(**CASES[case]()))  # noqa: B023
            assert train(kind, lambda: own_loader(**CASES[case]())) == expected, case  # noqa: B023
    assert both_ranks(train(Line, lambda: own_loader(shuffle=True, ranks="auto"))) == [list(range(SAMPLES))] * EPOCHS
    with pytest.warns(StallfreeWarning, match="each of the 2 ranks gets all samples"):
        train(Line, own_loader, use_distributed_sampler=False, max_epochs=1)
    if len(cases) > 1:
        with pytest.raises(sf.InputError, match="use_distributed_sampler=False"):
            train(Line, lambda: own_loader(sampler=sf.ImportanceSampler(SAMPLES)))
        options = {"with_ids": True, "on_error": "skip", "seed": 7, "staging": "1MiB", "timeout": 50}
        made = own_loader(shuffle=True, **options)
        again = pl.utilities.data._update_dataloader(made, SequentialSampler(POINTS))
        assert {name: getattr(again, name) for name in options} == options


def trainer(rank: int) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging as quiet

    quiet.set_verbosity_error()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.seen = torch.nn.Linear(1, 1), []  # type: ignore[var-annotated]

        def forward(self, x: Any, labels: Any) -> Any:
            self.seen.append(labels.tolist())
            return (self.line(x).squeeze(1) - labels).square().mean(), x

    class Prepared(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            size, collate = self.args.per_device_train_batch_size, self.data_collator
            return self.accelerator.prepare(sf.DataLoader(POINTS, size, shuffle=True, collate_fn=collate))

    class Bare(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return sf.DataLoader(POINTS, 3, shuffle=True)

    def train(kind: Any) -> Any:
        given = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 3, "use_cpu": True, "disable_tqdm": True}
        settings = TrainingArguments(f"/tmp/none-{rank}", **given, save_strategy="no", report_to="none", seed=5)
        model = Model()
        kind(model, settings, train_dataset=POINTS).train()
        return model.seen

    assert train(Prepared) == train(Trainer)
    with pytest.warns(StallfreeWarning, match="each of the 2 ranks gets all samples. Give ranks='auto'"):
        train(Bare)


@pytest.mark.parametrize(("packages", "check"), [
    ("", plain), ("accelerate", partial(accelerated, ["shuffled"])),
    ("lightning.pytorch", partial(lightning, ["shuffled"])), ("accelerate transformers", trainer),
    pytest.param("accelerate", partial(accelerated, list(ALL)), marks=pytest.mark.slow),
    pytest.param("accelerate", split, marks=pytest.mark.slow),
    pytest.param("lightning.pytorch", partial(lightning, list(CASES)), marks=pytest.mark.slow),
])  # fmt: skip
def test_each_rank_sees_what_it_sees_with_torchs_loader(packages: str, check: Callable[[int], None]) -> None:
    for package in packages.split():  # imported here, and not in each of the processes
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    in_two_processes(check)


def torchrun(ranks: int, example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(Path(__file__).parents[2] / "examples" / example), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, timeout=200, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.slow
def test_each_sample_on_one_rank(tmp_path: Path, store_root: Path) -> None:
    done = torchrun(2, "ddp.py", tmp_path)
    orders = set()
    for epoch in range(3):
        ranks = [[int(id) for id in (tmp_path / f"epoch-{epoch}-rank-{rank}").read_text().split()] for rank in range(2)]
        assert [len(ids) for ids in ranks] == [48, 48]
        assert sorted(ranks[0] + ranks[1]) == list(range(96))
        orders.add(tuple(ranks[0]))
    assert len(orders) == 3
    reads = [int(count) for count in re.findall(r"48 of 96 samples on this rank, (\d+) read for all", done.stdout)]
    assert 96 <= reads[0] <= 96 + 2 * 8  # each rank looks at eight samples first
    assert reads == reads[:1] * 3  # and the cache has all for both
    assert not list(store_root.iterdir())


@pytest.mark.slow
def test_an_epoch_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """30 of 90 samples by 2 ranks, the other 60 by 3: each once."""
    assert "30 of 90 samples used so far, 0 twice" in torchrun(2, "elastic.py", tmp_path, 3).stdout
    assert "90 of 90 samples used so far, 0 twice" in torchrun(3, "elastic.py", tmp_path).stdout
    used = [int(id) for file in tmp_path.glob("samples-*") for id in file.read_text().split()]
    assert sorted(used) == list(range(90))
    assert len(list(tmp_path.glob("samples-*"))) == 5
