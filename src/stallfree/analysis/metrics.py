"""The statistics of loaders and caches as named values, for TensorBoard, Prometheus or other tools.

    metrics = Metrics(train=loader, cache=dataset)
    hook = TensorBoardHook("runs/1")
    for step, batch in enumerate(loader):
        ...
        if step % 100 == 0:
            hook.write(metrics.values(), step)

    PrometheusServer(metrics, port=9400)        # http://127.0.0.1:9400/metrics, read when it is scraped

No data is sent. Names follow Prometheus conventions: unit last, and `_total` for counters. They are stable.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol

from stallfree.errors import InputError, file_unwritable, missing_extra, port_unavailable
from stallfree.ipc.folders import is_path
from stallfree.stats import CacheStats, LoaderStats, SharedStats, SmartCacheStats
from stallfree.typevars import Closing

_GAUGES = {"stall_fetch_seconds", "stall_prep_seconds", "queue_depth", "staging_bytes", "num_workers", "hit_ratio"}
_GAUGES |= {"resident_items", "resident_bytes", "capacity_bytes", "used_bytes", "epoch", "window_start", "replace_num"}
_GAUGES |= {"lag", "jobs"}
"""Values that may decrease; the names of the others, which only grow, end in `_total`."""

_RENAMED = {"num_workers": "workers"}


class Hook(Protocol):
    """Protocol of a consumer of values, for user-defined classes.

    Example:
        ```python
        class Printer:  # has `write`, so it is a Hook
            def write(self, values, step):
                print(step, values)

        Printer().write(sf.Metrics(train=loader).values(), step=100)
        ```
    """

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Receive all `values` at `step`."""


class Metrics:
    """Reads the current statistics of `sources`.

    Args:
        sources: loaders and caches (objects with `.stats()`) under user-defined names. They are kept alive.

    Raises `InputError` for an object without the statistics of a loader or a cache.

    Example:
        ```python
        metrics = sf.Metrics(train=loader)
        assert metrics.values()["train/stallfree_loader_batches_total"] == 0
        ```
    """

    def __init__(self, **sources: Any) -> None:
        if not sources:
            raise InputError("Metrics() was given nothing: give loaders and caches, as in Metrics(train=loader)")
        for name, source in sources.items():
            read = getattr(source, "stats", None)
            if not callable(read) or not isinstance(read(), (LoaderStats, CacheStats)):
                kind = type(source).__name__
                raise InputError(f"{name}={kind} has no statistics: give loaders and caches of stallfree")
        self._sources = sources

    def read(self) -> Iterator[tuple[str, str, float]]:
        """Each value, with the names of its source and its own."""
        for name, source in self._sources.items():
            for metric, value in _values_of(source.stats()):
                yield name, metric, value

    def values(self) -> dict[str, float]:
        """All values by name, such as `{"train/stallfree_loader_batches_total": 7.0, ...}`."""
        return {f"{name}/{metric}": value for name, metric, value in self.read()}


def _values_of(stats: LoaderStats | CacheStats) -> Iterator[tuple[str, float]]:
    """All values in `stats`, in the order of its fields, and values derived from them."""
    loader = isinstance(stats, LoaderStats)
    plain, special = (LoaderStats, SharedStats) if loader else (CacheStats, SmartCacheStats)
    own = {field.name for field in fields(special)} - {field.name for field in fields(plain)}
    prefix, own_prefix = ("loader", "shared_loader") if loader else ("cache", "smart_cache")
    derived = ["stall_fetch_seconds", "stall_prep_seconds"] if loader else ["hit_ratio"]
    for name in [*(field.name for field in fields(stats)), *derived]:
        full = f"stallfree_{own_prefix if name in own else prefix}_{_RENAMED.get(name, name)}"
        yield full + ("" if name in _GAUGES else "_total"), float(getattr(stats, name))


class TensorBoardHook:
    """Writes scalars for TensorBoard.

    Args:
        target: folder of the logs, or a `SummaryWriter`.

    Raises `MissingExtraError` without the extra "tensorboard", `InputError` for other targets.

    Example:
        ```python
        # needs tensorboard
        hook = sf.TensorBoardHook("logs")
        hook.write(sf.Metrics(train=loader).values(), step=100)
        hook.close()
        ```
    """

    def __init__(self, target: Any) -> None:
        self._own = is_path(target)
        if not self._own and not callable(getattr(target, "add_scalar", None)):
            raise InputError(f"TensorBoardHook({target!r}): give the path of a folder, or a SummaryWriter")
        if self._own:
            try:
                from torch.utils.tensorboard import SummaryWriter

                target = SummaryWriter(os.fspath(target))
            except ImportError as error:
                raise missing_extra("tensorboard", "tensorboard", "TensorBoardHook") from error
            except OSError as error:
                raise file_unwritable(f"TensorBoardHook({target!r}) cannot write: {error}. Give a folder") from error
        self._writer = target

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write all `values` as scalars at `step`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close. A `SummaryWriter` passed as the target stays open."""
        if self._own:
            self._writer.close()
        else:
            self._writer.flush()


class PrometheusCollector:
    """Reads `metrics` whenever a registry of `prometheus_client` is scraped: `registry.register(...)` it.

    The name of a loader or cache is the label `name`. Raises `MissingExtraError` without the extra "prometheus",
    `InputError` if `metrics` is not a `Metrics`.

    Example:
        ```python
        # needs prometheus_client
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        registry.register(sf.PrometheusCollector(sf.Metrics(train=loader)))
        text = prometheus_client.generate_latest(registry)
        ```
    """

    def __init__(self, metrics: Metrics) -> None:
        if not isinstance(metrics, Metrics):
            raise InputError(f"metrics={metrics!r:.80}: give Metrics(train=loader)")
        _client()
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        """The metric families for `prometheus_client`."""
        core, families = _client().core, dict[str, Any]()
        for name, metric, value in self._metrics.read():
            if metric not in families:
                kind = core.CounterMetricFamily if metric.endswith("_total") else core.GaugeMetricFamily
                families[metric] = kind(metric, metric.replace("_", " "), labels=["name"])
            families[metric].add_metric([name], value)
        yield from families.values()


class PrometheusServer(Closing):
    """Serves `metrics` to a Prometheus scraper, from a thread of this process.

    Args:
        metrics: metrics to serve.
        port: to listen on; 0: any free port.
        address: to listen on. The default is reachable only from this host.

    Attributes:
        port: the port in use.

    Raises `MissingExtraError` without the extra "prometheus", `InputError` if address and port cannot be bound.

    Example:
        ```python
        # needs prometheus_client
        with sf.PrometheusServer(sf.Metrics(train=loader), port=0) as server:
            print(f"http://127.0.0.1:{server.port}/metrics")
        ```
    """

    def __init__(self, metrics: Metrics, port: int = 9400, address: str = "127.0.0.1") -> None:
        client = _client()
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(PrometheusCollector(metrics))
        try:
            self._server, self._thread = client.start_http_server(port, addr=address, registry=registry)
        except (OSError, OverflowError, TypeError) as error:
            raise port_unavailable(f"nothing can listen on {address}:{port}: {error}. Give others") from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise missing_extra("prometheus_client", "prometheus", "metrics for Prometheus") from error
    return prometheus_client
