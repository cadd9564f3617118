"""Which fields the engine obeys. All others are refused by name, never ignored, unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from service.errors import UnsupportedField

Body = dict[str, Any]

OURS: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "n",
        "service_tier",
        "user",
        "metadata",
        "store",
        "modalities",
        "prompt_cache_key",
        "safety_identifier",
    }
)
"""Fields that http/ itself obeys, or that only label the call."""

_ALSO: Final = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
"""A field that is honoured wherever another one is."""

_HARMLESS: Final[dict[str, Callable[[Any, Body], bool]]] = {
    "temperature": lambda value, raw: value == 1,
    "top_p": lambda value, raw: value == 1,
    "frequency_penalty": lambda value, raw: value == 0,
    "presence_penalty": lambda value, raw: value == 0,
    "repetition_penalty": lambda value, raw: value == 1,
    "logit_bias": lambda value, raw: not value,
    "top_k": lambda value, raw: value in (0, -1),
    "min_p": lambda value, raw: value == 0,
    "min_tokens": lambda value, raw: value == 0,
    "ignore_eos": lambda value, raw: value is False,
    "stop_token_ids": lambda value, raw: not value,
    "logprobs": lambda value, raw: value is False,
    "top_logprobs": lambda value, raw: value == 0 and not raw.get("logprobs"),
    "tools": lambda value, raw: not value,
    "tool_choice": lambda value, raw: value == "auto" or not raw.get("tools"),
    "parallel_tool_calls": lambda value, raw: value is True or not raw.get("tools"),
    "response_format": lambda value, raw: value == {"type": "text"},
    "verbosity": lambda value, raw: value == "medium",
    "chat_template_kwargs": lambda value, raw: not value,
    "echo": lambda value, raw: value is False,
    "suffix": lambda value, raw: value == "",
    "best_of": lambda value, raw: value == (raw.get("n") or 1),
}
"""Values that ask for nothing beyond what happens anyway."""


def honoured(name: str, honours: frozenset[str]) -> bool:
    return name in honours or _ALSO.get(name) in honours


def harmless(name: str, raw: Body) -> bool:
    rule = _HARMLESS.get(name)
    return rule is not None and rule(raw[name], raw)


def refuse_unhonoured(raw: Body, honours: frozenset[str]) -> None:
    if not honours:
        return
    for name in raw:
        if name in OURS or raw[name] is None or _can_stay(name, raw, honours):
            continue
        raise UnsupportedField(f"the engine of this model cannot honour the field {name!r}", param=name)


def unheeded(raw: Body, honours: frozenset[str], soft: frozenset[str]) -> tuple[str, ...]:
    """Wishes of `raw` that this engine does without."""
    if not honours:
        return ()
    return tuple(name for name in raw if name in soft and raw[name] is not None and not _can_stay(name, raw, honours))


def _can_stay(name: str, raw: Body, honours: frozenset[str]) -> bool:
    return honoured(name, honours) or harmless(name, raw)
