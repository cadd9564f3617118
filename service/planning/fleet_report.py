"""What a simulated fleet gave its users: outcomes, latencies by tier, use of boxes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from service.planning.fleet import FleetRun, Served
from service.types import TIERS

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class TierReport:
    """Requests of one tier (as served). Seconds by quantile; None where nothing came."""

    tier: str
    requests: int
    refused: int
    ttft_s: dict[float, float] | None
    itl_s: dict[float, float] | None
    waited_s: dict[float, float] | None


@dataclass(frozen=True, slots=True)
class PoolReport:
    pool: str
    requests: int
    output_tokens: int
    tok_s: float
    boxes: float
    """Mean over the run."""
    busy: float
    """Share of the boxes' time in which at least one request was decoded."""


@dataclass(frozen=True)
class FleetReport:
    requests: int
    outcomes: dict[str, int]
    seconds: float
    tok_s: float
    tiers: tuple[TierReport, ...]
    pools: tuple[PoolReport, ...]
    box_hours: float
    changes: int


def quantiles(values: Iterable[float | None]) -> dict[float, float] | None:
    """Nearest-rank quantiles of those that are not None."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    return {q: known[min(len(known) - 1, int(q * len(known)))] for q in QUANTILES}


def report(run: FleetRun) -> FleetReport:
    done = [s for s in run.served if s.outcome == "ok"]
    tokens = sum(s.arrival.output for s in done)
    pools = []
    for name, seconds in run.box_seconds.items():
        mine = [s for s in done if s.pool == name]
        made = sum(s.arrival.output for s in mine)
        busy = run.busy_s[name] / seconds if seconds else 0.0
        boxes = seconds / run.seconds if run.seconds else 0.0
        pools.append(PoolReport(name, len(mine), made, made / run.seconds if run.seconds else 0.0, boxes, busy))
    return FleetReport(
        requests=len(run.served),
        outcomes=dict(Counter(s.outcome for s in run.served)),
        seconds=run.seconds,
        tok_s=tokens / run.seconds if run.seconds else 0.0,
        tiers=tuple(_tier(tier, run.served) for tier in TIERS if any(s.tier == tier for s in run.served)),
        pools=tuple(pools),
        box_hours=sum(run.box_seconds.values()) / 3600,
        changes=len(run.boxes) - len(run.box_seconds),
    )


def _tier(tier: str, served: Sequence[Served]) -> TierReport:
    mine = [s for s in served if s.tier == tier]
    return TierReport(
        tier=tier,
        requests=len(mine),
        refused=sum(s.outcome != "ok" for s in mine),
        ttft_s=quantiles(s.ttft for s in mine),
        itl_s=quantiles(s.itl for s in mine),
        waited_s=quantiles(s.waited for s in mine),
    )


def report_json(found: FleetReport, wall_s: float) -> dict[str, Any]:
    from dataclasses import asdict

    tree = asdict(found)
    for tier in tree["tiers"]:
        for key in ("ttft_s", "itl_s", "waited_s"):
            if tier[key] is not None:
                tier[key] = {f"p{round(q * 100)}": round(v, 5) for q, v in tier[key].items()}
    return tree | {"wall_s": round(wall_s, 3), "requests_per_wall_minute": round(found.requests / wall_s * 60)}
