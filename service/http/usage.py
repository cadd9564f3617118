"""Token counts of one answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from service.types import Delta


@dataclass(slots=True)
class Usage:
    """The counts of one choice, summed up piece by piece."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, delta: Delta) -> None:
        self.output += delta.output_tokens
        if delta.prompt_tokens or delta.cached_tokens:
            self.prompt += delta.prompt_tokens
            self.cached += delta.cached_tokens
        self.reasoning += delta.reasoning_tokens


def total(parts: Iterable[tuple[int, Usage]]) -> dict[str, Any]:
    """OpenAI's usage of an answer of several choices, given (prompt, usage) of each: a prompt counts once, as at
    OpenAI, however many choices it has; every generated token counts."""
    prompt = output = cached = reasoning = 0
    seen: set[int] = set()
    for which, usage in parts:
        if which not in seen:
            seen.add(which)
            prompt += usage.prompt
            cached += usage.cached
        output += usage.output
        reasoning += usage.reasoning
    merged: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning:
        merged["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return merged
