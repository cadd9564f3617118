"""Reads Prometheus text as a map, for the tests of metrics."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes | str) -> Samples:
    text = text.decode() if isinstance(text, bytes) else text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read(metrics: Metrics) -> Samples:
    return samples(merge([snapshot(metrics)]))


def value(found: Samples, name: str, **labels: str) -> float:
    """The one sample with exactly these labels; 0.0 where there is none."""
    return found.get((name, frozenset(labels.items())), 0.0)


def total(found: Samples, name: str, **labels: str) -> float:
    """Sum over the samples that carry at least these labels."""
    want = set(labels.items())
    return sum(v for (sample, pairs), v in found.items() if sample == name and want <= pairs)


def by(found: Samples, name: str, label: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for (sample, pairs), v in found.items():
        if sample == name and v:
            key = dict(pairs)[label]
            out[key] = out.get(key, 0.0) + v
    return out


@dataclass
class Clock:
    """Time that a test moves, seconds."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds
