"""Runs a script as `python` does, and times its data loaders, or replaces them by ones with `cache="auto"`.

`stallfree run` replaces itself by a new interpreter that runs this file, so that the script decides when to import
torch. The methods that a loop calls, `__iter__` of the loaders and `__next__` of their iterators, are wrapped when
their classes are imported: the wrappers read the clock and call the original. They draw no random numbers.

    python -m stallfree.analysis.run JSON CACHE KIND TARGET [ARGUMENT ...]

JSON: a path, "-" or empty; CACHE: "cache" or empty; KIND: "script" or "module".
"""

import atexit
import os
import runpy
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import wraps
from importlib.machinery import PathFinder
from threading import get_ident
from time import perf_counter as clock
from typing import Any
from weakref import WeakKeyDictionary

from stallfree.analysis.render import Heading, Table, Text, as_text, plural  # at exit, it would change the exit code

SMALL = 0.05
"""Share of the time below which waits count as small."""

_LOADERS = {
    "torch.utils.data.dataloader": "DataLoader",
    "stallfree.loader.dataloader": "DataLoader",
    "stallfree.device.prefetcher": "DevicePrefetcher",
    "stallfree.device.process": "ProcessPrefetcher",
    "stallfree.shared.shared_loader": "SharedLoader",
}
"""The classes of loaders by their modules."""


@dataclass(kw_only=True)
class Times:
    """Seconds of waits for batches, and between them.

    Attributes:
        passes, batches: their numbers.
        first_seconds: from the start of a pass to its first batch, over all passes.
        waited_seconds: the other waits.
        between_seconds: between one wait and the following one.
    """

    passes: int = 0
    batches: int = 0
    first_seconds: float = 0.0
    waited_seconds: float = 0.0
    between_seconds: float = 0.0

    def add_wait(self, seconds: float, first: bool) -> None:
        """Count a wait, for the first batch of a pass or for another one."""
        if first:
            self.first_seconds += seconds
        else:
            self.waited_seconds += seconds

    def json(self) -> dict[str, Any]:
        """The times as written."""
        waits = self.first_seconds + self.waited_seconds
        return asdict(self) | {"stall_share": waits / ((waits + self.between_seconds) or 1.0)}


@dataclass
class Row(Times):
    """The times of the loaders with one kind of data set that are iterated on one line.

    Attributes:
        dataset: its class.
        batch_size: samples per batch; None with a batch sampler.
        num_workers, persistent_workers: of the loaders.
        where: file and line of the loop.
    """

    dataset: str
    batch_size: int | None
    num_workers: int
    persistent_workers: bool
    where: str


class Pass:
    """One iterator, from `iter` to its end."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.last: float | None = None  # when `next` returned a batch; None before the first one
        self.thread: Any = None  # of that call


class Thread(Times):
    """The waits of one thread in sequence, without nested ones.

    The time between two waits counts if the second one is for a further batch of a pass. So two alternating loaders, or
    nested loops, are not counted twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.last = 0, 0.0

    def enter(self, now: float, one: Pass | None) -> None:
        """Begin a wait of the pass `one`, or of one being created."""
        self.depth += 1
        if self.depth == 1 and one is not None and one.last is not None and one.thread is self:
            self.between_seconds += now - self.last

    def leave(self, now: float, seconds: float, first: bool) -> None:
        """End a wait of `seconds`."""
        self.depth -= 1
        if self.depth == 0:
            self.last = now
            self.add_wait(seconds, first)


_BENEATH = ("stallfree", "accelerate", "lightning", "pytorch_lightning", "transformers")
"""Packages that iterate the loaders of a program: a loop is at the line of the program that called them."""


_BETWEEN = ("stallfree.loader.", "stallfree.device.")
"""Modules whose loaders iterate another one."""


def _is_beneath(frame: Any) -> bool:
    return frame.f_code.co_filename == __file__ or str(frame.f_globals.get("__name__")).split(".")[0] in _BENEATH


class Watch:
    """Times every loader that is iterated in this process, from its creation on. Also an import hook.

    Attributes:
        rows: the loaders by line, in the order in which they were first iterated.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], Row] = {}
        self._pid, self._started = os.getpid(), clock()
        self._passes: WeakKeyDictionary[Any, Pass] = WeakKeyDictionary()
        self._threads: defaultdict[int, Thread] = defaultdict(Thread)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module with loaders, which are wrapped once it is loaded."""
        spec = PathFinder.find_spec(name, path) if name in _LOADERS else None
        if spec is not None and spec.loader is not None:
            load: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                loader = getattr(module, _LOADERS[name])
                loader.__iter__ = self._timed_iter(loader.__iter__)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _timed_iter(self, original: Any) -> Any:
        @wraps(original)
        def __iter__(loader: Any) -> Any:
            caller = sys._getframe(1)
            if os.getpid() != self._pid or str(caller.f_globals.get("__name__")).startswith(_BETWEEN):
                return original(loader)  # in a worker, or beneath a loader of stallfree
            while caller.f_back is not None and _is_beneath(caller):
                caller = caller.f_back
            thread, started = self._threads[get_ident()], clock()
            thread.enter(started, None)
            try:
                iterator = original(loader)
            finally:
                seconds = clock() - started
                thread.leave(started + seconds, seconds, first=True)
            where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            while hasattr(loader, "loader"):  # of a prefetcher
                loader = loader.loader
            kind, size = type(getattr(loader, "dataset", loader)).__name__, getattr(loader, "batch_size", None)
            workers = [getattr(loader, name, 0) for name in ("num_workers", "persistent_workers")]
            key = kind, size, workers[0], bool(workers[1]), where
            row = self.rows.setdefault(key, Row(*key))
            row.first_seconds += seconds
            row.passes, thread.passes = row.passes + 1, thread.passes + 1
            self._passes[iterator] = Pass(row)
            batches: Any = type(iterator)
            if not hasattr(batches.__next__, "is_timed"):
                batches.__next__ = self._timed_next(batches.__next__)
            return iterator

        return __iter__

    def _timed_next(self, original: Any) -> Any:
        passes = self._passes

        @wraps(original)
        def __next__(iterator: Any) -> Any:
            one = passes.get(iterator)
            if one is None or os.getpid() != self._pid:
                return original(iterator)
            thread, started, row = self._threads[get_ident()], clock(), one.row
            first, ended = one.last is None, False
            thread.enter(started, one)
            if one.last is not None:
                row.between_seconds += started - one.last
            try:
                batch = original(iterator)
                row.batches, thread.batches = row.batches + 1, thread.batches + 1
                return batch
            except StopIteration:
                ended = True
                raise
            finally:
                now = clock()
                row.add_wait(now - started, first)
                thread.leave(now, now - started, first)
                one.last, one.thread = None if ended else now, thread

        __next__.is_timed = True  # type: ignore[attr-defined]
        return __next__

    def finish(self, target: str, out: str, cache: bool) -> None:
        """Print the summary to standard error, and write it as JSON to `out` if that is not empty."""
        if os.getpid() != self._pid:
            return
        threads = self._threads.values()
        total = Times(**{name: sum(getattr(one, name) for one in threads) for name in Times.__dataclass_fields__})
        data = {"format": "stallfree-run", "version": 1, "target": target, "cache": cache}
        data |= {"seconds": clock() - self._started, "total": total.json()}
        data |= {"loaders": [row.json() for row in self.rows.values()]}
        try:
            sys.stdout.flush()
            sys.__stderr__.write(summary(data))  # type: ignore[union-attr]
            sys.__stderr__.flush()  # type: ignore[union-attr]
            if out:
                import json

                with open(1 if out == "-" else out, "w", closefd=out != "-") as file:
                    file.write(json.dumps(data, indent=1) + "\n")
        except (OSError, ValueError, AttributeError) as error:  # a stream that is gone, too
            print(f"error: the summary cannot be written: {error}", file=sys.__stderr__)


# -- the summary ------------------------------------------------------------------------------------------------------


def summary(data: dict[str, Any]) -> str:
    """The summary as text of 80 columns: the result, the advice, the loaders."""
    total, loaders = data["total"], data["loaders"]
    if not loaders:
        return f"stallfree: {data['target']} iterated no DataLoader in its own process: there is nothing to time\n"
    head = Text(f"stallfree: {data['target']} waited for data {total['stall_share']:.1%} of the time of its loops")
    advice = Text(f"Next: {_advice(total, loaders, cache=data['cache'])}")
    rows = []
    for row in loaders:
        batch = "" if row["batch_size"] is None else f", batch {row['batch_size']}"
        name = f"{row['dataset']}{batch}, {plural(row['num_workers'], 'worker')}, at {row['where']}"
        rows.append([name, *_cells(row)])
    if len(loaders) > 1:
        rows.append(["total", *_cells(total)])
    table = Table("", ("", "passes", "batches", "first", "waited", "between", "stalled"), rows)
    return "\n" + as_text([head, advice, Heading("Waits for each loader"), table])


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = [f"{row[f'{name}_seconds']:.2f} s" for name in ("first", "waited", "between")]
    return [f"{row['passes']:,}", f"{row['batches']:,}", *seconds, f"{row['stall_share']:.1%}"]


def _advice(total: dict[str, Any], loaders: list[dict[str, Any]], *, cache: bool) -> str:
    """One or two sentences of advice."""
    if total["stall_share"] < SMALL:
        return "nothing, data arrive in time; `stallfree analyze` shows how much faster the device may get."
    if cache:
        return "`stallfree analyze` shows what limits."
    slowest = max(loaders, key=_start_seconds)
    where, seconds = slowest["where"], _start_seconds(slowest)
    small = SMALL * sum(total[f"{name}_seconds"] for name in ("first", "waited", "between"))
    then = "`stallfree run --cache` measures the same script with cache='auto'; `stallfree analyze` shows what limits."
    if seconds <= small:
        return then
    start = f"give the loader at {where} persistent_workers=True; starting its workers took {seconds:.1f} s in all."
    return start if total["waited_seconds"] < small else f"{start} Then {then}"


def _start_seconds(row: dict[str, Any]) -> float:
    """Seconds of waits for first batches that the start of workers caused, and persistent workers would avoid.

    A running worker would build its first batch in the time of a batch times the number of workers.
    """
    passes, later = row["passes"], row["batches"] - row["passes"]
    if passes < 2 or not row["num_workers"] or row["persistent_workers"]:
        return 0.0
    each = (row["waited_seconds"] + row["between_seconds"]) / later if later > 0 else 0.0
    return max(0.0, float((row["first_seconds"] / passes - each * row["num_workers"]) * (passes - 1)))


# -- the script -------------------------------------------------------------------------------------------------------


def main(out: str, cache: str, kind: str, target: str, *arguments: str) -> None:
    """Run the script or module as `__main__`; the summary is printed when the interpreter exits."""
    atexit.register(Watch().finish, target, out, bool(cache))
    if cache:  # what is imported from now on has a loader with cache="auto" in place of torch's
        import torch.utils.data

        from stallfree.analysis.unchanged import DataLoader

        torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = DataLoader  # type: ignore[misc]
    sys.argv = [target, *arguments]
    try:
        if kind == "script":
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = os.path.dirname(os.path.realpath(target))
            runpy.run_path(os.path.abspath(target), run_name="__main__")
        else:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    except BaseException as error:
        _hide_own_frames(error)
        raise


def _hide_own_frames(error: BaseException) -> None:
    """Leave the frames of this file and of `runpy` out of the traceback that is printed."""
    hook, trace = sys.excepthook, error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next

    def show(kind: type[BaseException], value: BaseException, _: object) -> None:
        sys.excepthook = hook
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


if __name__ == "__main__":
    main(*sys.argv[1:])
