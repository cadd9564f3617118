"""How long each phase of a start takes, from what an engine reports while it loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from service.types import LoadProgress


@dataclass(slots=True)
class Phases:
    """Hand each report to `say`. `past`: phases that ended, in their order, with their seconds; one that came again
    stands there again."""

    clock: Callable[[], float] = time.monotonic
    past: list[tuple[str, float]] = field(default_factory=list)
    current: str = ""
    _began: float = 0.0

    def say(self, progress: LoadProgress) -> None:
        if progress.phase == self.current:
            return
        now = self.clock()
        if self.current:
            self.past.append((self.current, now - self._began))
        self.current, self._began = progress.phase, now

    def told(self, progress: LoadProgress) -> LoadProgress:
        """`progress`, noted, with the phases before it and their time behind its detail."""
        self.say(progress)
        before = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.past)
        words = "; ".join(part for part in (progress.detail, before and f"before: {before}") if part)
        return replace(progress, detail=words)
