"""The products as torch custom ops (`torch.ops.glm5`), with fake implementations, so that torch.compile and CUDA graphs
see through them. Which tile runs is decided inside the op, from the number of tokens at hand.

`counters` is lent: zero before and after, so it is not declared as mutated (that would copy it at every call).
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from service.engines.vllm.kernels.choose import LinearTile, MoeTile, Table, linear_tile, moe_tile, table_for
from service.engines.vllm.kernels.linear import embed, linear, unit
from service.engines.vllm.kernels.moe import experts
from service.engines.vllm.kernels.repack import Packed

COPY_FROM = 32
"""Tokens from which cuBLAS on a bf16 copy beats the packed kernel (H200: q_a+kv_a 14 us against 20 at 64 tokens)."""


@cache
def register() -> torch.library.Library:
    """Define the ops once in this process. Keep the result alive as long as they are used (the cache does)."""
    library = torch.library.Library("glm5", "DEF")
    for name, function, fake in (
        ("packed_linear", _linear, _linear_fake),
        ("packed_embed", _embed, _embed_fake),
        ("packed_experts", _experts, _experts_fake),
    ):
        library.define(name + torch.library.infer_schema(function, mutates_args=()))
        library.impl(name, function, "CUDA")
        library.impl(name, function, "CPU")
        library._register_fake(name, fake)
    return library


@cache
def here(device: torch.device) -> Table:
    """The table for the device that holds the weights; for a CPU (the interpreter) the rules alone."""
    if device.type != "cuda":
        return Table()
    properties = torch.cuda.get_device_properties(device)
    return table_for(properties.name, properties.multi_processor_count)


def _linear(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    scales: Tensor,
    copy: Tensor | None,
    counters: Tensor,
    form: int,
    n: int,
    k: int,
    alpha: float,
) -> Tensor:
    m = x.shape[0]
    if copy is not None and m >= COPY_FROM:
        return x @ copy.T
    w = Packed(form, n, k, alpha, low, high, scales)
    return linear(x, w, counters, _tile(low.device, form, w.rows, w.pieces, m))


@lru_cache(4096)
def _tile(device: torch.device, form: int, rows: int, pieces: int, m: int) -> LinearTile | None:
    """Kept, because outside CUDA graphs the host's time counts."""
    return linear_tile(here(device), form, rows, pieces, unit(form, pieces), m)


def _linear_fake(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    scales: Tensor,
    copy: Tensor | None,
    counters: Tensor,
    form: int,
    n: int,
    k: int,
    alpha: float,
) -> Tensor:
    return x.new_empty(x.shape[0], n)


def _embed(
    ids: Tensor, low: Tensor, high: Tensor, scales: Tensor, form: int, n: int, k: int, alpha: float, dtype: torch.dtype
) -> Tensor:
    return embed(ids, Packed(form, n, k, alpha, low, high, scales), dtype)


def _embed_fake(
    ids: Tensor, low: Tensor, high: Tensor, scales: Tensor, form: int, n: int, k: int, alpha: float, dtype: torch.dtype
) -> Tensor:
    return low.new_empty(ids.shape[0], k, dtype=dtype)


def _experts(
    x: Tensor,
    low13: Tensor,
    high13: Tensor,
    scales13: Tensor,
    low2: Tensor,
    high2: Tensor,
    scales2: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    counters: Tensor,
    form13: int,
    form2: int,
    inner: int,
    alpha13: float,
    alpha2: float,
) -> Tensor:
    hidden = x.shape[1]
    w13 = Packed(form13, 2 * inner, hidden, alpha13, low13, high13, scales13)
    w2 = Packed(form2, hidden, inner, alpha2, low2, high2, scales2)
    table, units = here(low13.device), w13.pieces // unit(form13, w13.pieces)

    def pick(m: int) -> MoeTile:
        return moe_tile(table, (form13, form2), w13.experts, inner, hidden, m, ids.shape[1], units)

    return experts(x, w13, w2, weights, ids, expert_map, counters, pick)


def _experts_fake(
    x: Tensor,
    low13: Tensor,
    high13: Tensor,
    scales13: Tensor,
    low2: Tensor,
    high2: Tensor,
    scales2: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    counters: Tensor,
    form13: int,
    form2: int,
    inner: int,
    alpha13: float,
    alpha2: float,
) -> Tensor:
    return torch.empty_like(x)
