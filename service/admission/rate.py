"""How fast a pool really serves, and what can be promised from it."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING_S = 20.0
"""Time constant of the moving average: long against one answer, short against a change of load."""
MOST_RETRY_S = 600.0


@dataclass
class ServiceRate:
    """Moving average of how long one slot is held, seconds. The pool's rate is slots / held time."""

    held_s: float = 0.0
    _last: float = 0.0

    def finished(self, held_s: float, now: float) -> None:
        if self.held_s == 0.0:
            self.held_s = held_s
        else:
            weight = 1.0 - 2.0 ** -(max(now - self._last, 0.01) / SMOOTHING_S)
            # A burst of completions in one instant still counts: each moves the average by a tenth at least.
            self.held_s += max(weight, 0.1) * (held_s - self.held_s)
        self._last = now

    def wait_s(self, ahead: int, slots: int) -> float:
        """Seconds until a request with `ahead` others before it gets one of `slots`: they leave at slots / held_s."""
        if slots <= 0:
            return MOST_RETRY_S
        held = self.held_s or 1.0
        return (ahead + 1) * held / slots

    def retry_after_s(self, waiting: int, slots: int) -> float:
        """When a refused caller should come back: when the queue that refused it has room again; 1 s or more."""
        return min(MOST_RETRY_S, max(1.0, self.wait_s(0, slots) if waiting == 0 else self.wait_s(waiting // 2, slots)))
