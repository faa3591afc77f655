"""Iterable data sets: batches, their order, their randomness and their errors are those of torch's loader."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import ChainDataset, IterableDataset

import stallfree as sf
from loader_data import same
from stallfree import StallfreeWarning
from stallfree.batches import stream
from stallfree.errors import InputError, SampleError, StallfreeError, WorkerError
from stallfree.integrations.accelerate import prepare
from stream_data import Generated, Held, Killed, Range, Sized, Stream, divide, drawing, refuse, stops

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def outcomes(iterator: Iterator[Any]) -> Iterator[Any]:
    """The batches and the types of the exceptions of an iterator, to its end."""
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except FileNotFoundError:
            yield FileNotFoundError


def epochs(kind: Any, dataset: Any, count: int, *, most: int | None = None, **arguments: Any) -> Any:
    """What `count` iterations give, of which each may end early, and where the generators are after that."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    loader, found = kind(dataset, **arguments), []
    for _ in range(count):
        iterator = iter(loader)
        found.append(list(islice(outcomes(iterator), most)))
    if kind is sf.DataLoader:
        loader.close()
    elif loader.num_workers:  # they would live as long as the traceback of an error
        iterator._shutdown_workers()
    return found, random.random(), np.random.rand(), torch.rand(())


def check(dataset: Any, count: int = 1, **arguments: Any) -> Any:
    """Compare with torch's loader; the batches of each epoch."""
    torchs = epochs(torch.utils.data.DataLoader, dataset, count, **arguments)
    ours = epochs(sf.DataLoader, dataset, count, **arguments)
    assert same(torchs, ours)
    return ours[0]


@settings(max_examples=6)
@given(
    kind=st.sampled_from([Stream, Generated]),
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    bad=st.sets(st.integers(0, 9), max_size=2),
    workers=st.integers(0, 3),
    size=st.sampled_from([None, 1, 2, 3]),
    drop_last=st.booleans(),
    factor=st.integers(1, 3),
    persistent=st.booleans(),
)
@example(kind=Stream, lengths=[9, 0, 4], bad=set(), workers=3, size=2, drop_last=True, factor=1, persistent=True)
@example(kind=Generated, lengths=[5, 9, 1], bad={3}, workers=3, size=2, drop_last=False, factor=2, persistent=False)
@example(kind=Stream, lengths=[9, 9, 9], bad={0, 4}, workers=0, size=2, drop_last=False, factor=2, persistent=False)
def test_streams(
    kind: Any,
    lengths: list[int],
    bad: set[int],
    workers: int,
    size: int | None,
    drop_last: bool,
    factor: int,
    persistent: bool,
) -> None:
    arguments: dict[str, Any] = {"batch_size": size, "drop_last": drop_last and size is not None}
    if workers:
        arguments |= {"num_workers": workers, "prefetch_factor": factor, "persistent_workers": persistent}
    check(kind(lengths, tuple(bad)), 3 if persistent else 1, **arguments)


@pytest.mark.parametrize("most", [1, 5])
def test_workers_that_persist_do_the_batches_of_an_iteration_that_ended_early(most: int) -> None:
    """So the generators of the workers stand where they would under torch."""
    check(Stream([30, 20]), 3, most=most, batch_size=2, num_workers=2, persistent_workers=True)


def test_a_collate_fn_draws_as_under_torch() -> None:
    for workers in (0, 2):
        check(Stream([5, 4]), batch_size=2, num_workers=workers, collate_fn=drawing)


def test_worker_init_fn_divides_the_copy_that_is_iterated() -> None:
    with sf.DataLoader(Range(3, 14), batch_size=3, num_workers=2, worker_init_fn=divide) as loader:
        assert [batch.tolist() for batch in loader] == [[3, 4, 5], [9, 10, 11], [6, 7, 8], [12, 13]]


def test_chained_streams() -> None:
    check(ChainDataset([Sized(5), Sized(3)]), batch_size=3, num_workers=2)


def test_shards_of_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(f"{tmp_path}/s-%03d.tar", maxcount=5, verbose=0) as writer:
        for number in range(23):
            picture = np.full((2, 2), number, np.uint8)
            writer.write({"__key__": f"{number:06}", "npy": picture, "cls": number})
    shards = sorted(map(str, tmp_path.glob("*.tar")))

    def pipeline() -> Any:
        return webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("npy", "cls")

    for workers in (0, 2):
        [batches] = check(pipeline(), batch_size=4, num_workers=workers)
        assert sorted(label for _, labels in batches for label in labels.tolist()) == list(range(23))
    check(pipeline().compose(webdataset.detshuffle(10)), 2, batch_size=4, num_workers=2)
    check(pipeline().batched(4), batch_size=None, num_workers=2)


def test_two_iterations_at_once() -> None:
    with sf.DataLoader(Sized(6), batch_size=2) as loader:
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4, 5], [4, 5])]


def test_the_stream_of_the_training_process_begins_with_the_iteration() -> None:
    dataset = Stream([4])
    with sf.DataLoader(dataset, batch_size=2) as loader:
        iterator = iter(loader)
        assert dataset.begun == 1
        assert len(list(iterator)) == 2
        assert dataset.begun == 1


def test_a_stream_that_is_not_read_to_its_end_is_closed() -> None:
    ends: list[str] = []
    dataset = Held(lambda: ends.append("end"))
    with sf.DataLoader(dataset, batch_size=2) as loader:
        assert [batch.tolist() for batch in islice(loader, 2)] == [[0, 1], [2, 3]]
    assert ends == ["end"]


def test_workers_of_an_endless_stream(tmp_path: Path) -> None:
    """They end in their own way, so that files are closed."""
    with sf.DataLoader(Held((tmp_path / "ended").touch), batch_size=2, num_workers=2) as loader:
        found = [batch.tolist() for batch in islice(loader, 5)]
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5]]
    assert (tmp_path / "ended").exists()


def test_batches_that_are_kept_stay_valid() -> None:
    class Large(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.full((400, 400), float(number)) for number in range(20))

    for workers in (0, 1):
        with sf.DataLoader(Large(), batch_size=2, num_workers=workers) as loader:
            kept = list(loader)
        assert [batch[:, 0, 0].tolist() for batch in kept] == [[number, number + 1] for number in range(0, 20, 2)]
        assert all((batch == batch[:, :1, :1]).all() for batch in kept)


def test_ids_say_the_stream_and_the_position() -> None:
    with sf.DataLoader(Stream([3, 2]), batch_size=2, num_workers=2, with_ids=True) as loader:
        batches = list(loader)
    assert [batch.ids.tolist() for batch in batches] == [[0, 2], [1, 3], [4]]
    for batch in batches:
        assert [(id % 2, id // 2) for id in batch.ids.tolist()] == [tuple(at) for at in batch.data["at"].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_outputs(workers: int) -> None:
    expected = [[0, 1], [0, 1], [2], [2]] if workers else [[0, 1], [2]]
    for arguments in ({"output": "numpy"}, {"device": "cpu"}):
        with sf.DataLoader(Sized(3), batch_size=2, num_workers=workers, **arguments) as loader:
            for _ in range(2):
                assert [batch.tolist() for batch in loader] == expected


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_position(workers: int) -> None:
    with (
        sf.DataLoader(Stream([3, 3], (1,)), batch_size=2, num_workers=workers) as loader,
        pytest.raises(SampleError, match=r"position 1 of the stream of worker 0\) failed: FileNotFoundError") as error,
    ):
        list(loader)
    assert isinstance(error.value, FileNotFoundError)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_fail_are_left_out(workers: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "drop_last": True, "on_error": "skip"}
    with sf.DataLoader(Stream([5, 4], (0, 2, 3)), **arguments) as loader:
        found = [batch["at"].tolist() for batch in loader]
    assert found == ([[[0, 1]], [[1, 1]]] if workers else [[[0, 1]]])
    assert loader.stats().skips == (6 if workers else 3)


def test_an_iterator_that_always_fails_ends_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FAILURES", 10)
    with (
        sf.DataLoader(Stream([50], tuple(range(50))), batch_size=2, on_error="skip") as loader,
        pytest.raises(FileNotFoundError, match="sample 9 "),
    ):
        list(loader)


def test_a_worker_that_cannot_start() -> None:
    with sf.DataLoader(Sized(5), num_workers=2, worker_init_fn=refuse) as loader:
        iterator = iter(loader)
        for number in range(2):
            with pytest.raises(PermissionError, match=f"worker {number} may not"):
                next(iterator)
        assert list(iterator) == []


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_worker_that_dies_ends_its_stream(factor: int, persistent: bool, tmp_path: Path) -> None:
    (tmp_path / "killing").touch()
    arguments: dict[str, Any] = {"batch_size": 2, "prefetch_factor": factor, "persistent_workers": persistent}
    with sf.DataLoader(Killed(str(tmp_path / "killing")), num_workers=2, **arguments) as loader:
        iterator = iter(loader)
        found = [next(iterator).tolist() for _ in range(5)]
        with pytest.raises(WorkerError, match=r"worker process 1 died on batch 5 of epoch 0: .*SIGKILL") as error:
            next(iterator)
        assert isinstance(error.value, RuntimeError)
        assert [id // 2 for id in error.value.ids] == [4, 5]
        found += [batch.tolist() for batch in iterator]
        assert found == [[0, 1], [100, 101], [2, 3], [102, 103], [4, 5], [6, 7], [8, 9]]
        os.remove(tmp_path / "killing")
        assert sorted(number for batch in loader for number in batch.tolist()) == [*range(10), *range(100, 110)]


def test_stop_iteration_of_a_collate_fn_is_an_error() -> None:
    for workers in (0, 1):
        with (
            sf.DataLoader(Sized(3), num_workers=workers, collate_fn=stops) as loader,
            pytest.raises(StallfreeError, match="raised StopIteration"),
        ):
            list(loader)


WRONG: dict[str, Any] = {
    "shuffle": True,
    "sampler": [0, 1],
    "batch_sampler": [[0], [1]],
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_torch_refuses(name: str) -> None:
    for kind in (torch.utils.data.DataLoader, sf.DataLoader):
        with pytest.raises(ValueError, match=name):
            kind(Sized(5), **{name: WRONG[name]})


def test_other_arguments_and_data_sets() -> None:
    with pytest.raises(InputError, match=r"ranks=.*leave out ranks"):
        sf.DataLoader(Sized(5), ranks="auto")
    with pytest.raises(InputError, match="prepare was given a loader of an IterableDataset"):
        prepare(None, sf.DataLoader(Sized(5)))
    with pytest.raises(InputError, match="IterDataPipe"):
        sf.DataLoader(torch.utils.data.datapipes.iter.IterableWrapper([1]))


# -- length, epochs, state --------------------------------------------------------------------------------------------


def test_length() -> None:
    for size, drop_last in ((None, False), (1, False), (4, False), (4, True)):
        torchs = torch.utils.data.DataLoader(Sized(10), batch_size=size, drop_last=drop_last)
        assert len(sf.DataLoader(Sized(10), batch_size=size, drop_last=drop_last)) == len(torchs)
    with pytest.raises(TypeError, match="has no len"):
        len(sf.DataLoader(Stream([3])))


@pytest.mark.parametrize("workers", [0, 2])
def test_more_samples_than_the_length(workers: int) -> None:
    with sf.DataLoader(Sized(5, 3), num_workers=workers) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", "This process", DeprecationWarning
            )  # Python 3.12 and later, of every fork
            assert len([0 for _ in loader]) == 5 * (workers or 1)  # nobody has asked for the length
        assert len(loader) == 3
        with pytest.warns(StallfreeWarning, match=r"length of Sized is 3, and more.*get_worker_info") as seen:
            list(loader)
        assert [warning.filename for warning in seen if warning.category is not DeprecationWarning] == [__file__]


def test_epochs_and_states() -> None:
    dataset = Sized(3)
    with sf.DataLoader(dataset, batch_size=2) as loader:
        assert [loader.state_dict()["epoch"], len(list(loader)), loader.state_dict()["epoch"]] == [0, 2, 1]
        loader.set_epoch(7)
        iterator = iter(loader)
        assert next(iterator).tolist() == [7000, 7001]
        state = loader.state_dict()
    dataset = Sized(3)
    with sf.DataLoader(dataset, batch_size=2) as loader:
        with pytest.warns(StallfreeWarning, match="after 1 batches of epoch 7.* begins that epoch again"):
            loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == [[7000, 7001], [7002]]


def test_what_other_libraries_look_at() -> None:
    torchs, ours = (kind(Sized(5), batch_size=2) for kind in (torch.utils.data.DataLoader, sf.DataLoader))
    for name in ("sampler", "batch_sampler", "_dataset_kind", "batch_size", "drop_last"):
        mine, theirs = getattr(ours, name), getattr(torchs, name)
        assert mine == theirs or type(mine) is type(theirs)
    assert repr(ours) == "DataLoader(<Sized of 5 samples>, batch_size=2, num_workers=0)"
    assert repr(sf.DataLoader(Stream([3]))) == "DataLoader(<Stream>, batch_size=1, num_workers=0)"
