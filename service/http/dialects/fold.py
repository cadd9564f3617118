"""One choice of a whole answer: its deltas, folded. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from service.http.plan import Part, Plan
from service.http.shaping import Shaper
from service.http.usage import Usage
from service.types import CallPart, Delta, Finish, TokenLogprob


@dataclass(frozen=True, slots=True)
class FoldedCall:
    id: str
    name: str
    arguments: str


class Fold:
    """Feed it the deltas in order, then `close`; then read it."""

    def __init__(self, plan: Plan, part: Part) -> None:
        self.part = part
        self.usage = Usage()
        self.finish: Finish | None = None
        self._shaper = Shaper(must_call=plan.must_call, show_reasoning=plan.show_reasoning)
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[CallPart]] = {}
        self._logprobs: list[TokenLogprob] = []

    def feed(self, delta: Delta) -> None:
        """Raises EngineFailed."""
        self.usage.add(delta)
        delta = self._shaper.feed(delta)
        self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for part in delta.calls:
            self._calls.setdefault(part.index, []).append(part)
        if delta.logprobs:
            self._logprobs += delta.logprobs
        self.finish = self.finish or delta.finish

    def close(self) -> None:
        """Raises EngineFailed if the answer has no end."""
        self._shaper.close()

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[FoldedCall]:
        return [
            FoldedCall(parts[0].id, parts[0].name, "".join(part.arguments for part in parts))
            for parts in self._calls.values()
        ]

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(self._logprobs)
