"""Prompts of many sizes before ready: Triton compiles a kernel when a shape first comes, and that takes seconds.

CUDA graphs warm the batches that they were captured for, though not the lm_head, which runs outside them. A longer
prompt, and without graphs every batch, picks other tiles by its number of tokens (kernels/tuned); each entry of the
tables is met here instead of in a user's first request. Compiled kernels stay in Triton's cache on disk, so a second
start is quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING

from service.engines.vllm.canary import spread
from service.engines.vllm.kernels.choose import MOE_M

if TYPE_CHECKING:
    from service.engines.vllm.layer import Layer


@dataclass(frozen=True, slots=True)
class Batch:
    """`count` prompts computed in one step, `tokens` in all; `answer` tokens after each."""

    count: int
    tokens: int
    answer: int

    @property
    def lengths(self) -> list[int]:
        """The prompts' lengths, as equal as can be."""
        return [(self.tokens + index) // self.count for index in range(self.count)]


def plan(context_tokens: int, sequences: int, step_tokens: int) -> list[Batch]:
    """Batches that meet every entry of the tables that users can meet: with `sequences` of them at once, `step_tokens`
    computed in a step, and room for `context_tokens` in each sequence. Most tokens first."""
    longest = context_tokens - 1  # one token is the answer's
    found = []
    for below, most in _entries(min(step_tokens, sequences * longest)):
        # One prompt where one is long enough; else as few as reach so far.
        tokens = min(most, longest) if longest > below else most
        found.append(Batch(-(-tokens // longest), tokens, 1))
    # The lm_head computes a token a sequence, whatever the prompts' lengths; the second answer is a decode step.
    found += [Batch(number, number, 2) for _, number in _entries(sequences)]
    return sorted(found, key=lambda batch: batch.tokens, reverse=True)


def _entries(limit: int) -> list[tuple[int, int]]:
    """(number of tokens that an entry of the tables begins after, greatest one up to `limit` that it serves), for each
    entry that `limit` tokens or fewer meet. Beyond the last one nothing new is compiled."""
    return [(below, min(measured, limit)) for below, measured in pairwise((0, *MOE_M)) if below < limit]


async def warm(layer: Layer, batches: Sequence[Batch], limit_s: float) -> int:
    """Have each batch computed, one at a time. Returns the number of prompt tokens computed. Raises TimeoutError after
    `limit_s`."""
    # Another first token for each prompt: no cached prefix shortens it. The gate's own prompt begins as 1 does.
    starts = count(2)
    total = 0
    async with asyncio.timeout(limit_s):
        for batch in batches:
            params = {"temperature": 0.0, "max_tokens": batch.answer, "ignore_eos": True}
            prompts = [list(spread(layer.vocab_size, length, start=next(starts))) for length in batch.lengths]
            name = f"warm-{batch.count}-{batch.tokens}"
            for result in await layer.generate_together(prompts, params, name):
                total += len(result.prompt_token_ids) - int(result.num_cached_tokens or 0)
    return total
