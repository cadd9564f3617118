"""What the rest of the service calls: one recorder for a replica, one for an ingress, one for control.

Recorders bind their labels once, so that a token costs two additions. Each is used from one thread (its event loop).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Protocol

from prometheus_client import Counter

from service.errors import ServiceError
from service.metrics import labels
from service.metrics.concurrency import Ledger
from service.metrics.declared import Metrics
from service.types import TIERS, Delta, Endpoint, EngineStats, PoolName, Tier

Clock = Callable[[], float]


class Place(Protocol):
    """Where a request is served, and after how many seconds of waiting: `service.http.backend.Served`."""

    @property
    def pool(self) -> PoolName: ...

    @property
    def tier(self) -> Tier: ...

    @property
    def queue_s(self) -> float: ...


class ReplicaRecorder:
    """The books of one engine replica. `slots`: requests it decodes at once."""

    def __init__(self, metrics: Metrics, pool: PoolName, slots: int, clock: Clock = time.monotonic) -> None:
        self._metrics, self._pool, self._clock = metrics, pool, clock
        self._tiers = {tier: _TierCounters(metrics, pool, tier) for tier in TIERS}
        self._ledger = Ledger(
            [metrics.tokens_by_concurrency.labels(pool, bucket) for bucket in labels.CONCURRENCY],
            [metrics.busy_by_concurrency.labels(pool, bucket) for bucket in labels.CONCURRENCY],
            clock,
        )
        self._drafted, self._accepted = metrics.drafted_tokens.labels(pool), metrics.accepted_tokens.labels(pool)
        self._step = metrics.decode_step.labels(pool)
        self._slots = slots
        self._last = EngineStats(slots=slots)
        self._booked = (0.0, 0.0, 0)
        """Request-seconds, busy seconds and tokens at the last `engine` call."""
        self._tokens = 0
        metrics.replica_starts.labels(pool).inc()
        metrics.before_collect(self._settle)

    def request(self, tier: Tier) -> RequestMeter:
        """Around one generation."""
        return RequestMeter(self, self._ledger, self._tiers[tier])

    def load_phase(self, phase: str, seconds: float) -> None:
        """`phase` in the engine's words; labels.phase_label finds its place."""
        self._metrics.load_phase.labels(self._pool, labels.phase_label(phase)).observe(seconds)

    def predicted_step(self, seconds: float) -> None:
        """What the plan says a decode step takes with the requests that run now."""
        self._metrics.decode_step_predicted.labels(self._pool).set(seconds)

    def predicted_curve(self, tokens_per_s: Mapping[int, float]) -> None:
        """What the plan says of whole batches: tok/s by requests at once, one number of them for each bucket."""
        for requests, rate in tokens_per_s.items():
            bucket = labels.CONCURRENCY[labels.concurrency_index(requests)]
            self._metrics.predicted_tokens.labels(self._pool, bucket).set(rate)

    def engine(self, stats: EngineStats) -> None:
        """The engine's own books, read at least every second. `stats.extra["kernel_fallback"]`: 1 for slow kernels."""
        metrics, pool, last = self._metrics, self._pool, self._last
        metrics.slots.labels(pool).set(stats.slots if stats.alive else 0)
        metrics.replicas_ready.labels(pool).set(1 if stats.alive else 0)
        metrics.running.labels(pool).set(stats.running)
        metrics.waiting.labels(pool).set(stats.waiting)
        metrics.kernel_fallback.labels(pool).set(stats.extra.get("kernel_fallback", 0.0))
        if stats.kv_used is not None:
            metrics.kv_used.labels(pool).set(stats.kv_used)
        self._drafted.inc(_grown(last.drafted, stats.drafted))
        self._accepted.inc(_grown(last.accepted, stats.accepted))
        step, times = self._measured_step(last, stats)
        for _ in range(times):
            self._step.observe(step)
        self._last = stats

    def _measured_step(self, last: EngineStats, stats: EngineStats) -> tuple[float, int]:
        """(mean seconds of a step, steps) since the last call.

        From the engine's steps and busy time where it counts steps. Else, without drafts, a step gives every decoding
        request one token: request-seconds per token is the step, and busy time over it their number.
        """
        self._ledger.settle()
        then, now = self._booked, (self._ledger.request_seconds, self._ledger.busy_seconds, self._tokens)
        self._booked = now
        if stats.steps:
            if stats.steps <= last.steps or stats.busy_s <= last.busy_s:
                return 0.0, 0
            steps = stats.steps - last.steps
            return (stats.busy_s - last.busy_s) / steps, steps
        tokens, seconds = now[2] - then[2], now[0] - then[0]
        if stats.drafted or tokens <= 0 or seconds <= 0:
            return 0.0, 0
        step = seconds / tokens
        return step, round((now[1] - then[1]) / step)

    def _settle(self) -> None:
        self._ledger.settle()
        self._metrics.decoding.labels(self._pool).set(self._ledger.decoding)


class _TierCounters:
    """The bound counters of one (pool, tier)."""

    __slots__ = ("cached", "output", "prompt")

    def __init__(self, metrics: Metrics, pool: str, tier: str) -> None:
        self.output: Counter = metrics.output_tokens.labels(pool, tier)
        self.prompt: Counter = metrics.prompt_tokens.labels(pool, tier)
        self.cached: Counter = metrics.cached_tokens.labels(pool, tier)


class RequestMeter:
    """One generation in a replica, from entry to exit. Made by ReplicaRecorder.request.

    The first tokens of an answer end its prefill and begin its decoding: they are booked with the second ones, over the
    time between the two.
    """

    __slots__ = ("_counters", "_decoding", "_epoch", "_ledger", "_pending", "_recorder", "_since")

    def __init__(self, recorder: ReplicaRecorder, ledger: Ledger, counters: _TierCounters) -> None:
        self._recorder, self._ledger, self._counters = recorder, ledger, counters
        self._decoding = False
        self._pending = self._epoch = 0
        self._since = 0.0

    def __enter__(self) -> RequestMeter:
        return self

    def chunk(self, delta: Delta) -> None:
        tokens = delta.output_tokens
        if tokens:
            self._counters.output.inc(tokens)
            self._recorder._tokens += tokens
            if self._decoding:
                self._book(tokens)
            else:
                self._join()
                self._pending = tokens
        if delta.prompt_tokens:
            self._counters.prompt.inc(delta.prompt_tokens)
        if delta.cached_tokens:
            self._counters.cached.inc(delta.cached_tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._decoding:
            if self._pending:
                self._book(0)
            self._decoding = False
            self._ledger.leave()

    def _join(self) -> None:
        ledger = self._ledger
        self._decoding = True
        ledger.join()
        self._epoch, self._since = ledger.epoch, ledger.clock()

    def _book(self, tokens: int) -> None:
        ledger = self._ledger
        now = ledger.clock()
        if self._epoch == ledger.epoch:
            ledger.current.inc(tokens + self._pending)
        else:
            ledger.spread(tokens + self._pending, self._epoch, self._since, now)
            self._epoch = ledger.epoch
        self._since = now
        self._pending = 0


class IngressRecorder:
    """The books of one ingress replica."""

    def __init__(self, metrics: Metrics, clock: Clock = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        for reason in labels.USUAL_REJECTIONS:
            metrics.rejections.labels(reason)

    def request(self, endpoint: Endpoint, stream: bool = True, timeout_s: float = math.inf) -> IngressMeter:
        """Around one request, from its arrival. Enter it before admission: TTFT and E2EL count from there.

        A ServiceError that leaves it before `served` is a rejection, and is counted as one. A cancel after `timeout_s`
        is our deadline, not a client that left.
        """
        return IngressMeter(self, self._metrics, endpoint, stream, self._clock, timeout_s)

    def rejected(self, reason: str) -> None:
        """For a request that is refused outside a `request` block. `reason`: an error's code."""
        self._metrics.rejections.labels(labels.one_of(reason, labels.REJECTIONS)).inc()

    def routed(self, pool: PoolName, reason: str) -> None:
        self._metrics.routed.labels(pool, labels.one_of(reason, labels.ROUTING_REASONS)).inc()

    def queued(self, pool: PoolName, requests: int) -> None:
        """Requests that wait in this process's queue for `pool`."""
        self._metrics.queued.labels(pool).set(requests)


class IngressMeter:
    """One request as its client meets it. Made by IngressRecorder.request."""

    __slots__ = (
        *("_arrived", "_clock", "_endpoint", "_itl", "_last", "_metrics", "_recorder", "_served", "_stream"),
        "_timeout_s",
    )

    def __init__(
        self,
        recorder: IngressRecorder,
        metrics: Metrics,
        endpoint: str,
        stream: bool,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._recorder, self._metrics, self._endpoint, self._stream = recorder, metrics, endpoint, stream
        self._clock, self._timeout_s = clock, timeout_s
        self._served: Place | None = None
        self._last: float | None = None
        """When the last token came."""

    def __enter__(self) -> IngressMeter:
        self._arrived = self._clock()
        self._metrics.in_flight.labels(self._endpoint).inc()
        return self

    def served(self, served: Place) -> None:
        """The place that the request got; the last call before the first token counts."""
        self._served = served

    def chunk(self, delta: Delta) -> None:
        """k tokens after a gap of g seconds count as k gaps of g/k. The first ends TTFT; others with it have no gap."""
        tokens = delta.output_tokens
        if not tokens or not self._stream:
            return
        now = self._clock()
        if self._last is None:
            place = self._place()
            self._metrics.ttft.labels(*place).observe(now - self._arrived)
            self._itl = self._metrics.itl.labels(*place)
        else:
            gap = (now - self._last) / tokens
            for _ in range(tokens):
                self._itl.observe(gap)
        self._last = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        metrics, place, outcome = self._metrics, self._place(), outcome_of(error)
        took = self._clock() - self._arrived
        if outcome == "client_gone" and took >= self._timeout_s:
            outcome = "deadline_exceeded"
        if self._served is None and isinstance(error, ServiceError):
            self._recorder.rejected(error.code)
        metrics.in_flight.labels(self._endpoint).dec()
        metrics.requests.labels(self._endpoint, *place, outcome).inc()
        if self._served is not None:
            metrics.queue.labels(*place).observe(self._served.queue_s)
        if outcome == "ok":
            metrics.e2el.labels(*place).observe(took)

    def _place(self) -> tuple[str, str]:
        served = self._served
        return (served.pool, served.tier) if served is not None else (labels.NONE, labels.NONE)


class ControlRecorder:
    """Decisions on the fleet, with their reasons. Lives in whichever process decides."""

    def __init__(self, metrics: Metrics, pools: Iterable[PoolName] = ()) -> None:
        """The pools' series begin at zero, so that a first decision shows as an increase."""
        self._metrics = metrics
        for pool in pools:
            for direction in labels.DIRECTIONS:
                metrics.scaling.labels(pool, direction, "steady" if direction == "hold" else "wait")

    def scaling(self, pool: PoolName, direction: labels.Direction, reason: str) -> None:
        self._metrics.scaling.labels(pool, direction, labels.one_of(reason, labels.SCALING_REASONS)).inc()

    def replicas(self, pool: PoolName, target: int, maximum: int) -> None:
        self._metrics.replicas_target.labels(pool).set(target)
        self._metrics.replicas_max.labels(pool).set(maximum)

    def conversion(self, mode: labels.Mode, done: bool, reason: str) -> None:
        """`mode`: what the replica would become; `done`: whether it is converted or stays."""
        known = labels.one_of(reason, labels.CONVERSION_REASONS)
        self._metrics.conversions.labels(mode, "true" if done else "false", known).inc()


def outcome_of(error: BaseException | None) -> str:
    """Which of labels.OUTCOMES the exception that left a request's block means."""
    if error is None:
        return "ok"
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "client_gone"
    if isinstance(error, ServiceError):
        return labels.one_of(error.code, labels.OUTCOMES, "error")
    return "error"


def _grown(before: int, now: int) -> int:
    """Growth of a counter since load; a smaller value is a fresh load."""
    return now - before if now >= before else now
