"""Whether a level's numbers may be believed, and the level's whole summary. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest.counters import CrossCheck
from loadtest.metrics import Measured, Window
from loadtest.shard import Pulse

BUSY_LIMIT = 0.9
"""CPU share of one client process above which it may have been the limit."""

LAG_LIMIT_S = 0.025
"""95th percentile of the event loop's lateness above which arrival times are the client's, not the server's."""

SHORT_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How busy the client was inside the window: the worst shard's values."""

    shards: int
    busy: float  # CPU seconds a second of one process; 1.0 is a whole core
    lag_p95_s: float
    lag_max_s: float


@dataclass(frozen=True, slots=True)
class LevelSummary:
    """One line of summary.json. `valid` is false when any of `reasons` stands; `notes` do not make it invalid."""

    index: int
    repeat: int
    concurrency: int
    rate: float
    started_at: float  # Unix time
    measured: Measured
    client: ClientLoad | None = None
    crosscheck: CrossCheck | None = None
    source: str = "glm5 load"
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def valid(self) -> bool:
        return not self.reasons

    @property
    def load(self) -> float:
        """What the level was at: streams, or requests/s in an open loop."""
        return self.rate or self.concurrency


def client_load(pulses: Sequence[Pulse], window: Window | None) -> ClientLoad | None:
    """None without a window or without samples in it."""
    if window is None:
        return None
    busy: list[float] = []
    lags: list[np.ndarray] = []
    for pulse in pulses:
        times = np.frombuffer(pulse.times, dtype=float) if pulse.times else np.empty(0)
        inside = np.flatnonzero((times >= window.start) & (times <= window.end))
        if inside.size >= 2:
            first, last = inside[0], inside[-1]
            busy.append(float((pulse.cpu[last] - pulse.cpu[first]) / (times[last] - times[first])))
            lags.append(np.frombuffer(pulse.lag, dtype=float)[inside])
        elif times.size and window.seconds > 0.5:
            # A loop that could not even take two samples in half a second is as busy as can be.
            busy.append(1.0)
            lags.append(np.array([window.seconds]))
    if not busy:
        return None
    return ClientLoad(
        shards=len(pulses),
        busy=max(busy),
        lag_p95_s=max(float(np.percentile(lag, 95)) for lag in lags),
        lag_max_s=max(float(lag.max()) for lag in lags),
    )


def judge(
    measured: Measured,
    client: ClientLoad | None,
    check: CrossCheck | None,
    *,
    gave_up: str = "",
    open_loop: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(reasons against the level, notes beside it), in words for the report."""
    reasons: list[str] = []
    notes: list[str] = []
    if gave_up:
        reasons.append(f"given up: {gave_up}")
    if measured.ok == 0:
        reasons.append("no request succeeded")
    elif measured.window_s is None:
        reasons.append("no steady window: some stream had no measured request; send more requests or run longer")
    elif measured.window_s < SHORT_WINDOW_S:
        notes.append(f"short window: {measured.window_s:.2f} s; rates are coarse")
    if measured.cancelled:
        reasons.append(f"interrupted: {measured.cancelled} requests cut off")
    if client is not None and client.busy >= BUSY_LIMIT:
        reasons.append(f"client saturated: a client process used {client.busy:.0%} of its core")
    if client is not None and client.lag_p95_s >= LAG_LIMIT_S:
        reasons.append(f"client late: its event loop ran {client.lag_p95_s * 1e3:.0f} ms behind (p95)")
    if check is not None and check.status == "disagree":
        reasons.append(
            f"token counts disagree: client {check.client_tokens}, server {check.server_tokens} "
            f"({check.off_by:+.2%}); {check.detail}"
        )
    if check is not None and check.status == "unavailable":
        notes.append(f"token counts not cross-checked: {check.detail}")
    if measured.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in measured.errors.items())
        notes.append(f"{measured.failed} of {measured.sent} requests failed: {kinds}")
    if measured.short:
        notes.append(f"{measured.short} answers ended before the tokens asked for")
    if measured.cached_tokens and measured.input_tokens and measured.cached_tokens > 0.5 * measured.input_tokens:
        notes.append(f"prompts came mostly from the server's cache ({measured.cached_tokens:.0f} tokens a request)")
    if open_loop and measured.e2el and measured.ttft and measured.ttft.p95 > 0.5 * (measured.window_s or 1e9):
        notes.append("waiting grew through the whole run: the offered rate is above what the server can do")
    return tuple(reasons), tuple(notes)
