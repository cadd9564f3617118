"""The closed sets that labels are taken from. Whatever is not in its set is counted as `other`, never as itself.

A label value that came from a request, a file or an error message would grow without bound and could carry a user's
words; so every recorder passes its values through here.
"""

from __future__ import annotations

from typing import Literal

from service.errors import ServiceError
from service.types import POOLS, TIERS

NONE = "none"
"""Stands for a pool or tier that a request never got."""
OTHER = "other"

Direction = Literal["up", "down", "hold"]
Mode = Literal["latency", "throughput"]

ENDPOINTS: tuple[str, ...] = ("chat", "completions")
POOL_LABELS: tuple[str, ...] = (*POOLS, NONE)
TIER_LABELS: tuple[str, ...] = (*TIERS, NONE)
DIRECTIONS: tuple[str, ...] = ("up", "down", "hold")
MODES: tuple[str, ...] = ("latency", "throughput")

CONCURRENCY: tuple[str, ...] = (
    *("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256", "257-512", "513-1024", "1025+"),
)
"""Powers of two: bucket i holds (2^(i-1), 2^i] requests decoding at once; the last one is open."""

LOAD_PHASES: tuple[str, ...] = (
    *("header", "gate", "start", "weights", "kv", "compile", "warm", "canary", "ready", OTHER),
)

_PHASE_WORDS: tuple[tuple[str, str], ...] = (
    ("header", "header"),
    ("check", "header"),
    ("gate", "gate"),
    ("canar", "canary"),
    ("judg", "canary"),
    ("start", "start"),
    ("kv", "kv"),
    ("warm", "warm"),
    ("compil", "compile"),
    ("graph", "compile"),
    ("captur", "compile"),
    ("kernel", "compile"),
    ("weight", "weights"),
    ("load", "weights"),
    ("ready", "ready"),
)


def _codes(root: type[ServiceError]) -> set[str]:
    return {root.code}.union(*(_codes(child) for child in root.__subclasses__()))


ERROR_CODES: tuple[str, ...] = tuple(sorted(_codes(ServiceError)))
OUTCOMES: tuple[str, ...] = ("ok", "client_gone", *ERROR_CODES, "error")
"""How a request ended: `error` is what the closed family does not know, so a bug of ours."""

REJECTIONS: tuple[str, ...] = (*ERROR_CODES, OTHER)
USUAL_REJECTIONS: tuple[str, ...] = ("overloaded", "rate_limit_exceeded", "not_ready", "deadline_exceeded")
"""Shown as zero from the start, so that the first one is an increase and not a new series."""

ROUTING_REASONS: tuple[str, ...] = ("only_pool", "mode", "tier", "auto_idle", "auto_busy", "spill", "pool_down", OTHER)
"""service/routing's reasons; a test holds the two together."""
SCALING_REASONS: tuple[str, ...] = (
    *("queue", "wait", "tokens_queued", "kv", "idle", "steady", "minimum", "maximum", "budget", "cooldown", "draining"),
    *("no_data", "rebalance", OTHER),
)
CONVERSION_REASONS: tuple[str, ...] = (
    *(
        "gain_pays",
        "gain_too_small",
        "reload_too_dear",
        "cooldown",
        "no_demand",
        "busy",
        "not_allowed",
        "failed",
        OTHER,
    ),
)


def one_of(value: str, allowed: tuple[str, ...], otherwise: str = OTHER) -> str:
    """`value` where the set has it, else `otherwise`."""
    return value if value in allowed else otherwise


def phase_label(phase: str) -> str:
    """Which of LOAD_PHASES an engine's own words for a phase (`reading weights`) mean."""
    words = phase.lower()
    return next((label for word, label in _PHASE_WORDS if word in words), OTHER)


def concurrency_index(decoding: int) -> int:
    """Bucket of `decoding` >= 1 requests, as an index into CONCURRENCY."""
    assert decoding > 0, decoding
    return min((decoding - 1).bit_length(), len(CONCURRENCY) - 1)
