"""From records to numbers. The one place where the metrics are defined; docs/load-testing.md repeats it.

Only whole, successful, measured requests enter a latency. Times run from `scheduled` (closed loop: the moment of
sending; open loop: the moment at which it should have been sent, so a stalled client or server cannot hide waiting).

TTFT    arrival of the first chunk with text (answer, reasoning or tool call; a chunk that only names the role is none).
TTFA    time to first *answer* token: the same for the first text that is not reasoning.
E2EL    arrival of the last chunk with text. The usage chunk and [DONE] behind it are not the user's wait.
TPOT    (E2EL - TTFT) / (output tokens - 1), one value a request; none for answers of one token.
ICL     gaps between neighbouring chunks, pooled over all requests: the rhythm that a user sees.
ITL     the same gaps a token: a chunk of k tokens after a gap d counts as k gaps of d/k. Equals ICL where a chunk is
        a token.
tokens  always the server's `usage.completion_tokens`; a chunk is never taken for a token. Within a request they are
        laid on its chunks (exactly where the server sends running counts, else by characters) to know when they came.
window  closed loop: from the moment when every lane has sent its first measured request to the end of the first lane
        that has no further one. Open loop: from the first measured arrival to the last. The rates below are over it.
output tok/s    tokens that arrived inside the window / its length. Failed requests' tokens are not counted.
peak tok/s      the best of n equal parts of the window (n = whole seconds in it): never below the mean.
request/s       every successful request counts by the share of its life inside the window / its length.
per-user tok/s  1 / TPOT, one value a request: the speed at which an answer runs, once it runs.
goodput         requests that met every limit of the SLO: `share` of all that were sent (failed ones did not), and a
                second like request/s.

Where others differ (read in their sources, November 2026):
vllm bench serve 0.29  rates over the whole run, with ramp and drain; ITL is ICL; its peak counts chunks, so with
        speculative decoding it can lie below its mean; TTFT of a chat is the first chunk, even one without text; an
        error event in a chat's 200 stream passes as a success with TTFT 0; E2EL of a chat ends at the usage chunk.
guidellm  TPOT = E2EL / output tokens, so it holds the first token's wait; its ITL is our TPOT.
aiperf  ITL = (E2EL - TTFT) / (output tokens - 1), our TPOT; its ICL is ours; per-user tok/s = 1 / that ITL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest.records import CANCELLED, Record

SLO_METRICS = ("ttft", "ttfa", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary of a population. Seconds for latencies, tok/s for speeds. Percentiles interpolate linearly."""

    n: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Window:
    """Where rates are measured; seconds of perf_counter."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Goodput:
    slo: dict[str, float]  # seconds
    share: float
    request_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers of one level. None: nothing to measure it from."""

    sent: int
    ok: int
    failed: int
    cancelled: int
    errors: dict[str, int] = field(default_factory=dict)
    short: int = 0  # fewer tokens than asked for
    window_s: float | None = None
    output_tok_s: float | None = None
    peak_tok_s: float | None = None
    request_s: float | None = None
    input_tokens: float | None = None  # means a request
    cached_tokens: float | None = None
    output_tokens: float | None = None
    ttft: Spread | None = None
    ttfa: Spread | None = None
    itl: Spread | None = None
    icl: Spread | None = None
    tpot: Spread | None = None
    e2el: Spread | None = None
    per_user_tok_s: Spread | None = None
    goodput: Goodput | None = None


def spread_of(values: Sequence[float] | np.ndarray) -> Spread | None:
    array = np.asarray(values, dtype=float)
    if not array.size:
        return None
    p50, p90, p95, p99 = (float(p) for p in np.percentile(array, (50, 90, 95, 99)))
    return Spread(array.size, float(array.mean()), float(array.min()), p50, p90, p95, p99, float(array.max()))


def window_of(records: Sequence[Record], concurrency: int, open_loop: bool) -> Window | None:
    """See the module's text. None when some lane measured nothing or the window is empty."""
    measured = [record for record in records if not record.warmup]
    if not measured:
        return None
    if open_loop:
        window = Window(min(r.scheduled for r in measured), max(r.scheduled for r in measured))
    else:
        lanes: dict[int, tuple[float, float]] = {}
        for record in measured:
            first, last = lanes.get(record.lane, (record.sent, record.end))
            lanes[record.lane] = (min(first, record.sent), max(last, record.end))
        if len(lanes) < concurrency:
            return None
        window = Window(max(first for first, _ in lanes.values()), min(last for _, last in lanes.values()))
    return window if window.seconds > 0 else None


def error_key(record: Record) -> str:
    return f"http_{record.status}" if record.error == "http" else record.error


def measure(records: Sequence[Record], window: Window | None, slo: dict[str, float] | None = None) -> Measured:
    """Numbers of one level from its records. `slo`: limits in seconds by metric name."""
    measured = [record for record in records if not record.warmup]
    good = [record for record in measured if record.ok]
    cancelled = sum(record.error == CANCELLED for record in measured)
    errors: dict[str, int] = {}
    for record in measured:
        if record.error and record.error != CANCELLED:
            errors[error_key(record)] = errors.get(error_key(record), 0) + 1
    gaps, per_token = _gaps(good)
    tpots = [tpot for record in good if (tpot := record.tpot) is not None]
    output_tok_s = peak = request_s = None
    if window is not None:
        output_tok_s, peak = _rates(good, window)
        request_s = sum(_inside(record, window) for record in good) / window.seconds
    return Measured(
        sent=len(measured),
        ok=len(good),
        failed=len(measured) - len(good) - cancelled,
        cancelled=cancelled,
        errors=dict(sorted(errors.items())),
        short=sum(0 < record.output_tokens < record.asked_tokens for record in good),
        window_s=window.seconds if window else None,
        output_tok_s=output_tok_s,
        peak_tok_s=peak,
        request_s=request_s,
        input_tokens=_mean([record.prompt_tokens for record in good]),
        cached_tokens=_mean([record.cached_tokens for record in good]),
        output_tokens=_mean([record.output_tokens for record in good]),
        ttft=spread_of([record.ttft for record in good]),
        ttfa=spread_of([record.first_answer - record.scheduled for record in good if record.first_answer]),
        itl=spread_of(per_token),
        icl=spread_of(gaps),
        tpot=spread_of(tpots),
        e2el=spread_of([record.e2el for record in good]),
        per_user_tok_s=spread_of([1 / tpot for tpot in tpots if tpot > 0]),
        goodput=_goodput(measured, window, slo) if slo else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _gaps(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """(ICL, ITL) pooled."""
    gaps: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for record in records:
        gaps.append(np.diff(np.frombuffer(record.times, dtype=float)))
        tokens = np.frombuffer(record.tokens, dtype=float)
        # Whole tokens at each chunk's end; the differences are whole numbers that add up.
        counts.append(np.diff(np.rint(np.cumsum(tokens)).astype(int)))
    if not gaps:
        return np.empty(0), np.empty(0)
    gap, count = np.concatenate(gaps), np.concatenate(counts)
    some = count > 0
    return gap, np.repeat(gap[some] / count[some], count[some])


def _rates(records: Sequence[Record], window: Window) -> tuple[float, float]:
    """(mean, peak) output tok/s inside the window."""
    if not records:
        return 0.0, 0.0
    times = np.concatenate([np.frombuffer(record.times, dtype=float) for record in records])
    tokens = np.concatenate([np.frombuffer(record.tokens, dtype=float) for record in records])
    inside = (times >= window.start) & (times <= window.end)
    parts = max(int(window.seconds), 1)
    sums, _ = np.histogram(times[inside], bins=parts, range=(window.start, window.end), weights=tokens[inside])
    return float(sums.sum()) / window.seconds, float(sums.max()) * parts / window.seconds


def _inside(record: Record, window: Window) -> float:
    """Share of a request's life within the window."""
    life = record.end - record.scheduled
    overlap = min(record.end, window.end) - max(record.scheduled, window.start)
    return min(max(overlap / life, 0.0), 1.0) if life > 0 else float(overlap >= 0)


def meets(record: Record, slo: dict[str, float]) -> bool:
    if not record.ok:
        return False
    value = {
        "ttft": record.ttft,
        "ttfa": record.first_answer - record.scheduled if record.first_answer else float("inf"),
        "tpot": record.tpot or 0.0,
        "e2el": record.e2el,
    }
    return all(value[name] <= limit for name, limit in slo.items())


def _goodput(measured: Sequence[Record], window: Window | None, slo: dict[str, float]) -> Goodput:
    judged = [record for record in measured if record.error != CANCELLED]
    good = [record for record in judged if meets(record, slo)]
    share = len(good) / len(judged) if judged else 0.0
    rate = sum(_inside(record, window) for record in good) / window.seconds if window else 0.0
    return Goodput(slo, share, rate)
