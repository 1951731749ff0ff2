"""A sink's counters for Prometheus. Needs `prometheus_client`, imported when first used.

```python
from hsxfer.metrics import SinkCollector

SinkCollector(sink).register()  # with the default registry; sglang's own /metrics is another process's
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .errors import ConfigError, TransportUnavailable
from .sink import Sink

# name in `Sink.stats()`, name for Prometheus, help
COUNTERS = (
    ("num_begun", "hsxfer_samples_begun", "Samples for which room was reserved"),
    ("num_published", "hsxfer_samples_published", "Samples complete and open to consumers"),
    ("num_failed", "hsxfer_samples_failed", "Samples given up: aborted, incomplete, refused"),
    ("num_refused", "hsxfer_samples_refused", "Samples that found no room"),
    ("num_dropped", "hsxfer_samples_dropped", "Samples dropped because the arena was full (on_full=drop)"),
    ("num_consumed", "hsxfer_samples_consumed", "Samples acknowledged by all their consumers"),
    ("num_expired", "hsxfer_samples_expired", "Samples that nobody read in time"),
    ("num_rows", "hsxfer_rows", "Rows copied into the arena"),
    ("num_bytes", "hsxfer_bytes", "Bytes copied into the arena"),
)
GAUGES = (
    ("capacity_bytes", "hsxfer_capacity_bytes", "Payload bytes that the arena holds at most"),
    ("used_bytes", "hsxfer_used_bytes", "Payload bytes of live samples"),
    ("num_unread", "hsxfer_unread_samples", "Samples published and not yet acknowledged"),
    ("readers", "hsxfer_readers", "Whether any consumer is attached"),
    ("sends", "hsxfer_sends", "Whether the policy lets this rank send"),
)


class SinkCollector:
    """Reads the sinks' `stats()` at each scrape, and leaves out those that are closed."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def register(self, registry: Any = None) -> SinkCollector:
        """With `registry`, or prometheus_client's default one. Raises `ConfigError` if that package is not installed."""
        (registry or _prometheus().REGISTRY).register(self)
        return self

    def collect(self) -> Iterator[Any]:
        families = _prometheus().metrics_core
        told = []
        for sink in self._sinks:
            with contextlib.suppress(TransportUnavailable):
                told.append(((sink.store, sink.instance, sink.rank.label), sink.stats()))
        for table, family in ((COUNTERS, families.CounterMetricFamily), (GAUGES, families.GaugeMetricFamily)):
            for key, name, text in table:
                metric = family(name, text, labels=("store", "instance", "rank"))
                for labels, stats in told:
                    metric.add_metric(labels, stats[key])
                yield metric


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise ConfigError("metrics need prometheus_client: pip install prometheus-client") from None
    return prometheus_client
