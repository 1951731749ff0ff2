"""What Prometheus is told of a sink."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hsxfer
from hsxfer.metrics import COUNTERS, GAUGES, SinkCollector

prometheus = pytest.importorskip("prometheus_client")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"shm://metrics?capacity=1MiB&dir={tmp_path}"


@pytest.fixture
def sink(url: str) -> Iterator[hsxfer.Sink]:
    with hsxfer.open_sink(url, instance="server") as sink:
        yield sink


def test_the_figures_are_those_of_stats(sink: hsxfer.Sink) -> None:
    registry = prometheus.CollectorRegistry()
    SinkCollector(sink).register(registry)
    sink.put({"x": np.zeros((4, 8), "uint8")})
    sink.begin("gone", {"x": ((4, 8), "uint8")}).abort("no")
    sink.flush()
    labels = {"store": sink.store, "instance": "server", "rank": "dp0-pp0-tp0"}

    def told(name: str) -> float:
        return registry.get_sample_value(name, labels)

    assert told("hsxfer_samples_published_total") == 1
    assert told("hsxfer_samples_failed_total") == 1
    assert told("hsxfer_bytes_total") == 32
    assert told("hsxfer_used_bytes") == 32
    assert told("hsxfer_capacity_bytes") == 1 << 20
    assert told("hsxfer_unread_samples") == 1
    stats = sink.stats()
    for table, ending in ((COUNTERS, "_total"), (GAUGES, "")):
        for key, name, _ in table:
            assert told(name + ending) == stats[key], name


def test_several_sinks_and_none_that_is_closed(sink: hsxfer.Sink, url: str) -> None:
    registry = prometheus.CollectorRegistry()
    with hsxfer.open_sink(url, instance="other") as other:
        SinkCollector(sink, other).register(registry)
        text = prometheus.generate_latest(registry).decode()
        assert 'instance="server"' in text
        assert 'instance="other"' in text
        assert text.count("# TYPE hsxfer_used_bytes ") == 1
    text = prometheus.generate_latest(registry).decode()
    assert 'instance="server"' in text
    assert 'instance="other"' not in text
