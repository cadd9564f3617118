"""The routed experts: out[t] = sum over slots s of weight[t, s] * W2[e] . swiglu(W13[e] . x[t]), e = ids[t, s].

Few tokens: two launches, one program a (token, expert). More: tokens are sorted by expert into items of at most BM
pairs, so that each expert's weights are read once and an expert that gets all tokens is spread over the whole GPU;
four launches. Above CHUNK tokens the work is cut, which bounds the extra memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from service.engines.vllm.kernels import moe_device as device
from service.engines.vllm.kernels.choose import MoeTile
from service.engines.vllm.kernels.linear import COUNTERS, asm_for, registers, unit
from service.engines.vllm.kernels.repack import Packed

CHUNK = 2048
"""Tokens at a time. At GLM-5's hidden size and 8 experts a token: 230 MB of fp16."""

Pick = Callable[[int], MoeTile]


@dataclass(frozen=True)
class Kernels:
    """The six kernels, replaceable by stand-ins whose `[grid]` only compiles (tune.py)."""

    prepare: Any = device.prepare_kernel
    w13_pair: Any = device.w13_pair_kernel
    w13_group: Any = device.w13_group_kernel
    w2_pair: Any = device.w2_pair_kernel
    w2_group: Any = device.w2_group_kernel
    sum: Any = device.sum_kernel


def experts(
    x: torch.Tensor,
    w13: Packed,
    w2: Packed,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    counters: torch.Tensor,
    pick: Pick,
) -> torch.Tensor:
    """x [M, H], weights and ids [M, top_k], expert_map [all experts] -> [M, H] of x's type.

    w13: Packed with interleaved rows, n = 2 I, k = H. w2: n = H, k = I. `pick(m)` gives the tiles for m tokens.
    ids outside [0, experts), or mapped to -1 by `expert_map`, contribute zero.
    """
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    assert w13.k == x.shape[1] == w2.n and w13.n == 2 * w2.k and w13.experts == w2.experts
    out = torch.empty_like(x)
    for t in range(0, x.shape[0], CHUNK):
        part = slice(t, min(t + CHUNK, x.shape[0]))
        tile = pick(part.stop - part.start)
        launch(Kernels(), x[part], w13, w2, weights[part], ids[part], expert_map, counters, out[part], tile)
    return out


def launch(
    k: Kernels,
    x: torch.Tensor,
    w13: Packed,
    w2: Packed,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    counters: torch.Tensor,
    out: torch.Tensor,
    tile: MoeTile,
) -> None:
    """One chunk of `experts`, with the tiles given."""
    m, top_k = ids.shape
    has_map, ids_map = expert_map is not None, expert_map if expert_map is not None else ids
    between = torch.float16 if tile.grouped else torch.float32
    inner = torch.empty(m * top_k, w2.k, dtype=between, device=x.device)
    step13, step2 = unit(w13.form, w13.pieces), unit(w2.form, w2.pieces)
    units13, units2 = w13.pieces // step13, w2.pieces // step2
    n13, n2 = w13.rows // tile.w13.bn, w2.rows // tile.w2.bn
    assert w13.rows % tile.w13.bn == 0 and w2.rows % (tile.w2.bn * tile.loop) == 0, tile
    assert units13 % tile.w13.split == 0, tile
    common13: dict[str, Any] = {
        "FORM": w13.form, "UNIT": step13, "MASK_K": w13.pieces * 64 != w13.k, "ASM": asm_for(x),
        "BN": tile.w13.bn, "BM": tile.w13.bm, "STAGES": tile.w13.stages, "num_warps": tile.w13.warps,
    }  # fmt: skip
    common2: dict[str, Any] = {
        "UNITS": units2, "FORM": w2.form, "UNIT": step2, "MASK_K": w2.pieces * 64 != w2.k,
        "ASM": asm_for(x), "BN": tile.w2.bn, "BM": tile.w2.bm, "STAGES": tile.w2.stages, "num_warps": tile.w2.warps,
    }  # fmt: skip
    if not tile.grouped:
        split, apart = tile.w13.split, tile.w2.split
        pdl: dict[str, Any] = {"launch_pdl": True} if tile.early else {}
        # each kernel its own counters: launched early, both run at once
        joins13, joins2 = (n13 * m * top_k if split > 1 else 0), (n2 * m if apart > 1 else 0)
        assert joins13 + joins2 <= COUNTERS - 4 and top_k % apart == 0, tile
        partial = torch.empty(n13 * m * top_k * split * tile.w13.bn, dtype=torch.float32, device=x.device)
        k.w13_pair[(n13, m * top_k, split)](
            x, w13.low, w13.high, w13.scales, w13.alpha, ids, ids_map, weights, inner, partial, counters[4:],
            w13.k, w2.k, top_k, units13 // split, split, w13.rows, w13.pieces, JOIN=split > 1,
            HAS_MAP=has_map, EARLY=tile.early, maxnreg=registers(tile.w13), **common13, **pdl,
        )  # fmt: skip
        sums = torch.empty(joins2 * apart * tile.w2.bn or 1, dtype=torch.float32, device=x.device)
        k.w2_pair[(n2, m, apart)](
            inner, w2.low, w2.high, w2.scales, w2.alpha, ids, ids_map, out, sums, counters[4 + joins13:], w2.k, w2.n,
            top_k, top_k // apart, apart, w2.rows, w2.pieces, JOIN=apart > 1,
            HAS_MAP=has_map, EARLY=tile.early, **common2, **pdl,
        )  # fmt: skip
        return
    assert tile.w13.bm == tile.w2.bm and tile.w13.split == tile.w2.split == 1, tile
    pairs, e = m * top_k, w13.experts
    most_items = min(pairs, e + pairs // tile.w13.bm)
    # lists, counts, item_expert, item_block, items
    groups = [torch.empty(n, dtype=torch.int32, device=x.device) for n in (e * pairs, e, most_items, most_items, 1)]
    x16 = torch.empty(m, w13.k, dtype=torch.float16, device=x.device)
    norms = torch.empty(m, 2, dtype=torch.float32, device=x.device)
    k.prepare[(e + m,)](
        x, x16, norms, ids, ids_map, *groups, counters, w13.k, pairs, pairs,
        EXPERTS=e, EXPERTS2=1 << (e - 1).bit_length(), BM=tile.w13.bm, BLOCK=1024 if pairs > 512 else 512,
        SPAN=min(8192, 1 << (w13.k - 1).bit_length()), HAS_MAP=has_map, num_warps=4,
    )  # fmt: skip
    k.w13_group[(n13, most_items)](
        x16, norms, w13.low, w13.high, w13.scales, w13.alpha, *groups, weights, inner,
        w13.k, w2.k, top_k, pairs, units13, w13.rows, w13.pieces, **common13,
    )  # fmt: skip
    y = torch.empty(pairs, w2.n, dtype=torch.float16, device=x.device)
    k.w2_group[(n2 // tile.loop, most_items)](
        inner, w2.low, w2.high, w2.scales, w2.alpha, *groups, y,
        w2.k, w2.n, pairs, w2.rows, w2.pieces, LOOP=tile.loop, **common2,
    )  # fmt: skip
    k.sum[(m, -(-w2.n // 1024))](
        y, norms, ids, ids_map, out, w2.n, TOPK=top_k, HAS_MAP=has_map, BLOCK=1024, num_warps=4
    )
