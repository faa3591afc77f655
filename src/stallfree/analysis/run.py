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
import time
from dataclasses import astuple, dataclass
from functools import wraps
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

SMALL = 0.05
"""Share of the time below which waits count as small."""

_LOADERS = ("torch.utils.data.dataloader", "stallfree.loader.dataloader")
"""Modules with a class `DataLoader`."""

clock = time.perf_counter


@dataclass
class Times:
    """Seconds of waits for batches, and between them.

    Attributes:
        passes, batches: their numbers.
        first: seconds from the start of a pass to its first batch, over all passes.
        waited: seconds of the other waits.
        between: seconds between one wait and the following one.
    """

    passes: int = 0
    batches: int = 0
    first: float = 0.0
    waited: float = 0.0
    between: float = 0.0

    def add_wait(self, seconds: float, first: bool) -> None:
        """Count a wait, for the first batch of a pass or for another one."""
        if first:
            self.first += seconds
        else:
            self.waited += seconds

    def json(self) -> dict[str, Any]:
        """The times as written."""
        waits = self.first + self.waited
        times = {"first_seconds": self.first, "waited_seconds": self.waited, "between_seconds": self.between}
        share = waits / (waits + self.between) if waits + self.between else 0.0
        return {"passes": self.passes, "batches": self.batches, **times, "stall_share": share}


class Row(Times):
    """The times of the loaders with one kind of data set that are iterated on one line.

    Attributes:
        key: class of the data set, samples per batch (None with a batch sampler), workers, file and line of the loop.
    """

    def __init__(self, key: tuple[Any, ...], persistent: bool) -> None:
        super().__init__()
        self.key, self.persistent = key, persistent

    def json(self) -> dict[str, Any]:
        """The row as written."""
        names = dict(zip(("dataset", "batch_size", "num_workers", "where"), self.key, strict=True))
        return {**names, "persistent_workers": self.persistent, **super().json()}


class Pass:
    """One iterator, from `iter` to its end."""

    def __init__(self, row: Row) -> None:
        self.row, self.is_fresh = row, True
        self.last: float | None = None  # when `next` returned a batch
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
            self.between += now - self.last

    def leave(self, now: float, seconds: float, first: bool) -> None:
        """End a wait of `seconds`."""
        self.depth -= 1
        if self.depth == 0:
            self.last = now
            self.add_wait(seconds, first)


_BENEATH = ("stallfree", "accelerate", "lightning", "pytorch_lightning", "transformers")
"""Packages that iterate the loaders of a program: a loop is at the line of the program that called them."""


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
        self._threads: dict[int, Thread] = {}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find nothing, but wrap the loaders of a module once it is loaded by the other finders."""
        if name not in _LOADERS:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            load: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                module.DataLoader.__iter__ = self._timed_iter(module.DataLoader.__iter__)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _timed_iter(self, original: Any) -> Any:
        @wraps(original)
        def __iter__(loader: Any) -> Any:
            caller = sys._getframe(1)
            if os.getpid() != self._pid or str(caller.f_globals.get("__name__")).startswith("stallfree.loader."):
                return original(loader)  # in a worker, or beneath a loader of stallfree
            while caller.f_back is not None and _is_beneath(caller):
                caller = caller.f_back
            thread, started = self._thread(), clock()
            thread.enter(started, None)
            try:
                iterator = original(loader)
            finally:
                seconds = clock() - started
                thread.leave(started + seconds, seconds, first=True)
            where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            key = type(loader.dataset).__name__, loader.batch_size, loader.num_workers, where
            row = self.rows.setdefault(key, Row(key, bool(getattr(loader, "persistent_workers", False))))
            row.first += seconds
            row.passes, thread.passes = row.passes + 1, thread.passes + 1
            self._passes[iterator] = Pass(row)
            kind: Any = type(iterator)
            if not hasattr(kind.__next__, "is_timed"):
                kind.__next__ = self._timed_next(kind.__next__)
            return iterator

        return __iter__

    def _timed_next(self, original: Any) -> Any:
        passes = self._passes

        @wraps(original)
        def __next__(iterator: Any) -> Any:
            one = passes.get(iterator)
            if one is None or os.getpid() != self._pid:
                return original(iterator)
            thread, started, row, ended = self._thread(), clock(), one.row, False
            thread.enter(started, one)
            if one.last is not None:
                row.between += started - one.last
            try:
                batch = original(iterator)
                row.batches, thread.batches = row.batches + 1, thread.batches + 1
                return batch
            except StopIteration:
                ended = True
                raise
            finally:
                now = clock()
                row.add_wait(now - started, one.is_fresh)
                thread.leave(now, now - started, one.is_fresh)
                one.last, one.thread, one.is_fresh = None if ended else now, thread, False

        __next__.is_timed = True  # type: ignore[attr-defined]
        return __next__

    def _thread(self) -> Thread:
        return self._threads.get(get_ident()) or self._threads.setdefault(get_ident(), Thread())

    def finish(self, target: str, out: str, cache: bool) -> None:
        """Print the summary to standard error, and write it as JSON to `out` if that is not empty."""
        if os.getpid() != self._pid:
            return
        total = Times(*map(sum, zip(*map(astuple, self._threads.values()), strict=True)))
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
    head = f"stallfree: {data['target']} waited for data {total['stall_share']:.1%} of the time of its loops"
    names = ("passes", "batches", "first", "waited", "between", "stalled")
    lines = ["", head, _advice(total, loaders, cache=data["cache"]), "", _line(names)]
    for row in loaders:
        batch = "" if row["batch_size"] is None else f", batch {row['batch_size']}"
        workers = f"{row['num_workers']} worker{'' if row['num_workers'] == 1 else 's'}"
        lines += [f"  {row['dataset']}{batch}, {workers}, iterated at {row['where']}", _line(_cells(row))]
    return "\n".join([*lines, *(["  total", _line(_cells(total))] if len(loaders) > 1 else [])]) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = [f"{row[f'{name}_seconds']:.2f} s" for name in ("first", "waited", "between")]
    return (f"{row['passes']:,}", f"{row['batches']:,}", *seconds, f"{row['stall_share']:.1%}")


def _line(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:>11}" for cell in cells)


def _advice(total: dict[str, Any], loaders: list[dict[str, Any]], *, cache: bool) -> str:
    """One or two sentences of advice."""
    if total["stall_share"] < SMALL:
        return "Next: nothing, data arrive in time; `stallfree analyze` shows how much faster the device may get."
    loop = total["first_seconds"] + total["waited_seconds"] + total["between_seconds"]
    advice, starting = "`stallfree analyze` shows what limits.", list[dict[str, Any]]()
    if not cache:
        starting = [row for row in loaders if _start_seconds(row) > SMALL * loop]
        advice = f"`stallfree run --cache` measures the same script with cache='auto'; {advice}"
    if not starting:
        return f"Next: {advice}"
    loops, seconds = ", ".join(dict.fromkeys(row["where"] for row in starting)), sum(map(_start_seconds, starting))
    return (
        f"Next: the workers of {loops} are started again in each pass, which took {seconds:.1f} s in all: give the "
        f"loader persistent_workers=True.{f' Then {advice}' if total['waited_seconds'] >= SMALL * loop else ''}"
    )


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


def use_cache() -> None:
    """Replace torch's loader by one with `cache="auto"` in what is imported from now on."""
    import torch.utils.data

    from stallfree.analysis.unchanged import DataLoader

    torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = DataLoader  # type: ignore[misc]


def main(out: str, cache: str, kind: str, target: str, *arguments: str) -> None:
    """Run the script or module as `__main__`; the summary is printed when the interpreter exits."""
    watch = Watch()
    atexit.register(watch.finish, target, out, bool(cache))
    if cache:
        use_cache()
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
