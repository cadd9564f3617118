"""How fast a pool really serves, and what can be promised from it. Pure: clocks are arguments."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING_S = 20.0
"""Time constant of the moving average: long against one answer, short against a change of load."""
LEAST_WEIGHT = 0.1
"""A burst of ends in one instant still counts: each moves the average by a tenth at least."""
FIRST_GUESS_S = 1.0
"""How long a slot is held, before anything has ended."""
MOST_RETRY_S = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """A running request: for how long it has had its slot, and its longest answer."""

    age_s: float
    tokens: int = 0


@dataclass
class ServiceRate:
    """How long a slot is held, by the longest answer that its request asks for: moving averages and the line through
    them. Where answers end of themselves, whatever they asked for, the line is flat."""

    held_s: float = 0.0
    """Average, seconds."""
    _tokens: float = 0.0
    _spread: float = 0.0
    """Average of tokens squared; with the one below, it gives the line's slope."""
    _product: float = 0.0
    _ends: int = 0
    _last: float = 0.0

    def finished(self, held_s: float, now: float, tokens: int = 0) -> None:
        self._ends += 1
        weight = 1.0 - 2.0 ** -(max(now - self._last, 0.0) / SMOOTHING_S)
        weight = max(weight, LEAST_WEIGHT, 1.0 / self._ends)
        self.held_s += weight * (held_s - self.held_s)
        self._tokens += weight * (tokens - self._tokens)
        self._spread += weight * (tokens * tokens - self._spread)
        self._product += weight * (tokens * held_s - self._product)
        self._last = now

    def expected_s(self, tokens: float, default: float = FIRST_GUESS_S) -> float:
        """How long a request for `tokens` holds its slot; `default` before anything has ended."""
        if not self._ends:
            return default
        variance = self._spread - self._tokens**2
        if variance <= 1e-6 * self._spread:
            return self.held_s
        slope = (self._product - self._tokens * self.held_s) / variance
        # No answer takes less than no time, or less for asking for more.
        slope = min(max(0.0, slope), self.held_s / self._tokens)
        return self.held_s + slope * (tokens - self._tokens)

    def wait_s(self, ahead: int, slots: int, running: Sequence[Held], tokens: float = 0.0) -> float:
        """Seconds until a newcomer with `ahead` others before it gets one of `slots`.

        `tokens`: what those ahead ask for on average. Each running request is expected to end when one like it does,
        and one that is past that at any moment; whoever takes its slot then holds it as long as those ahead do on
        average. Exact where all requests are alike.
        """
        if slots <= 0:
            return MOST_RETRY_S
        guess = max([FIRST_GUESS_S, *(one.age_s for one in running)])
        free = max(0, slots - len(running))
        if ahead < free:
            return 0.0
        ends = [0.0] * free + [max(0.0, self.expected_s(one.tokens, guess) - one.age_s) for one in running]
        heapq.heapify(ends)
        # A shrunken pool has more requests than slots: the surplus must leave before anybody enters.
        for _ in range(max(0, len(running) - slots)):
            heapq.heappop(ends)
        held = self.expected_s(tokens, guess)
        for _ in range(ahead):
            heapq.heapreplace(ends, ends[0] + held)
        return ends[0]

    def retry_after_s(self, ahead: int, slots: int, running: Sequence[Held], tokens: float = 0.0) -> float:
        """When a refused caller should come back: when it would have got its slot behind those `ahead`. 1 s or more."""
        return min(MOST_RETRY_S, max(1.0, self.wait_s(ahead, slots, running, tokens)))
