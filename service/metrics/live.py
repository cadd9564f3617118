"""What the page shows of a service as it runs: readings of its /metrics in, one small frozen tree out. No clock here.

Read once a second beside a service that works, so it parses only the lines that it wants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from service.metrics.labels import CONCURRENCY, NONE
from service.metrics.top import quantile
from service.types import POOLS, TIERS

RATE_S = 5.0
"""Span of rates; replicas report at least every 2 s."""
WINDOW_S = 60.0
"""Span of quantiles, shares and the curve's fresh points."""
READINGS = 120
ERRORS = 20
FAULTS = frozenset({"internal_error", "engine_failed", "deadline_exceeded", "not_ready", "error"})
"""Outcomes that are our fault, as the alert GlmErrorRatio counts them."""
WELL = frozenset({"ok", "client_gone"})

_GAUGES = frozenset(
    f"glm_{name}"
    for name in (
        *("slots", "requests_running", "requests_decoding", "requests_waiting", "requests_queued", "kv_used_ratio"),
        *("requests_in_flight", "decode_step_predicted_seconds", "predicted_tokens_per_second"),
    )
)
_COUNTERS = frozenset(
    f"glm_{name}"
    for name in (
        *("output_tokens_total", "prompt_tokens_total", "prompt_cached_tokens_total", "requests_total"),
        *("output_tokens_by_concurrency_total", "busy_seconds_by_concurrency_total"),
        *("speculative_drafted_tokens_total", "speculative_accepted_tokens_total"),
        *("ttft_seconds_bucket", "queue_seconds_bucket", "decode_step_seconds_sum", "decode_step_seconds_count"),
    )
)
_WANTED = _GAUGES | _COUNTERS

Labels = Mapping[str, str]


@dataclass(frozen=True)
class LiveReading:
    """One look at /metrics. `at`: monotonic seconds. Families that were not in it read as empty."""

    at: float
    families: Mapping[str, Mapping[str, float]]

    @staticmethod
    def of(text: bytes, at: float) -> LiveReading:
        """`text` as `service.metrics.exchange.merge` writes it."""
        families: dict[str, dict[str, float]] = {}
        for line in text.decode().split("\n"):
            name, _, rest = line.partition("{")
            if name in _WANTED:
                labels, _, value = rest.rpartition("} ")
                families.setdefault(name, {})[labels] = float(value)
        return LiveReading(at, families)

    def samples(self, name: str, **want: str) -> Iterator[tuple[Labels, float]]:
        for text, value in self.families.get(name, {}).items():
            labels = _labels(text)
            if all(labels.get(key) == wanted for key, wanted in want.items()):
                yield labels, value

    def sum(self, name: str, **want: str) -> float:
        return sum(value for _, value in self.samples(name, **want))


NOTHING = LiveReading(-math.inf, {})


@dataclass(frozen=True)
class LiveReadiness:
    """Of /ready: see service.http.backend.PoolReadiness."""

    ready_replicas: int
    target_replicas: int
    phase: str
    detail: str
    fraction: float | None
    eta_s: float | None


@dataclass(frozen=True)
class TierSpan:
    """One tier of a pool over a span. Quantiles and shares are null where nothing was measured."""

    tier: str
    requests: int
    output_tokens: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    queue_p95_s: float | None
    cached_share: float | None


@dataclass(frozen=True)
class PoolSpan:
    """What happened in a pool: in the last minute, or since the service began (`seconds` is null).

    `error_ratio`: of requests that ended, those that failed by the service's fault. `acceptance`: of the tokens that
    MTP drafted, those kept. `step_s`: mean time of a decode step.
    """

    seconds: float | None
    requests: int
    error_ratio: float | None
    acceptance: float | None
    step_s: float | None
    tiers: tuple[TierSpan, ...]


@dataclass(frozen=True)
class LivePoint:
    """Tok/s of one replica while it decodes `concurrency` requests (at least `first`, at most `last`; null: no end).

    `recorded` since the service began, over `seconds`; `now` over the last minute; both null where it was not there.
    `predicted`: as planned for `last` requests of 1024 tokens each, null where the profile names no hardware.
    """

    concurrency: str
    first: int
    last: int | None
    recorded: float | None
    seconds: float
    now: float | None
    predicted: float | None


@dataclass(frozen=True)
class LivePool:
    pool: str
    readiness: LiveReadiness
    slots: int
    running: int
    decoding: int
    waiting: int
    queued: int
    kv_used: float | None
    predicted_step_s: float | None
    tokens_per_s: float
    minute: PoolSpan
    total: PoolSpan
    curve: tuple[LivePoint, ...]


@dataclass(frozen=True)
class SeenError:
    """Requests that ended with an error between two readings. `at`: Unix seconds of the second one."""

    at: float
    code: str
    endpoint: str
    pool: str
    count: int


@dataclass(frozen=True)
class LiveFigures:
    """The whole page of figures. `at`: Unix seconds. `errors`: endings by code since the service began."""

    at: float
    ready: bool
    in_flight: int
    pools: tuple[LivePool, ...]
    errors: Mapping[str, int]
    last_errors: tuple[SeenError, ...]


@dataclass
class LiveWatch:
    """Readings of the last minute, and what they say. One writer; bounded by READINGS and ERRORS."""

    _readings: deque[LiveReading] = field(default_factory=lambda: deque(maxlen=READINGS))
    _seen: deque[SeenError] = field(default_factory=lambda: deque(maxlen=ERRORS))

    def look(self, now: LiveReading, wall: float, ready: bool, pools: Mapping[str, LiveReadiness]) -> LiveFigures:
        """The figures at `now`, the latest reading. `wall`: the same moment, Unix seconds."""
        while self._readings and self._readings[0].at < now.at - WINDOW_S:
            self._readings.popleft()
        if self._readings and _began_anew(self._readings[-1], now):
            nothing = LiveReading(self._readings[-1].at, {})
            self._readings.clear()
            self._readings.append(nothing)
        if self._readings:
            self._seen.extendleft(_news(self._readings[-1], now, wall))
        self._readings.append(now)
        oldest = self._readings[0]
        recent = next(
            (reading for reading in reversed(self._readings) if reading.at <= now.at - RATE_S), self._readings[0]
        )
        names = [name for name in (*POOLS, *sorted(set(pools) - set(POOLS))) if name in pools]
        return LiveFigures(
            at=wall,
            ready=ready,
            in_flight=int(now.sum("glm_requests_in_flight")),
            pools=tuple(_pool(name, pools[name], recent, oldest, now) for name in names),
            errors=_codes(now),
            last_errors=tuple(self._seen),
        )


def _pool(name: str, readiness: LiveReadiness, recent: LiveReading, oldest: LiveReading, now: LiveReading) -> LivePool:
    def gauge(metric: str) -> float | None:
        return next((value for _, value in now.samples(metric, pool=name)), None)

    return LivePool(
        pool=name,
        readiness=readiness,
        slots=int(gauge("glm_slots") or 0),
        running=int(gauge("glm_requests_running") or 0),
        decoding=int(gauge("glm_requests_decoding") or 0),
        waiting=int(gauge("glm_requests_waiting") or 0),
        queued=int(gauge("glm_requests_queued") or 0),
        kv_used=gauge("glm_kv_used_ratio"),
        predicted_step_s=gauge("glm_decode_step_predicted_seconds") or None,
        tokens_per_s=_grown(recent, now, "glm_output_tokens_total", pool=name) / max(now.at - recent.at, 1e-9),
        minute=_span(name, oldest, now),
        total=_span(name, NOTHING, now),
        curve=tuple(_curve(name, oldest, now)),
    )


def _grown(before: LiveReading, now: LiveReading, name: str, **want: str) -> float:
    return max(0.0, now.sum(name, **want) - before.sum(name, **want))


def _began_anew(before: LiveReading, now: LiveReading) -> bool:
    """Whether counts were lost in between, as at a restart of the service: then all of `now` is new."""
    return any(
        now.families.get(name, {}).get(labels, 0.0) < value
        for name in ("glm_requests_total", "glm_output_tokens_total")
        for labels, value in before.families.get(name, {}).items()
    )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


def _span(pool: str, before: LiveReading, now: LiveReading) -> PoolSpan:
    def grown(name: str, **want: str) -> float:
        return _grown(before, now, name, pool=pool, **want)

    ended = grown("glm_requests_total")
    failed = sum(grown("glm_requests_total", outcome=outcome) for outcome in FAULTS)
    tiers = {labels["tier"] for labels, _ in now.samples("glm_requests_total", pool=pool)}
    tiers |= {labels["tier"] for labels, _ in now.samples("glm_ttft_seconds_bucket", pool=pool)}
    steps = grown("glm_decode_step_seconds_count")
    return PoolSpan(
        seconds=None if before is NOTHING else now.at - before.at,
        requests=int(ended),
        error_ratio=_share(failed, ended),
        acceptance=_share(
            grown("glm_speculative_accepted_tokens_total"), grown("glm_speculative_drafted_tokens_total")
        ),
        step_s=grown("glm_decode_step_seconds_sum") / steps if steps else None,
        tiers=tuple(_tier(pool, tier, before, now) for tier in TIERS if tier in tiers),
    )


def _tier(pool: str, tier: str, before: LiveReading, now: LiveReading) -> TierSpan:
    def grown(name: str) -> float:
        return _grown(before, now, name, pool=pool, tier=tier)

    def at(q: float, name: str) -> float | None:
        then = {labels["le"]: value for labels, value in before.samples(name, pool=pool, tier=tier)}
        return quantile(
            q,
            {
                float(labels["le"]): max(0.0, value - then.get(labels["le"], 0.0))
                for labels, value in now.samples(name, pool=pool, tier=tier)
            },
        )

    return TierSpan(
        tier=tier,
        requests=int(grown("glm_requests_total")),
        output_tokens=int(grown("glm_output_tokens_total")),
        ttft_p50_s=at(0.5, "glm_ttft_seconds_bucket"),
        ttft_p95_s=at(0.95, "glm_ttft_seconds_bucket"),
        queue_p95_s=at(0.95, "glm_queue_seconds_bucket"),
        cached_share=_share(grown("glm_prompt_cached_tokens_total"), grown("glm_prompt_tokens_total")),
    )


def _curve(pool: str, oldest: LiveReading, now: LiveReading) -> Iterator[LivePoint]:
    tokens, busy = "glm_output_tokens_by_concurrency_total", "glm_busy_seconds_by_concurrency_total"
    for concurrency in CONCURRENCY:
        seconds = now.sum(busy, pool=pool, concurrency=concurrency)
        planned = "glm_predicted_tokens_per_second"
        predicted = next((value for _, value in now.samples(planned, pool=pool, concurrency=concurrency)), None)
        if seconds <= 0 and predicted is None:
            continue
        fresh = _grown(oldest, now, busy, pool=pool, concurrency=concurrency)
        made = _grown(oldest, now, tokens, pool=pool, concurrency=concurrency)
        first, _, last = concurrency.partition("-")
        open_end = concurrency.endswith("+")
        yield LivePoint(
            concurrency,
            first=int(first.rstrip("+")),
            last=None if open_end else int(last or first),
            recorded=now.sum(tokens, pool=pool, concurrency=concurrency) / seconds if seconds > 0 else None,
            seconds=seconds,
            now=made / fresh if fresh > 0 else None,
            predicted=predicted,
        )


def _codes(now: LiveReading) -> dict[str, int]:
    found: dict[str, int] = {}
    for labels, value in now.samples("glm_requests_total"):
        code = labels["outcome"]
        if code not in WELL and value:
            found[code] = found.get(code, 0) + int(value)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _news(before: LiveReading, now: LiveReading, wall: float) -> Iterator[SeenError]:
    then = before.families.get("glm_requests_total", {})
    for text, value in now.families.get("glm_requests_total", {}).items():
        labels, grown = _labels(text), int(value - then.get(text, 0.0))
        if labels["outcome"] not in WELL and grown > 0:
            pool = "" if labels["pool"] == NONE else labels["pool"]
            yield SeenError(wall, labels["outcome"], labels["endpoint"], pool, grown)


@lru_cache(maxsize=4096)
def _labels(text: str) -> Labels:
    """Values are of closed sets without quotes (service.metrics.exchange); the sets bound what is kept here."""
    return dict(pair[:-1].split('="', 1) for pair in text.split(",")) if text else {}
