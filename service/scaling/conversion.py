"""Whether a `shared` replica should reload in the other mode. Pure.

A replica on one box can be started for latency or for throughput (docs/modes.md), not for both. What the demand seen
would have got in either mode follows from the step-time model; the price of changing is the measured reload, in which
nothing is served. Demand is expected to last as long again as it has lasted already: that is all we know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["latency", "throughput"]
OTHER: dict[Mode, Mode] = {"latency": "throughput", "throughput": "latency"}
Rate = Callable[[Mode, int], float]
"""Output tokens per second of a mode with so many requests at once (StepModel.tokens_per_s of its settings)."""
Why = Literal["gain_pays", "gain_too_small", "reload_too_dear", "cooldown", "no_demand", "busy"]

LEAST_GAIN = 1.15
"""The model's own error band is near 15 % (docs/planning.md): a smaller gain may be none."""
LEAST_RETURN = 2.0
"""What a conversion must be expected to bring, in units of what it costs."""
COOLDOWN_RELOADS = 10.0
"""Reload times that a mode is kept: at most a tenth of all time is spent reloading."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Demand since it last changed its kind: `seconds` with so many `requests` wanted at once (running and waiting)."""

    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`convert`: whether to reload as `mode`. `gain_tokens` expected from it, `cost_tokens` lost by it."""

    convert: bool
    mode: Mode
    why: Why
    gain_tokens: float = 0.0
    cost_tokens: float = 0.0

    def __str__(self) -> str:
        what = "would reload" if self.convert else "stays"
        return (
            f"{what} ({self.why}): {self.mode} mode is expected to make {self.gain_tokens:.0f} tokens more, "
            f"a reload costs {self.cost_tokens:.0f}"
        )


def judge(
    mode: Mode, demand: Sequence[Seen], rate: Rate, *, reload_s: float, since_reload_s: float, priority_running: int = 0
) -> Verdict:
    """`mode`: the present one. `reload_s`: measured. `priority_running`: requests that a reload would hold up."""
    other = OTHER[mode]
    lasted = sum(seen.seconds for seen in demand if seen.requests > 0)
    if lasted <= 0:
        return Verdict(False, other, "no_demand")
    here = sum(rate(mode, seen.requests) * seen.seconds for seen in demand if seen.requests > 0) / lasted
    there = sum(rate(other, seen.requests) * seen.seconds for seen in demand if seen.requests > 0) / lasted
    gain = (there - here) * max(0.0, lasted - reload_s)
    cost = here * reload_s

    def verdict(convert: bool, why: Why) -> Verdict:
        return Verdict(convert, other, why, gain, cost)

    if there < LEAST_GAIN * here:
        return verdict(False, "gain_too_small")
    if gain < LEAST_RETURN * cost:
        return verdict(False, "reload_too_dear")
    if since_reload_s < COOLDOWN_RELOADS * reload_s:
        return verdict(False, "cooldown")
    if priority_running:
        return verdict(False, "busy")
    return verdict(True, "gain_pays")


@dataclass
class Memory:
    """The demand seen, newest last; no more than `window_s` of it."""

    window_s: float = 3600.0
    seen: tuple[Seen, ...] = ()

    def add(self, requests: int, seconds: float) -> None:
        """Equal neighbours are one entry."""
        kept = list(self.seen)
        if kept and kept[-1].requests == requests:
            kept[-1] = Seen(requests, kept[-1].seconds + seconds)
        else:
            kept.append(Seen(requests, seconds))
        over = sum(entry.seconds for entry in kept) - self.window_s
        while kept and over > 0:
            drop = min(over, kept[0].seconds)
            over -= drop
            kept[0] = Seen(kept[0].requests, kept[0].seconds - drop)
            if kept[0].seconds <= 0:
                kept.pop(0)
        self.seen = tuple(kept)
