"""Numbers of a header that no engine can use: each key with what it must be. llama.cpp aborts on many of them, in the
process that serves, so they are refused before any engine reads the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from service.errors import UserError
from service.gguf.header import GgufHeader
from service.gguf.wire import GgufArray


@dataclass(frozen=True, slots=True)
class _Whole:
    """A whole number, or one for each layer. `attention`: only where blocks attend (a state space has no heads)."""

    least: int
    most: int
    attention: bool = False


@dataclass(frozen=True, slots=True)
class _Real:
    """A finite number between `above` and `below`, neither of them included."""

    above: float = -math.inf
    below: float = math.inf


_WIDE: Final = 1 << 24
_RULES: Final[dict[str, _Whole | _Real]] = {
    "attention.group_norm_epsilon": _Real(0, 1),
    "attention.head_count": _Whole(1, 1 << 16, attention=True),
    "attention.head_count_kv": _Whole(1, 1 << 16, attention=True),
    "attention.indexer.head_count": _Whole(1, 1 << 16),
    "attention.indexer.key_length": _Whole(1, 1 << 16),
    "attention.indexer.top_k": _Whole(1, (1 << 31) - 1),
    "attention.key_length": _Whole(1, 1 << 16),
    "attention.key_length_mla": _Whole(1, 1 << 16),
    "attention.kv_lora_rank": _Whole(1, _WIDE),
    "attention.layer_norm_epsilon": _Real(0, 1),
    "attention.layer_norm_rms_epsilon": _Real(0, 1),
    "attention.q_lora_rank": _Whole(0, _WIDE),
    "attention.sliding_window": _Whole(0, (1 << 31) - 1),
    "attention.value_length": _Whole(1, 1 << 16),
    "attention.value_length_mla": _Whole(1, 1 << 16),
    "block_count": _Whole(1, 1024),
    "context_length": _Whole(1, (1 << 31) - 1),
    "embedding_length": _Whole(1, _WIDE),
    "expert_count": _Whole(0, 1 << 16),
    "expert_feed_forward_length": _Whole(0, _WIDE),
    "expert_shared_count": _Whole(0, 1 << 10),
    "expert_used_count": _Whole(0, 1 << 16),
    "feed_forward_length": _Whole(0, _WIDE),
    "leading_dense_block_count": _Whole(0, 1024),
    "nextn_predict_layers": _Whole(0, 64),
    "rope.dimension_count": _Whole(0, 1 << 16),
    "rope.freq_base": _Real(0),
    "rope.scaling.factor": _Real(0),
    "rope.scaling.original_context_length": _Whole(1, (1 << 31) - 1),
    "vocab_size": _Whole(1, (1 << 31) - 1),
}


def value_faults(header: GgufHeader) -> list[str]:
    """One sentence for each number that is out of its range, with the key and what it must be."""
    return list(_faults(header))


def _faults(header: GgufHeader) -> Iterator[str]:
    attends = any(".attn_" in name for name in header.tensors)
    start = f"{header.architecture}."
    for key, value in header.metadata.items():
        if not key.startswith(start):
            continue
        rule = _RULES.get(key.removeprefix(start), _Real() if isinstance(value, float) else None)
        if isinstance(rule, _Real):
            if isinstance(value, (bool, str, GgufArray)) or not rule.above < value < rule.below:
                yield f"{key} is {_shown(value)}, it must be {_range(rule)}"
        elif rule is not None and (attends or not rule.attention):
            yield from _whole_faults(header, key, value, rule)
    try:
        experts, used = header.integer("{arch}.expert_count", 0), header.integer("{arch}.expert_used_count", 0)
    except UserError:
        return  # said above
    if (experts > 0) != (used > 0) or used > experts:
        yield f"{start}expert_used_count is {used} of {experts} experts, it must be 1 to {start}expert_count"


def _whole_faults(header: GgufHeader, key: str, value: object, rule: _Whole) -> Iterator[str]:
    wanted = f"it must be a whole number from {rule.least} to {rule.most}"
    if not isinstance(value, GgufArray):
        if isinstance(value, bool) or not isinstance(value, int) or not rule.least <= value <= rule.most:
            yield f"{key} is {_shown(value)}, {wanted}"
        return
    try:
        values = header.integers(key)
    except UserError as fault:
        yield str(fault)
        return
    # A block of a mixed model may have none; all of them may not.
    if not values or max(values) < rule.least or min(values) < 0 or max(values) > rule.most:
        yield f"{key} has values from {min(values, default=0)} to {max(values, default=0)}, {wanted}, in some block"


def _shown(value: object) -> str:
    return "an array" if isinstance(value, GgufArray) else repr(value)[:64]


def _range(rule: _Real) -> str:
    if rule.below < math.inf:
        return f"a number between {rule.above:g} and {rule.below:g}"
    return "a finite number" if rule.above == -math.inf else f"a finite number above {rule.above:g}"
