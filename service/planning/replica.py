"""One replica in virtual time: continuous batching with the step model's times, without simulating every step.

All sequences of a batch advance together, one step at a time, so one number describes them all: `clock`, the output
tokens that a sequence present since the beginning would have by now. A sequence that joins at clock c and wants n
tokens ends at clock c + n. Between joins and leaves the step time is taken as constant; a prompt stops everybody for
its prefill, as in the engine. Joins and leaves cost O(log batch).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol


class StepTimes(Protocol):
    """What is asked of a step model: seconds a step, seconds of a prompt, tokens a step and request."""

    def decode_step_s(self, running: int, context_tokens: int) -> float: ...

    def prefill_s(self, tokens: int) -> float: ...


@dataclass(slots=True)
class Replica:
    """`slots` sequences at once. Times are seconds of virtual time; `version` changes with every join and leave."""

    steps: StepTimes
    slots: int
    tokens_per_step: float = 1.0
    clock: float = 0.0
    version: int = 0
    draining: bool = False
    busy_s: float = 0.0
    _now: float = 0.0
    _stalled_until: float = 0.0
    _step: float = 0.0
    _ends: list[tuple[float, int]] = field(default_factory=list)
    _prompts: int = 0
    _joined: float = 0.0
    _joins: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def running(self) -> int:
        return len(self._ends)

    def advance(self, now: float) -> None:
        """Bring the clock up to `now`. Times before the last one are ignored."""
        if now <= self._now:
            return
        if self._ends:
            begin = max(self._now, self._stalled_until)
            if now > begin:
                self.clock += (now - begin) / self._step * self.tokens_per_step
            self.busy_s += now - self._now
        self._now = now

    def join(self, now: float, id: int, prompt: int, output: int) -> float:
        """Begin a sequence; returns when its first token comes. The slot must be free."""
        assert len(self._ends) < self.slots, "no free slot"
        self.advance(now)
        self._stalled_until = max(now, self._stalled_until) + self.steps.prefill_s(prompt)
        heapq.heappush(self._ends, (self.clock + output, id))
        self._joins[id] = (prompt, self.clock)
        self._prompts += prompt
        self._joined += self.clock
        self._changed()
        return self._stalled_until + self._step

    def next_end(self) -> float | None:
        """When the next sequence will end if nothing changes before."""
        if not self._ends:
            return None
        left = max(0.0, self._ends[0][0] - self.clock)
        return max(self._now, self._stalled_until) + left * self._step / self.tokens_per_step

    def end(self, now: float) -> int:
        """The sequence whose time has come leaves; its id."""
        self.advance(now)
        _, id = heapq.heappop(self._ends)
        prompt, joined = self._joins.pop(id)
        self._prompts -= prompt
        self._joined -= joined
        self._changed()
        return id

    def _changed(self) -> None:
        self.version += 1
        n = len(self._ends)
        if n:
            context = self._prompts + n * self.clock - self._joined
            self._step = self.steps.decode_step_s(n, int(context))
