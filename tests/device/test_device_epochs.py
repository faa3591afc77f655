"""Epochs of a prefetcher: their batches, ends, errors and states, several at once, and copies of the prefetcher."""

import copy
import gc
import pickle
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils.data as tud
from fakes import World, prefetching

import stallfree as sf
from children import Child, until
from loader_data import Made
from stallfree.device.ahead import Items, LoaderThread

COUNT = 8


class Numbers:
    """A loader of tensors of their number, which raises in place of some, and continues. It has a state."""

    made = 0  # states of earlier positions

    def __init__(self, count: int = COUNT, errors: dict[int, BaseException] | None = None) -> None:
        self.count, self.errors, self.epoch, self.at = count, errors or {}, 0, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == self.count:
            self.epoch, self.at = self.epoch + 1, 0
            raise StopIteration
        self.at += 1
        if self.at - 1 in self.errors:
            raise self.errors[self.at - 1]
        return torch.tensor([100 * self.epoch + self.at - 1])

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Positioned(Numbers):
    """A loader that can return its present state later."""

    def state_snapshot(self) -> Any:
        position = self.state_dict()

        def state() -> dict[str, int]:
            self.made += 1
            return position

        return state


def batches(count: int) -> list[torch.Tensor]:
    return [*torch.arange(count)[:, None]]


def take(world: World | None, iterator: Iterable[Any], count: int = 50) -> list[Any]:
    """Return the numbers of the next batches, and the errors, at most `count`."""
    outcomes: list[Any] = []
    iterator = iter(iterator)
    while len(outcomes) < count:
        try:
            batch = next(iterator)
            if world is not None:
                world.synchronize()
            outcomes.append(int(batch[0]))
        except StopIteration:
            break
        except BaseException as error:
            outcomes.append(error)
    return outcomes


def test_close_ends_the_epoch_and_may_be_called_again(world: World | None) -> None:
    prefetcher = sf.DevicePrefetcher(batches(5), "cpu")
    prefetcher.close()
    iterator = iter(prefetcher)
    next(iterator)
    assert prefetching()
    for _ in range(2):
        prefetcher.close()
        assert not prefetching()
    assert list(iterator) == []
    assert take(world, prefetcher) == [0, 1, 2, 3, 4]
    prefetcher.close()


@pytest.mark.parametrize("end", [50, 2])
def test_the_loader_is_released_before_the_end_is_delivered_and_the_thread_ends_with_the_iteration(
    world: World | None, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release may end workers, which must not happen in a thread that nothing waits for."""

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            source = (batch for batch in batches(20))
            self.source = weakref.ref(source)
            return source

    released, put, loader = list[bool](), Items.put, Loader()
    monkeypatch.setattr(Items, "put", lambda items, item: (released.append(loader.source() is None), put(items, item)))
    prefetcher = sf.DevicePrefetcher(loader, "cpu")
    gone = weakref.ref(prefetcher)
    take(world, prefetcher, end)
    del prefetcher  # nothing closes it
    until(lambda: not prefetching(), "the thread has ended")
    assert released[-1]
    gc.collect()
    assert gone() is None


def test_where_there_are_no_streams_batches_pass_and_are_sent_and_transformed_in_the_training_loop() -> None:
    given = [{"x": torch.tensor([number])} for number in range(4)]
    assert all(found is batch for found, batch in zip(sf.DevicePrefetcher(given, "cpu"), given, strict=True))
    where = sf.DevicePrefetcher([1, 2], "cpu", transform_on_device=lambda _: threading.get_ident())
    assert list(where) == [threading.get_ident()] * 2
    sent = list(sf.DevicePrefetcher([{"x": torch.ones(3), "n": 5}], "meta", transform_on_device=lambda b: b | {"m": 1}))
    assert [(batch["x"].device.type, batch["n"], batch["m"]) for batch in sent] == [("meta", 5, 1)]


def test_an_error_of_the_loader_comes_in_its_place_with_its_traceback(world: World | None) -> None:
    iterator = iter(sf.DevicePrefetcher(Numbers(6, {2: OSError("unreadable")}), "cpu"))
    outcomes = take(world, iterator)
    assert outcomes[:2] + outcomes[3:] == [0, 1, 3, 4, 5]
    assert isinstance(outcomes[2], OSError)
    assert traceback.extract_tb(outcomes[2].__traceback__)[-1].name == "__next__"
    assert list(iterator) == []


@pytest.mark.parametrize("kind", [ValueError, StopIteration, KeyboardInterrupt])
def test_an_error_of_the_transform_costs_one_batch(world: World | None, kind: type[BaseException]) -> None:
    def transform(batch: torch.Tensor) -> torch.Tensor:
        if counter.pop(0):
            raise kind("of the transform")
        return batch

    counter = [False, True, True, True, True, False]
    outcomes = take(world, sf.DevicePrefetcher(batches(6), "cpu", transform_on_device=transform))
    assert (outcomes[0], outcomes[5]) == (0, 5)
    for error in outcomes[1:5]:
        assert isinstance(error, sf.StallfreeError if kind is StopIteration else kind)


@pytest.mark.parametrize("where", ["loader", "transform"])
def test_an_error_that_is_let_go_of_holds_nothing(device: World, where: str) -> None:
    class Wrong(Exception):
        pass

    def wrong(_: Any = None) -> Any:
        raise Wrong

    loader = (wrong() if where == "loader" else batch for batch in batches(1))
    prefetcher = sf.DevicePrefetcher(loader, "cuda", transform_on_device=wrong)
    gc.disable()
    try:
        try:
            list(prefetcher)
        except Wrong as error:
            gone = weakref.ref(error)
        prefetcher.close()
        assert gone() is None
        assert not device.in_use("device")
    finally:
        gc.enable()


def test_ctrl_c_at_any_point_of_the_wait(world: World | None) -> None:
    main, interrupts = threading.get_ident(), [0]

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is LoaderThread.take.__code__:
                interrupts[0] += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    def interrupted() -> Iterator[torch.Tensor]:
        for batch in batches(6):
            signal.pthread_kill(main, signal.SIGINT)
            yield batch

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for _ in range(20):
            outcomes = take(world, sf.DevicePrefetcher(interrupted(), "cpu"))
            found = [number for number in outcomes if isinstance(number, int)]
            assert found == sorted(set(found))
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupts[0]


def test_a_device_that_cannot_be_used_any_more_is_an_error(device: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "bind", lambda: list(device.no_such_device))  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_device"):
        next(iter(sf.DevicePrefetcher(batches(3), "cuda")))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(sf.InputError, match=r"device='cuda': PyTorch sees no GPU here\. Give device='cpu'"):
        sf.DevicePrefetcher([], "cuda")


def nested(loader: Any, device: str, depth: int) -> Any:
    return sf.DevicePrefetcher(sf.DevicePrefetcher(loader, device, 1), device, depth)


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize(("loader", "make"), [(Numbers, sf.DevicePrefetcher), (Positioned, nested)])
def test_a_state_leaves_exactly_what_was_not_given(world: World | None, loader: Any, make: Any, close: bool) -> None:
    for given in range(COUNT + 2):
        prefetcher = make(source := loader(), "cpu", 2)
        iterator = iter(prefetcher)
        assert take(world, iterator, given) == list(range(min(COUNT, given)))
        if close:
            prefetcher.close()
        assert source.made == 0, "a loader that knows its past makes a state only when it is asked for"
        state = prefetcher.state_dict()
        prefetcher.close()
        other = make(loader(), "cpu", 3)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert take(world, other) == ([*range(100, 100 + COUNT)] if given > COUNT else [*range(given, COUNT)])
        other.close()


def test_a_state_is_that_of_the_latest_iteration(world: World | None) -> None:
    class Latest(Numbers):
        def __iter__(self) -> Iterator[torch.Tensor]:
            self.epoch += 1
            epoch = self.epoch
            for number in range(COUNT):
                self.at = number + 1 if epoch == self.epoch else self.at
                yield torch.tensor([number])

    prefetcher = sf.DevicePrefetcher(Latest(), "cpu")
    first, second = iter(prefetcher), iter(prefetcher)
    take(world, first, 2), take(world, second, 3), take(world, first)
    assert prefetcher.state_dict()["at"] == 3
    prefetcher.close()


def test_a_state_that_cannot_be_had_is_an_error_in_its_place(device: World) -> None:
    class NoState(Numbers):
        def state_dict(self) -> Any:
            return self.at if self.at != 3 else {}["no state"]

    outcomes = take(device, sf.DevicePrefetcher(NoState(4), "cuda"))
    assert outcomes[:2] + outcomes[3:] == [0, 1, 3]
    assert isinstance(outcomes[2], KeyError)
    stateless = sf.DevicePrefetcher(sf.DevicePrefetcher(iter([]), "cpu"), "cpu")
    with pytest.raises(sf.InputError, match=r"a list_iterator, has no state_dict\(\)"):
        stateless.state_dict()


DATA, BATCH = list(range(12)), 4
EXPECTED = [DATA[:4], DATA[4:8], DATA[8:]]


def plain(**options: Any) -> tud.DataLoader[Any]:
    return tud.DataLoader(DATA, BATCH, **options)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: sf.DevicePrefetcher([batch.clone() for batch in torch.tensor(DATA).split(BATCH)], "cpu"),
    "torch, a worker": lambda: sf.DevicePrefetcher(plain(num_workers=1), "cpu"),
    "stallfree": lambda: sf.DataLoader(DATA, BATCH, device="cpu"),
    "stallfree, a worker": lambda: sf.DataLoader(DATA, BATCH, num_workers=1, device="cpu"),
    "prefetcher of a prefetcher": lambda: sf.DevicePrefetcher(sf.DevicePrefetcher(plain(), "cpu"), "cpu"),
}


def late(loader: Any) -> list[Any]:
    """A second iteration begins in the middle of the first, which ends before it."""
    first = iter(loader)
    taken, second = next(first), iter(loader)
    return [batch.tolist() for batch in (taken, next(second), *first, *second)]


USES: dict[str, Callable[[Any], list[Any]]] = {
    "zip": lambda loader: [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)],
    "nested": lambda loader: [(one.tolist(), other.tolist()) for one in loader for other in islice(iter(loader), 2)],
    "late": late,
}


@pytest.mark.parametrize("name", LOADERS)
def test_iterations_do_not_end_each_other_and_a_temporary_loader_lives_as_long_as_its_iterator(name: str) -> None:
    loader = LOADERS[name]()
    for use in [late] if "worker" in name else USES.values():  # the start of a worker takes long
        assert use(loader) == use(plain())
    getattr(loader, "close", int)()
    assert [batch.tolist() for batch in iter(LOADERS[name]()) if gc.collect() >= 0] == EXPECTED


@pytest.mark.parametrize("use", USES)
def test_iterations_share_a_device(device: World, use: str) -> None:
    made = sf.DevicePrefetcher(plain(), "cuda")

    class Synchronized:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (batch for batch in made if device.synchronize() is None)

    for _ in range(2):
        assert USES[use](Synchronized()) == USES[use](plain())
    made.close()


def test_a_data_set_is_used_by_one_thread_at_a_time_and_draws_what_torch_draws() -> None:
    users = threading.Semaphore()

    def one_user(id: int) -> torch.Tensor:
        assert users.acquire(blocking=False), "two threads in the data set"
        time.sleep(0.001)
        users.release()
        return id + torch.rand(())

    def run(wrap: Callable[[Iterable[Any]], Any]) -> tuple[list[Any], float]:
        torch.manual_seed(3)
        loader = wrap(tud.DataLoader(Made(16, one_user), 4, shuffle=True))  # type: ignore[arg-type]
        return USES["zip"](loader), torch.rand(()).item()

    assert run(lambda loader: sf.DevicePrefetcher(loader, "cpu")) == run(lambda loader: loader)


def test_a_child_forked_in_the_middle_of_an_iteration_begins_its_own() -> None:
    loader = sf.DevicePrefetcher(plain(), "cpu")
    first = iter(loader)
    next(first)

    def run() -> None:
        with pytest.raises(sf.StallfreeError, match="begun in the parent process"):
            next(first)
        assert USES["zip"](loader) == USES["zip"](plain())
        loader.close()

    assert Child(run).wait() == 0
    assert len(list(first)) == 2
    loader.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_prefetcher_can_be_copied_as_torchs_loader(copied: Callable[[Any], Any]) -> None:
    loader = sf.DevicePrefetcher(plain(), "cpu", 3, transform_on_device=torch.neg)
    iterator = iter(loader)
    next(iterator)
    other = copied(loader)
    assert (other.depth, other.device) == (loader.depth, loader.device)
    assert [batch.neg().tolist() for batch in other] == EXPECTED
    assert len(list(iterator)) == 2, "and it is independent of its copy"
