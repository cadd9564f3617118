"""Prompts of many lengths before ready: Triton compiles a kernel when a shape first comes, and that takes seconds.

CUDA graphs warm the batches that they were captured for. A longer prompt, and without graphs every batch, picks other
tiles by its number of tokens (kernels/tuned); each such number is met here instead of in a user's first request.
Compiled kernels stay in Triton's cache on disk, so a second start is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.engines.vllm.layer import Layer

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""The numbers of tokens that the tables of tiles know (kernels/tune.py); beyond them nothing new is compiled."""


def lengths(context_tokens: int) -> list[int]:
    """Prompt lengths to try: those that leave room for a token of the answer."""
    return [length for length in LENGTHS if length < context_tokens]


def prompt(length: int, vocab_size: int) -> list[int]:
    """Token ids from the range that the gate uses, another first one for each length: no cached prefix shortens it."""
    span = max(2, min(vocab_size, 50_000) - 1)
    return [1 + (index * 7919 + length * 104_729) % (span - 1) for index in range(length)]


async def warm(layer: Layer, wanted: Sequence[int]) -> int:
    """Ask for one token after a prompt of each length, one at a time. Returns the number of prompt tokens computed."""
    total = 0
    for length in wanted:
        params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
        result = await layer.generate(prompt(length, layer.vocab_size), params, f"warm-{length}")
        total += len(result.prompt_token_ids) - int(result.num_cached_tokens or 0)
    return total
