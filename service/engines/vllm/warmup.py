"""Prompts of many lengths before ready: Triton compiles a kernel when a shape first comes, and that takes seconds.

CUDA graphs warm the batches that they were captured for. A longer prompt, and without graphs every batch, picks other
tiles by its number of tokens (kernels/tuned); each such number is met here instead of in a user's first request.
Compiled kernels stay in Triton's cache on disk, so a second start is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.engines.vllm.canary import spread
from service.engines.vllm.kernels.choose import MOE_M

if TYPE_CHECKING:
    from service.engines.vllm.layer import Layer


def lengths(context_tokens: int) -> list[int]:
    """Prompt lengths to try: those that leave room for a token of the answer. Beyond MOE_M nothing new is compiled."""
    return [length for length in MOE_M if length < context_tokens]


async def warm(layer: Layer, wanted: Sequence[int]) -> int:
    """Ask for one token after a prompt of each length, one at a time. Returns the number of prompt tokens computed."""
    total = 0
    for length in wanted:
        params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
        # another first token for each length: no cached prefix shortens a prompt
        prompt = list(spread(layer.vocab_size, length, start=length))
        result = await layer.generate(prompt, params, f"warm-{length}")
        total += len(result.prompt_token_ids) - int(result.num_cached_tokens or 0)
    return total
