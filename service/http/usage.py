"""Token counts of one answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Usage = dict[str, Any]

_DETAILS = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")


def usage_of(raw: Any, *, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
    """OpenAI's usage from the engine's own, or, where it gave none, from the counts that came beside its chunks."""
    raw = raw if isinstance(raw, dict) else {}
    prompt = int(raw.get("prompt_tokens", prompt_tokens))
    output = int(raw.get("completion_tokens") or (0 if raw else output_tokens))
    cached = (raw.get("prompt_tokens_details") or {}).get("cached_tokens")
    details = raw.get("completion_tokens_details") or {}
    usage: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": int(cached if cached is not None else cached_tokens)},
    }
    if kept := {name: int(details[name]) for name in _DETAILS if details.get(name)}:
        usage["completion_tokens_details"] = kept
    return usage


def total(parts: Iterable[tuple[int, Usage]]) -> Usage:
    """The usage of an answer of several choices, given (prompt, usage) of each: a prompt counts once, as at OpenAI,
    however many choices it has; every generated token counts."""
    prompt = output = cached = 0
    details: dict[str, int] = {}
    seen: set[int] = set()
    for which, usage in parts:
        if which not in seen:
            seen.add(which)
            prompt += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        output += usage["completion_tokens"]
        for name, count in usage.get("completion_tokens_details", {}).items():
            details[name] = details.get(name, 0) + count
    merged: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if details:
        merged["completion_tokens_details"] = details
    return merged
