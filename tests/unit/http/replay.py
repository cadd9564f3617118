"""Answers cut into pieces, and what a dialect makes of them: its events, and its whole body."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from service.http.dialects.dialect import Dialect
from service.http.dialects.fold import Fold
from service.http.plan import Part, Plan
from service.types import CallPart, Delta, EngineRequest

PART = Part(EngineRequest("r", "chat", b""), 0, prompt=0)
CALLS = [("f", '{"a":"x y"}'), ("g", ""), ("h", '{"b":[1,2]}')]


def replay(dialect: Dialect, plan: Plan, deltas: Iterable[Delta]) -> tuple[bytes, bytes]:
    """(all events, the whole body) of an answer to `plan`, whose only part is PART."""
    framer, fold = dialect.framer(plan, PART, tier="flex", created=7), Fold(plan, PART)
    sent = b""
    for delta in deltas:
        sent += framer.feed(delta)
        fold.feed(delta)
    framer.close()
    fold.close()
    sent += dialect.last(plan, [framer], tier="flex", created=7)
    return sent, dialect.whole(plan, [fold], tier="flex", created=7)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


def cut_answer(reasoning: str, text: str, calls: int, places: list[int], together: bool) -> list[Delta]:
    """Reasoning, text and the first `calls` of CALLS, cut at `places`; a call's parts `together` in one delta."""
    pieces = [Delta(reasoning=piece, output_tokens=1) for piece in cut(reasoning, places)]
    pieces += [Delta(piece, output_tokens=1) for piece in cut(text, places)]
    for index, (name, arguments) in enumerate(CALLS[:calls]):
        begun = [CallPart(index, f"id{index}", name)] + [CallPart(index, arguments=p) for p in cut(arguments, places)]
        pieces += [Delta(calls=tuple(begun))] if together else [Delta(calls=(part,)) for part in begun]
    return [*pieces, Delta(finish="tool_calls" if calls else "stop", prompt_tokens=4)]
