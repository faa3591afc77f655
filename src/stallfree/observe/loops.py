"""Times the data loaders of a script from outside.

The loader methods that a loop calls are replaced by wrappers that read the clock and call the original. The wrappers
draw no random numbers and keep no references; iterators are identified by their addresses. This file is loaded without
the rest of stallfree, before the script starts, so it imports only modules that every interpreter has loaded
(start.py).
"""

from __future__ import annotations

import os
import sys
import time
from _thread import get_ident
from _weakref import ref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

clock, cpu_clock = time.perf_counter, time.process_time

FORMAT, VERSION = "stallfree-run", 1
WORTH = 1.05
"""Minimum gain of a loader that is recommended."""

_WATCHED = {
    "torch.utils.data.dataloader": [("DataLoader", "__iter__"), ("_BaseDataLoaderIter", "__next__")],
    "stallfree.loader.dataloader": [("DataLoader", "__iter__")],
    "stallfree.loader.iteration": [("Iteration", "__next__")],
    "stallfree.loader.iterable": [("_Pass", "__next__")],
    "stallfree.device.prefetcher": [("_Iteration", "__next__")],
}
"""Modules, and their methods that are timed once they are imported."""


class Row:
    """The statistics of one loader, or of several equal ones created in sequence.

    Attributes:
        data: name of its data set's class.
        batch_size: samples per batch; None with a batch sampler.
        workers: its worker processes.
        where: file and line that first iterated it.
        loader: weak reference to the live loader.
        loaders: number of loaders.
        passes: iterations started.
        batches: delivered batches.
        samples: samples in them; None if unknown.
        first: seconds from the start of a pass to its first batch, over all passes.
        waited: seconds in `next` after that.
        between: seconds between one call of `next` and the following one.
        between_cpu: CPU seconds of this process in that time.
        delayed: seconds of that time in which the thread could run, and other processes had the cores.
        keeps: whether its workers persist between passes.
    """

    def __init__(self, loader: Any, key: tuple[Any, ...]) -> None:
        self.data, self.batch_size, self.workers, self.where = key
        self.key = key
        self.loader = ref(loader)
        self.keeps = bool(getattr(loader, "persistent_workers", False))
        self.loaders = 1
        self.passes = self.batches = 0
        self.first = self.waited = self.between = self.between_cpu = self.delayed = 0.0
        self.counted: int | None = 0
        self.exact: list[dict[str, int]] = []  # of stallfree's loaders, which have exact counts

    def takes(self, loader: Any, key: tuple[Any, ...]) -> bool:
        """Whether `loader` belongs to this row: it is the same, or replaces a freed one."""
        there = self.loader()
        if there is loader:
            return True
        if there is not None or key != self.key:
            return False
        self.loader = ref(loader)
        self.loaders += 1
        return True

    def begin(self, loader: Any) -> int | None:
        """Record the start of a pass; return its maximum number of samples, None if unknown."""
        self.passes += 1
        counts = getattr(loader, "counts", None)
        if isinstance(counts, dict) and not loader._dataset_kind:  # samples of iterable data sets are not counted
            if not any(counts is known for known in self.exact):
                self.exact.append(counts)
            return None
        sampler = getattr(loader, "sampler", None)  # if it is torch's own, it calls the data set's `len` anyway
        own = type(sampler).__module__.startswith("torch.utils.data.") and hasattr(type(sampler), "__len__")
        by_batches = loader.batch_size is None and loader.batch_sampler is not None
        try:
            return len(sampler) if own and not by_batches else None  # type: ignore[arg-type]
        except Exception:
            return None

    @property
    def stalls(self) -> float:
        """Seconds that the script waited for its batches."""
        return self.first + self.waited

    @property
    def samples(self) -> int | None:
        """The number of delivered samples; None if unknown."""
        return sum(counts["samples"] for counts in self.exact) if self.exact else self.counted


class Pass:
    """One iterator, from `iter` to its end."""

    def __init__(self, iterator: Any, row: Row, at_most: int | None, gone: Callable[[Any], None]) -> None:
        self.iterator = ref(iterator, gone)
        self.row = row
        self.at_most = at_most
        self.batches = 0
        self.fresh = True
        self.last: float | None = None  # when `next` returned
        self.last_cpu = self.last_delay = 0.0
        self.thread: Thread | None = None  # thread of that call, if not within the `next` of another loader
        self.mark = 0  # number of the wait in that thread

    def close(self) -> None:
        """Count the samples. Idempotent."""
        row = self.row
        if self.batches and not row.exact:
            known = row.counted is not None and self.at_most is not None
            size = row.batch_size or 1
            row.counted = row.counted + min(self.batches * size, self.at_most) if known else None  # type: ignore[operator, type-var]
        self.batches = 0


class Thread:
    """The waits of one thread in sequence, without nested ones.

    The time between two waits counts as loop time if any pass was active: if a pass that had delivered a batch is
    requested for another one later. So two alternating loaders, or nested loops, are not counted twice.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.waits = 0
        self.last: float | None = None
        self.gaps: list[tuple[int, float]] = []  # number of the previous wait, seconds; not counted yet
        self.first = self.waited = self.between = 0.0
        try:
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, AttributeError):
            self._schedule = -1

    def delay(self) -> float:
        """Seconds for which this thread waited for a core so far; 0 if unknown."""
        try:
            return int(os.pread(self._schedule, 64, 0).split()[1]) * 1e-9
        except (OSError, AttributeError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        """Close the descriptor."""
        if self._schedule >= 0:
            os.close(self._schedule)
        self._schedule = -1

    def enter(self, now: float, one: Pass | None) -> None:
        """Begin a wait of the pass `one`, or of one being created."""
        if self.last is None:
            return
        gap = now - self.last
        if one is None or one.last is None or one.thread is not self:
            self.gaps.append((self.waits, gap))
            return
        self.between += gap
        while self.gaps and self.gaps[-1][0] >= one.mark:
            self.between += self.gaps.pop()[1]

    def leave(self, now: float, seconds: float, first: bool) -> None:
        """End a wait of `seconds`."""
        self.waits += 1
        self.last = now
        if first:
            self.first += seconds
        else:
            self.waited += seconds


class Watch:
    """Times every loader that the script creates, and prints a summary at the end.

    Args:
        target: name of the script.
        out: where to write the summary as JSON; "-" for standard output, "" for nowhere.
        words: the module `summary`.

    Attributes:
        rows: the loaders, in the order in which they were first iterated.
        failed: whether the script ended with an error.
    """

    def __init__(self, target: str, out: str, words: Any) -> None:
        self.rows: list[Row] = []
        self.failed = False
        self._target, self._out, self._words = target, out, words
        self._pid = os.getpid()
        self._started = clock()
        self._passes: dict[int, Pass] = {}
        self._threads: dict[int, Thread] = {}
        self._undo: list[tuple[Any, str, Any]] = []
        self._forecast: dict[str, Any] | None = None
        self._slowest: tuple[Row, Any] | None = None  # the row of torch's loaders that waits most, and its data set
        sys.meta_path.insert(0, self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._stop)

    # -- installing the hooks -------------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Import hook: returns the spec of the other finders, and wraps the module once it is loaded."""
        if name not in _WATCHED:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: Any) -> None:
                del loader.exec_module
                load(module)
                if os.getpid() == self._pid:
                    self._watch(module, _WATCHED[name])

            loader.exec_module = exec_module
        return spec

    def _watch(self, module: Any, names: list[tuple[str, str]]) -> None:
        try:
            methods = [(getattr(module, owner), name) for owner, name in names]
            originals = [getattr(*method) for method in methods]
        except AttributeError as error:
            _say(f"stallfree: this version of {module.__name__} cannot be timed: {error}\n")
            return
        from functools import wraps

        for (owner, name), original in zip(methods, originals, strict=True):
            timed = self._timed_iter if name == "__iter__" else self._timed_next
            self._undo.append((owner, name, original))
            setattr(owner, name, wraps(original)(timed(original)))

    def _stop(self) -> None:
        """Stop timing in a forked child."""
        while self._undo:
            setattr(*self._undo.pop())

    # -- timing ---------------------------------------------------------------------------------------------------

    def _timed_iter(self, original: Any) -> Any:
        def __iter__(loader: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__") == "stallfree.loader.iterable":
                return original(loader)  # torch's loader beneath another one
            started = clock()
            here = self._here()
            outermost = here.depth == 0
            if outermost:
                here.enter(started, None)
            here.depth += 1
            try:
                iterator = original(loader)
            finally:
                here.depth -= 1
                now = clock()
                if outermost:
                    here.leave(now, now - started, first=True)
            row = self._row(loader, sys._getframe(1))
            row.first += now - started
            self._keep(row, loader)
            self._add(iterator, row, row.begin(loader))
            return iterator

        return __iter__

    def _timed_next(self, original: Any) -> Any:
        passes, end = self._passes, self._end

        def __next__(iterator: Any) -> Any:
            one = passes.get(id(iterator))
            if one is None:  # the script obtained it elsewhere
                return original(iterator)
            started = clock()
            here = self._here()
            outermost = here.depth == 0
            if outermost:
                here.enter(started, one)
            if one.last is not None:
                one.row.between += started - one.last
                one.row.between_cpu += cpu_clock() - one.last_cpu
                one.row.delayed += here.delay() - one.last_delay
            here.depth += 1
            over = False
            try:
                batch = original(iterator)
                one.batches += 1
                one.row.batches += 1
                return batch
            except StopIteration:
                over = True
                raise
            finally:
                end(one, here, started, outermost)
                if over:
                    one.last = None

        return __next__

    def _end(self, one: Pass, here: Thread, started: float, outermost: bool) -> None:
        """Record the end of a wait."""
        now = one.last = clock()
        one.last_cpu, one.last_delay = cpu_clock(), here.delay()
        here.depth -= 1
        if one.fresh:
            one.row.first += now - started
        else:
            one.row.waited += now - started
        if outermost:
            here.leave(now, now - started, one.fresh)
            one.mark = here.waits
        one.thread = here if outermost else None
        one.fresh = False

    def _here(self) -> Thread:
        ident = get_ident()
        return self._threads.get(ident) or self._threads.setdefault(ident, Thread())

    def _row(self, loader: Any, caller: Any) -> Row:
        where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        key = (type(loader.dataset).__name__, loader.batch_size, loader.num_workers, where)
        for row in self.rows:
            if row.takes(loader, key):
                return row
        self.rows.append(Row(loader, key))
        return self.rows[-1]

    def _keep(self, row: Row, loader: Any) -> None:
        """Keep the data set of the loader that waits most, to measure it when the script has ended."""
        most = self._slowest
        if type(loader).__module__ == "torch.utils.data.dataloader" and (most is None or most[0].stalls <= row.stalls):
            self._slowest = row, loader.dataset

    def _add(self, iterator: Any, row: Row, at_most: int | None) -> None:
        """Record the start of a pass. Ends the previous pass of the same iterator (persistent workers)."""
        key = id(iterator)
        passes = self._passes

        def gone(dead: Any) -> None:
            if key in passes and passes[key].iterator is dead:
                passes.pop(key).close()

        if key in passes:
            passes[key].close()
        passes[key] = Pass(iterator, row, at_most, gone)

    # -- the summary ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the summary to standard error, and as JSON if requested."""
        if os.getpid() != self._pid:
            return
        self._close_all()
        for thread in self._threads.values():
            thread.close()
        found = self.summary()
        if self.rows:
            _say(self._words.text(found))
        elif not self.failed:
            _say(
                f"stallfree: {self._target} iterated no torch.utils.data.DataLoader (nor a stallfree.DataLoader) in "
                "its own process, so there is nothing to time: give the script that trains\n"
            )
        if self._out:
            import json

            try:
                sys.stdout.flush()
                with open(1 if self._out == "-" else self._out, "w", closefd=self._out != "-") as file:
                    file.write(json.dumps(found, indent=1) + "\n")
            except (OSError, ValueError, AttributeError) as error:  # also of a standard output that is gone
                _say(f"error: the summary cannot be written to {self._out}: {error}\n")

    def measure(self) -> None:
        """Forecast the gain of stallfree's loader in the place of the one that waits most. Called after the script."""
        row, dataset = self._slowest or (None, None)
        self._close_all()
        if row is None or not row.samples or self.summary()["total"]["stall_share"] < self._words.SMALL_SHARE:
            return
        if getattr(sys.__stderr__, "isatty", bool)():
            _say("stallfree: measuring what a cache would gain; Ctrl-C ends this\n")
        try:
            from stallfree.observe.forecast import forecast

            step, step_cpu = (row.between - row.delayed) / row.samples, row.between_cpu / row.samples
            found = forecast(dataset, row.workers, step, step_cpu)
        except (Exception, KeyboardInterrupt):  # the script has ended; what its data set raises now is of no interest
            return
        now = row.samples / (row.stalls + row.between)
        if found is not None and found["rate"] > WORTH * now:
            self._forecast = {**found, "where": row.where, "now": now}

    def _close_all(self) -> None:
        self._slowest = None  # the script's objects are freed as they are without this
        for one in list(self._passes.values()):
            one.close()
        self._passes.clear()

    def summary(self) -> dict[str, Any]:
        """All statistics; times in seconds."""
        threads = self._threads.values()
        samples = [row.samples for row in self.rows]
        return {
            "format": FORMAT,
            "version": VERSION,
            "target": self._target,
            "seconds": clock() - self._started,
            "forecast": self._forecast,
            "loaders": [
                {
                    "dataset": row.data,
                    "batch_size": row.batch_size,
                    "num_workers": row.workers,
                    "where": row.where,
                    "loaders": row.loaders,
                    "persistent_workers": row.keeps,
                    **_figures(row.passes, row.batches, row.samples, row.first, row.waited, row.between),
                }
                for row in self.rows
            ],
            "total": _figures(
                sum(row.passes for row in self.rows),
                sum(row.batches for row in self.rows),
                None if None in samples else sum(samples),  # type: ignore[arg-type]
                sum(thread.first for thread in threads),
                sum(thread.waited for thread in threads),
                sum(thread.between for thread in threads),
            ),
        }


def _figures(
    passes: int, batches: int, samples: int | None, first: float, waited: float, between: float
) -> dict[str, Any]:
    whole = first + waited + between
    share = (first + waited) / whole if whole else 0.0
    return {
        "passes": passes,
        "batches": batches,
        "samples": samples,
        "first_seconds": first,
        "waited_seconds": waited,
        "between_seconds": between,
        "stall_share": share,
    }


def _say(text: str) -> None:
    """Write to the original standard error of the script, if it is still writable."""
    try:
        sys.__stderr__.write(text)  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        pass
