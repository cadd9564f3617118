"""Our metrics for Ray's per-node agent, beside our own /metrics: for clusters whose Prometheus scrapes Ray already.

Ray's metrics cost 3.5 µs an update, so differences are handed over every few seconds and never per token.
"""

from __future__ import annotations

import time
from typing import Any

from ray.util.metrics import Counter, Gauge

from service.metrics.exchange import updates

FLUSH_S = 5.0


class RaySink:
    """Takes a process's snapshots and tells Ray what changed, at most every `FLUSH_S`."""

    def __init__(self) -> None:
        self._last = b""
        self._flushed = 0.0
        self._made: dict[str, Any] = {}

    def offer(self, snapshot: bytes) -> None:
        now = time.monotonic()
        if now - self._flushed < FLUSH_S or snapshot == self._last:
            return
        self._flushed = now
        for update in updates(self._last, snapshot):
            metric: Any = self._made.get(update.name)
            if metric is None:
                kind: Any = Counter if update.kind == "counter" else Gauge
                metric = self._made[update.name] = kind(update.name, tag_keys=tuple(name for name, _ in update.labels))
            tell = metric.inc if update.kind == "counter" else metric.set
            tell(update.value, tags=dict(update.labels))
        self._last = snapshot
