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
from functools import wraps
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

SMALL = 0.05
"""Share of the time below which waits count as small."""

_LOADERS = ("torch.utils.data.dataloader", "stallfree.loader.dataloader")
"""Modules with a class `DataLoader`."""

clock = time.perf_counter


class Row:
    """The times of the loaders with one kind of data set that are iterated on one line.

    Attributes:
        key: class of the data set, samples per batch (None with a batch sampler), workers, file and line of the loop.
        passes, batches: their numbers.
        first: seconds from the start of a pass to its first batch, over all passes.
        waited: seconds of the other waits.
        between: seconds between one wait and the following one.
    """

    def __init__(self, key: tuple[Any, ...], persistent: bool) -> None:
        self.key, self.persistent = key, persistent
        self.passes = self.batches = 0
        self.first = self.waited = self.between = 0.0

    def json(self) -> dict[str, Any]:
        """The row as written."""
        names = dict(zip(("dataset", "batch_size", "num_workers", "where"), self.key, strict=True))
        figures = _figures(self.passes, self.batches, self.first, self.waited, self.between)
        return {**names, "persistent_workers": self.persistent, **figures}


class Pass:
    """One iterator, from `iter` to its end."""

    def __init__(self, row: Row) -> None:
        self.row, self.is_fresh = row, True
        self.last: float | None = None  # when `next` returned
        self.thread: Any = None  # of that call, if it was not within the `next` of another loader
        self.mark = 0  # number of the wait in that thread


class Thread:
    """The waits of one thread in sequence, without nested ones.

    The time between two waits counts if any pass was active: if a pass that had delivered a batch is asked for another
    one later. So two alternating loaders, or nested loops, are not counted twice.
    """

    def __init__(self) -> None:
        self.depth = self.waits = 0
        self.last: float | None = None
        self.gaps: list[tuple[int, float]] = []  # number of the previous wait, seconds; not counted yet
        self.first = self.waited = self.between = 0.0

    def enter(self, now: float, one: Pass | None) -> None:
        """Begin a wait of the pass `one`, or of one being created."""
        if self.last is None:
            return
        if one is None or one.last is None or one.thread is not self:
            self.gaps.append((self.waits, now - self.last))
            return
        self.between += now - self.last
        while self.gaps and self.gaps[-1][0] >= one.mark:
            self.between += self.gaps.pop()[1]

    def leave(self, now: float, seconds: float, first: bool) -> None:
        """End a wait of `seconds`."""
        self.waits, self.last = self.waits + 1, now
        if first:
            self.first += seconds
        else:
            self.waited += seconds


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
            if thread.depth == 0:
                thread.enter(started, None)
            thread.depth += 1
            try:
                iterator = original(loader)
            finally:
                thread.depth -= 1
                seconds = clock() - started
                if thread.depth == 0:
                    thread.leave(started + seconds, seconds, first=True)
            where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            key = type(loader.dataset).__name__, loader.batch_size, loader.num_workers, where
            row = self.rows.setdefault(key, Row(key, bool(getattr(loader, "persistent_workers", False))))
            row.first += seconds
            row.passes += 1
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
            thread, started, row = self._thread(), clock(), one.row
            outermost, ended = thread.depth == 0, False
            if outermost:
                thread.enter(started, one)
            if one.last is not None:
                row.between += started - one.last
            thread.depth += 1
            try:
                batch = original(iterator)
                row.batches += 1
                return batch
            except StopIteration:
                ended = True
                raise
            finally:
                thread.depth -= 1
                now = clock()
                if one.is_fresh:
                    row.first += now - started
                else:
                    row.waited += now - started
                if outermost:
                    thread.leave(now, now - started, one.is_fresh)
                    one.mark = thread.waits
                one.last, one.thread, one.is_fresh = None if ended else now, thread if outermost else None, False

        __next__.is_timed = True  # type: ignore[attr-defined]
        return __next__

    def _thread(self) -> Thread:
        return self._threads.get(get_ident()) or self._threads.setdefault(get_ident(), Thread())

    def finish(self, target: str, out: str) -> None:
        """Print the summary to standard error, and write it as JSON to `out` if that is not empty."""
        if os.getpid() != self._pid:
            return
        loaders, threads = [row.json() for row in self.rows.values()], self._threads.values()
        counts = (sum(row[name] for row in loaders) for name in ("passes", "batches"))
        times = (sum(getattr(thread, name) for thread in threads) for name in ("first", "waited", "between"))
        total = _figures(*counts, *times)
        data = {"format": "stallfree-run", "version": 1, "target": target, "seconds": clock() - self._started}
        data |= {"loaders": loaders, "total": total}
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


def _figures(passes: int, batches: int, first: float, waited: float, between: float) -> dict[str, Any]:
    loop = first + waited + between
    times = {"first_seconds": first, "waited_seconds": waited, "between_seconds": between}
    return {"passes": passes, "batches": batches, **times, "stall_share": (first + waited) / loop if loop else 0.0}


# -- the summary ------------------------------------------------------------------------------------------------------


def summary(data: dict[str, Any]) -> str:
    """The summary as text of 80 columns: the result, the advice, the loaders."""
    total, loaders = data["total"], data["loaders"]
    if not loaders:
        return f"stallfree: {data['target']} iterated no DataLoader in its own process: there is nothing to time\n"
    head = f"stallfree: {data['target']} waited for data {total['stall_share']:.1%} of the time of its loops"
    names = ("passes", "batches", "first", "waited", "between", "stalled")
    lines = ["", head, _advice(total, loaders), "", _line(names)]
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


def _advice(total: dict[str, Any], loaders: list[dict[str, Any]]) -> str:
    """One or two sentences of advice."""
    if total["stall_share"] < SMALL:
        return "Next: nothing, data arrive in time; `stallfree analyze` shows how much faster the device may get."
    loop = total["first_seconds"] + total["waited_seconds"] + total["between_seconds"]
    advice = "`stallfree analyze` shows what limits."
    used = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    starting = []
    if not any(kind.__module__.startswith("stallfree") for kind in getattr(used, "__mro__", ())):  # see `use_cache`
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
    atexit.register(watch.finish, target, out)
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
