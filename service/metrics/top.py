"""Live figures of a service from its /metrics: what `glm5 top` shows. Two scrapes in, figures out; no clock here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.metrics.labels import CONCURRENCY
from service.terminal import one_line

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """One reading of /metrics at `at` seconds (any monotonic clock). Values of labels hold no control characters."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    @staticmethod
    def parse(text: str, at: float) -> Scrape:
        """Raises ValueError where `text` is not Prometheus text."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[
                    frozenset((name, one_line(value)) for name, value in sample.labels.items())
                ] = sample.value
        return Scrape(at, found)

    def sum(self, name: str, **labels: str) -> float:
        want = frozenset(labels.items())
        return sum(value for carried, value in self.samples.get(name, {}).items() if want <= carried)

    def values(self, name: str, label: str) -> list[str]:
        return sorted({dict(carried)[label] for carried in self.samples.get(name, {}) if label in dict(carried)})


@dataclass(frozen=True)
class CurvePoint:
    """Tok/s of a replica while it decodes so many requests: since the service began, and between the two scrapes.

    `share` of the decoding time between the scrapes; `now` is None where there was none.
    """

    concurrency: str
    recorded: float
    now: float | None
    share: float


@dataclass(frozen=True)
class PoolFigures:
    """`tokens_per_s` between the scrapes; `ttft_p95_s`, `queue_p95_s`: None where nothing was measured between them."""

    pool: str
    ready: int
    slots: int
    running: int
    decoding: int
    waiting: int
    queued: int
    tokens_per_s: float
    ttft_p95_s: float | None
    queue_p95_s: float | None
    kv_used: float | None
    curve: tuple[CurvePoint, ...]

    @property
    def current(self) -> CurvePoint | None:
        """The concurrency at which most of the decoding time went."""
        busy = [point for point in self.curve if point.share > 0]
        return max(busy, key=lambda point: point.share) if busy else None


@dataclass(frozen=True)
class Figures:
    pools: tuple[PoolFigures, ...]
    in_flight: int
    requests_per_s: float
    failed_per_s: float
    refused_per_s: float


def figures(before: Scrape, now: Scrape) -> Figures:
    """What happened between two scrapes of one service, `before` the earlier one."""
    seconds = max(now.at - before.at, 1e-9)

    def rate(name: str, **labels: str) -> float:
        return max(0.0, now.sum(name, **labels) - before.sum(name, **labels)) / seconds

    every = rate("glm_requests_total")
    well = rate("glm_requests_total", outcome="ok") + rate("glm_requests_total", outcome="client_gone")
    refused = rate("glm_rejections_total")
    return Figures(
        pools=tuple(_pool(before, now, pool, seconds) for pool in now.values("glm_replica_starts_total", "pool")),
        in_flight=int(now.sum("glm_requests_in_flight")),
        requests_per_s=every,
        failed_per_s=max(0.0, every - well - refused),
        refused_per_s=refused,
    )


def quantile(q: float, buckets: Mapping[float, float]) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; None without observations.

    `buckets`: upper bound (inf for the last) -> observations up to it. A quantile beyond the last finite bound is it.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank = q * buckets[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if math.isinf(bound):
                return low
            inside = buckets[bound] - below
            return low + (bound - low) * ((rank - below) / inside if inside else 1.0)
        low, below = bound, buckets[bound]
    return low


def _pool(before: Scrape, now: Scrape, pool: str, seconds: float) -> PoolFigures:
    kv = now.samples.get("glm_kv_used_ratio", {}).get(frozenset({("pool", pool)}))
    tokens = now.sum("glm_output_tokens_total", pool=pool) - before.sum("glm_output_tokens_total", pool=pool)
    return PoolFigures(
        pool=pool,
        ready=int(now.sum("glm_replicas_ready", pool=pool)),
        slots=int(now.sum("glm_slots", pool=pool)),
        running=int(now.sum("glm_requests_running", pool=pool)),
        decoding=int(now.sum("glm_requests_decoding", pool=pool)),
        waiting=int(now.sum("glm_requests_waiting", pool=pool)),
        queued=int(now.sum("glm_requests_queued", pool=pool)),
        tokens_per_s=max(0.0, tokens) / seconds,
        ttft_p95_s=_p95(before, now, "glm_ttft_seconds", pool),
        queue_p95_s=_p95(before, now, "glm_queue_seconds", pool),
        kv_used=kv,
        curve=tuple(_curve(before, now, pool)),
    )


def _p95(before: Scrape, now: Scrape, histogram: str, pool: str) -> float | None:
    name = f"{histogram}_bucket"
    return quantile(
        0.95,
        {
            float(le): now.sum(name, pool=pool, le=le) - before.sum(name, pool=pool, le=le)
            for le in now.values(name, "le")
        },
    )


def _curve(before: Scrape, now: Scrape, pool: str) -> Iterable[CurvePoint]:
    tokens, busy = "glm_output_tokens_by_concurrency_total", "glm_busy_seconds_by_concurrency_total"
    grown = {
        c: now.sum(busy, pool=pool, concurrency=c) - before.sum(busy, pool=pool, concurrency=c) for c in CONCURRENCY
    }
    total = sum(grown.values())
    for concurrency in CONCURRENCY:
        all_seconds = now.sum(busy, pool=pool, concurrency=concurrency)
        if all_seconds <= 0:
            continue
        all_tokens = now.sum(tokens, pool=pool, concurrency=concurrency)
        made = all_tokens - before.sum(tokens, pool=pool, concurrency=concurrency)
        spent = grown[concurrency]
        yield CurvePoint(
            concurrency,
            recorded=all_tokens / all_seconds,
            now=made / spent if spent > 0 else None,
            share=spent / total if total > 0 else 0.0,
        )
