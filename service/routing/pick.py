"""Which pool and tier a request gets. A pure function of the request and a snapshot of the pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from service.errors import Forbidden, NotReady
from service.types import TIERS, PoolName, Tier

Reason = Literal["only_pool", "mode", "tier", "auto_idle", "auto_busy", "spill", "pool_down"]
REASONS: tuple[Reason, ...] = ("only_pool", "mode", "tier", "auto_idle", "auto_busy", "spill", "pool_down")


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at this moment. `wait_s`: what a newcomer of each tier would wait, seconds (0: a slot is free)."""

    ready: bool
    wait_s: Mapping[Tier, float]
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What the request asks for. `ceiling`: the best tier that its key may have."""

    tier: Literal["auto", "priority", "default", "flex"] | None
    mode: Literal["latency", "throughput"] | None
    ceiling: Tier = "priority"


@dataclass(frozen=True, slots=True)
class Choice:
    pool: PoolName
    tier: Tier
    reason: Reason


@dataclass(frozen=True, slots=True)
class Spill:
    to_throughput: bool = True
    to_latency: bool = False


def home(wish: Wish) -> PoolName:
    """The pool that a wish would be served by if both were idle; `shared` aside."""
    if wish.mode is not None:
        return wish.mode
    if wish.tier in (None, "auto"):
        return "latency" if wish.ceiling == "priority" else "throughput"
    return "latency" if wish.tier == "priority" else "throughput"


def pick(wish: Wish, pools: Mapping[PoolName, PoolView], spill: Spill) -> Choice:
    """Raises Forbidden where an explicit tier is above the ceiling, NotReady where no pool can serve."""
    ready = {name: view for name, view in pools.items() if view.ready}
    if not ready:
        etas = [view.eta_s for view in pools.values() if view.eta_s is not None]
        after = max(1.0, min(etas)) if etas else 5.0
        raise NotReady(f"no replica can serve yet; try again in {after:.0f} s", retry_after_s=after)
    tier, reason = _tier(wish, ready)
    if "shared" in ready:
        return Choice("shared", tier, "only_pool" if reason == "tier" else reason)
    if wish.mode is not None:
        wanted: PoolName = wish.mode
        reason = "mode"
    else:
        wanted = "latency" if tier == "priority" else "throughput"
    other: PoolName = "throughput" if wanted == "latency" else "latency"
    if wanted not in ready:
        return Choice(other, tier, "pool_down")
    allowed = spill.to_throughput if other == "throughput" else spill.to_latency
    if allowed and wish.mode is None and other in ready:
        here, there = ready[wanted].wait_s[tier], ready[other].wait_s[tier]
        # An explicit tier moves only where it is served at once; `auto` wherever it is promised to be served first.
        if there < here and (there == 0 or reason == "auto_busy"):
            return Choice(other, tier, "spill")
    return Choice(wanted, tier, reason)


def _tier(wish: Wish, ready: Mapping[PoolName, PoolView]) -> tuple[Tier, Reason]:
    """An explicit tier is kept or refused; `auto` takes the best that is free now, never above the ceiling. Who asks
    for throughput without a tier asks for no priority."""
    if wish.tier is not None and wish.tier != "auto":
        if TIERS.index(wish.tier) < TIERS.index(wish.ceiling):
            raise Forbidden(
                f"this key may ask for service_tier {wish.ceiling!r} at most, not {wish.tier!r}", param="service_tier"
            )
        return wish.tier, "tier"
    fast = ready.get("latency") or ready.get("shared")
    asks = wish.ceiling == "priority" and wish.mode != "throughput"
    if asks and fast is not None and fast.wait_s["priority"] == 0:
        return "priority", "auto_idle"
    return max("default", wish.ceiling, key=TIERS.index), "auto_busy"
