"""How fast a pool really serves, and what can be promised from it. Pure: clocks are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING_S = 20.0
"""Time constant of the moving average: long against one answer, short against a change of load."""
LEAST_WEIGHT = 0.1
"""A burst of ends in one instant still counts: each moves the average by a tenth at least."""
FIRST_GUESS_S = 1.0
"""How long a slot is held, before anything has ended."""
MOST_RETRY_S = 600.0


@dataclass
class ServiceRate:
    """Moving average of how long one slot is held, seconds."""

    held_s: float = 0.0
    _last: float = 0.0

    def finished(self, held_s: float, now: float) -> None:
        if self.held_s == 0.0:
            self.held_s = held_s
        else:
            weight = 1.0 - 2.0 ** -(max(now - self._last, 0.0) / SMOOTHING_S)
            self.held_s += max(weight, LEAST_WEIGHT) * (held_s - self.held_s)
        self._last = now

    def wait_s(self, ahead: int, slots: int, ages: Sequence[float]) -> float:
        """Seconds until a newcomer with `ahead` others before it gets one of `slots`.

        `ages`: how long each running request has held its slot. Each is expected to end at the average, and one that
        is past it at any moment; whoever takes its slot then holds it for the average. So the slots' ends repeat with
        that period, and the newcomer gets the (ahead + 1)th of them. Exact where all requests are alike.
        """
        if slots <= 0:
            return MOST_RETRY_S
        held = self.held_s or max([FIRST_GUESS_S, *ages])
        free = max(0, slots - len(ages))
        if ahead < free:
            return 0.0
        # A shrunken pool has more requests than slots: the surplus must leave before anybody enters.
        surplus = max(0, len(ages) - slots)
        ends = sorted([0.0] * free + [max(0.0, held - age) for age in ages])
        rounds, at = divmod(ahead + surplus, len(ends))
        return ends[at] + rounds * held

    def retry_after_s(self, ahead: int, slots: int, ages: Sequence[float]) -> float:
        """When a refused caller should come back: when it would have got its slot behind those `ahead`. 1 s or more."""
        return min(MOST_RETRY_S, max(1.0, self.wait_s(ahead, slots, ages)))
