"""Device code of the experts: sorting tokens by expert, gate and up with SwiGLU, down, and the sum over experts.

A "pair" is (token, slot): pair p = token * TOPK + slot. Expert ids outside the rank (mapped to -1) contribute nothing.

Range. Few tokens: the guard of decode.py, and float32 between the two products. Many (groups): every token is first
scaled by a power of two that puts its largest value under fp16's end (`back` undoes it), so the products need no guard;
and what lies between the products, and each pair's output before the sum, is fp16 divided by about the token's mean
square (`between`), because silu(gate) * up grows with it. It saturates at 65504, which it would reach at a hundred
thousand times its usual size. float32 there would cost occupancy (the tile is buffered once a pipeline stage).
"""

# Triton functions are not Python functions: types are the compiler's business.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from service.engines.vllm.kernels.decode import (
    bare_product,
    joined,
    largest,
    powers,
    prefetch_unit,
    product,
    row_powers,
    suspicious,
    unit_dot,
)


@triton.jit
def saturated(v):
    """fp16, finite for every finite v (and for infinite ones); NaN stays NaN, which a GPU's maximum forgets."""
    keep: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(v, -65504.0, propagate_nan=keep), 65504.0, propagate_nan=keep).to(tl.float16)


@triton.jit
def local_expert(ids, expert_map, at, ok, HAS_MAP: tl.constexpr):
    """Expert of pair `at` on this rank, or -1."""
    e = tl.load(ids + at, mask=ok, other=-1).to(tl.int32)
    if HAS_MAP:
        e = tl.load(expert_map + e, mask=ok & (e >= 0), other=-1).to(tl.int32)
    return e


@triton.jit(do_not_specialize=["PAIRS", "CAP"])
def prepare_kernel(
    x, x16, norms, ids, expert_map, lists, counts, item_expert, item_block, items, arrived, H, PAIRS, CAP,
    EXPERTS: tl.constexpr, EXPERTS2: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Program e < EXPERTS lists the pairs of expert e; the others scale one token each."""
    if tl.program_id(0) < EXPERTS:
        group(
            ids, expert_map, lists, counts, item_expert, item_block, items, arrived, PAIRS, CAP, EXPERTS, EXPERTS2, BM,
            BLOCK, HAS_MAP,
        )  # fmt: skip
    else:
        scale_token(x, x16, norms, tl.program_id(0) - EXPERTS, H, SPAN)


@triton.jit
def group(
    ids, expert_map, lists, counts, item_expert, item_block, items, arrived, PAIRS, CAP, EXPERTS: tl.constexpr,
    EXPERTS2: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Program e lists the pairs of expert e, in order; the last program to finish cuts the lists into items.

    lists [EXPERTS, CAP], counts [EXPERTS]. Item i is block item_block[i] (of BM pairs) of expert item_expert[i];
    items[0] is their number. EXPERTS2: EXPERTS rounded up to a power of two. `arrived` is zero before and after.
    """
    e = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    found = 0
    for first in range(0, PAIRS, BLOCK):
        mine = local_expert(ids, expert_map, first + r, first + r < PAIRS, HAS_MAP) == e
        at = found + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(lists + e.to(tl.int64) * CAP + at, first + r, mask=mine)
        found += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + e, found)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == EXPERTS - 1:
        all_e = tl.arange(0, EXPERTS2)
        count = tl.load(counts + all_e, mask=all_e < EXPERTS, other=0, cache_modifier=".cg")
        blocks = (count + BM - 1) // BM
        start = tl.cumsum(blocks, 0) - blocks
        for j in range(tl.max(blocks, 0)):
            tl.store(item_expert + start + j, all_e, mask=j < blocks)
            tl.store(item_block + start + j, tl.zeros([EXPERTS2], tl.int32) + j, mask=j < blocks)
        tl.store(items, tl.sum(blocks, 0))
        tl.store(arrived, 0)


@triton.jit
def scale_token(x, x16, norms, token, H, SPAN: tl.constexpr):
    """x16[t, :] = x[t, :] / back in fp16, its largest in [2^14, 2^15). norms[t] = (back, between), powers of two:
    1 / between is the mean square of x[t, :], but for a factor under two, kept where no product of it overflows."""
    row, r = token.to(tl.int64) * H, tl.arange(0, SPAN)
    factor, back = row_powers(x + row, H, SPAN)
    squares = tl.zeros([SPAN], tl.float32)
    for k in range(0, H, SPAN):
        v = tl.load(x + row + k + r, mask=k + r < H, other=0.0).to(tl.float32) * factor
        tl.store(x16 + row + k + r, (v * 16384.0).to(tl.float16), mask=k + r < H)
        squares += v * v
    of_mean = (tl.sum(squares, 0) / H).to(tl.int32, bitcast=True) >> 23
    exponent = of_mean + 2 * (back.to(tl.int32, bitcast=True) >> 23) - 3 * 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 126)
    tl.store(norms + 2 * token, back / 16384.0)
    tl.store(norms + 2 * token + 1, ((127 - exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def planes(low, high, scales, e, ROWS, PIECES, FORM: tl.constexpr):
    """Pointers to expert e's planes."""
    size = e.to(tl.int64) * (ROWS * PIECES)
    low += size * (64 if FORM == 8 else 32)
    if FORM == 5:
        high += size * 8
    if FORM == 6:
        high += size * 16
    return low, high, scales + size


@triton.jit
def swiglu(acc, weight, BN: tl.constexpr, BM: tl.constexpr):
    """acc [BN, BM] with gate and up rows alternating -> silu(gate) * up * weight, [BN / 2, BM]."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BN // 2, 2, BM]), [0, 2, 1]))
    return gate / (1.0 + tl.exp(-gate)) * (up * weight[None, :])


@triton.jit(do_not_specialize=["COUNT", "SPLIT", "PIECES"])
def w13_pair_kernel(
    x, low, high, scales, alpha, ids, expert_map, weights, inner, partial, counters, K, INNER, TOPK,
    COUNT, SPLIT, ROWS, PIECES, JOIN: tl.constexpr, FORM: tl.constexpr,
    UNIT: tl.constexpr, MASK_K: tl.constexpr, ASM: tl.constexpr, HAS_MAP: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Few tokens. Program (n block, pair, k split): inner[pair, :] = weight * silu(gate) * up, last split adds up.
    EARLY: launched before its tokens are written; and w2_pair_kernel, which reads the same ids, as soon as they are."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pn, pair, pk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    e = local_expert(ids, expert_map, pair, True, HAS_MAP)
    ok = (slot < 1) & (e >= 0)
    low, high, scales = planes(low, high, scales, tl.maximum(e, 0), ROWS, PIECES, FORM)
    xp = x + ((slot * 0)[None, :] + pair // TOPK).to(tl.int64) * K
    acc = product(low, high, scales, ROWS, rn, xp, K, ok, pk * COUNT, COUNT, FORM, UNIT, MASK_K, ASM, BN, BM, STAGES)
    last = True
    if JOIN:
        tile = pair * tl.num_programs(0) + pn
        base = partial + tile.to(tl.int64) * (SPLIT * BN) + tl.arange(0, BN)[:, None] + (slot * 0)[None, :]
        one = (slot < 1)[None, :] & (rn >= 0)[:, None]
        tl.store(base + pk * BN, acc, mask=one)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = joined(base, BN, SPLIT, one, BN, BM)
            tl.store(counters + tile, 0)
    if last:
        v = swiglu(acc * alpha, tl.load(weights + pair + slot * 0).to(tl.float32), BN, BM)
        ro = pn * (BN // 2) + tl.arange(0, BN // 2)
        at = pair.to(tl.int64) * INNER + ro[:, None] + (slot * 0)[None, :]
        tl.store(inner + at, v, mask=(slot < 1)[None, :] & (ro < INNER)[:, None])


@triton.jit(do_not_specialize=["CAP", "COUNT", "PIECES"])
def w13_group_kernel(
    x16, norms, low, high, scales, alpha, lists, counts, item_expert, item_block, items, weights, inner, K, INNER, TOPK,
    CAP, COUNT, ROWS, PIECES, FORM: tl.constexpr, UNIT: tl.constexpr,
    MASK_K: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Many tokens, scaled. Program (n block, item): inner[pair, :] as in w13_pair_kernel times the token's `between`,
    for the item's up to BM pairs."""
    pn, item = tl.program_id(0), tl.program_id(1)
    if item < tl.load(items):
        e = tl.load(item_expert + item)
        s = tl.load(item_block + item) * BM + tl.arange(0, BM)
        ok = s < tl.load(counts + e)
        pair = tl.load(lists + e.to(tl.int64) * CAP + s, mask=ok, other=0)
        rn = pn * BN + tl.arange(0, BN)
        low, high, scales = planes(low, high, scales, e, ROWS, PIECES, FORM)
        token = pair // TOPK
        xp = x16 + token.to(tl.int64)[None, :] * K
        acc = bare_product(low, high, scales, ROWS, rn, xp, K, ok, 0, COUNT, FORM, UNIT, MASK_K, ASM, BN, BM, STAGES)
        back, between = tl.load(norms + 2 * token), tl.load(norms + 2 * token + 1)
        weight = tl.load(weights + pair, mask=ok, other=0.0).to(tl.float32)
        v = swiglu(acc * alpha * back[None, :], weight * between, BN, BM)
        ro = pn * (BN // 2) + tl.arange(0, BN // 2)
        at = pair.to(tl.int64)[None, :] * INNER + ro[:, None]
        tl.store(inner + at, saturated(v), mask=ok[None, :] & (ro < INNER)[:, None])


@triton.jit(do_not_specialize=["EACH", "SPLIT", "PIECES"])
def w2_pair_kernel(
    inner, low, high, scales, alpha, ids, expert_map, out, partial, counters, INNER, N, TOPK, EACH, SPLIT, ROWS, PIECES,
    JOIN: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr, MASK_K: tl.constexpr,
    ASM: tl.constexpr, HAS_MAP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Few tokens. Program (n block, token, expert split): out[token, :] = sum over its experts of W2[e] . inner[pair],
    EACH of them a split, last split adds up.
    EARLY: launched while w13_pair_kernel runs; weights are brought to L2 until that has ended."""
    pn, token, pk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = token * TOPK + pk * EACH
    if EARLY:
        for s in tl.range(0, EACH, num_stages=1):
            e = local_expert(ids, expert_map, first + s, True, HAS_MAP)
            el, eh, es = planes(low, high, scales, tl.maximum(e, 0), ROWS, PIECES, FORM)
            for u in tl.static_range(UNITS):
                prefetch_unit(el, eh, es, ROWS, pn * BN, u, FORM, UNIT, BN)
        gdc_wait()
    slot = tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    hp = inner + (first + (slot * 0)[None, :]).to(tl.int64) * INNER
    one = tl.full([BM], 1.0, tl.float32)
    acc = tl.zeros([BN, BM], tl.float32)
    for i in tl.range(0, EACH * UNITS, num_stages=STAGES):
        e = local_expert(ids, expert_map, first + i // UNITS, True, HAS_MAP)
        el, eh, es = planes(low, high, scales, tl.maximum(e, 0), ROWS, PIECES, FORM)
        acc = unit_dot(acc, el, eh, es, ROWS, rn, hp + (i // UNITS) * INNER, INNER, (slot < 1) & (e >= 0), one,
                       i % UNITS, FORM, UNIT, MASK_K, False, ASM, BN)  # fmt: skip
    if suspicious(acc, True, FORM):
        # Nothing at all: values may lie under fp16's least (silu(gate) * up of small tokens), unless no expert is here.
        local = -1
        for each in tl.range(0, EACH, num_stages=1):
            local = tl.maximum(local, local_expert(ids, expert_map, first + each, True, HAS_MAP))
        # one power of two for all of the split's pairs; they lie one after the other
        most = largest(hp, EACH * INNER, slot < 1, 0, tl.where(local >= 0, EACH * INNER, 0), True, BM)
        factor, back = powers(most)
        acc = tl.zeros([BN, BM], tl.float32)
        for again in tl.range(0, tl.where(tl.max(most, 0) > 0, EACH * UNITS, 0), num_stages=1):
            e = local_expert(ids, expert_map, first + again // UNITS, True, HAS_MAP)
            el, eh, es = planes(low, high, scales, tl.maximum(e, 0), ROWS, PIECES, FORM)
            acc = unit_dot(acc, el, eh, es, ROWS, rn, hp + (again // UNITS) * INNER, INNER, (slot < 1) & (e >= 0),
                           factor, again % UNITS, FORM, UNIT, MASK_K, True, ASM, BN)  # fmt: skip
        acc = acc * back[None, :]
    last = True
    if JOIN:
        tile = token * tl.num_programs(0) + pn
        base = partial + tile.to(tl.int64) * (SPLIT * BN) + tl.arange(0, BN)[:, None] + (slot * 0)[None, :]
        mine = (slot < 1)[None, :] & (rn >= 0)[:, None]
        tl.store(base + pk * BN, acc, mask=mine)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = joined(base, BN, SPLIT, mine, BN, BM)
            tl.store(counters + tile, 0)
    if last:
        at = token.to(tl.int64) * N + rn[:, None] + (slot * 0)[None, :]
        tl.store(out + at, (acc * alpha).to(out.dtype.element_ty), mask=(slot < 1)[None, :] & (rn < N)[:, None])


@triton.jit(do_not_specialize=["CAP", "PIECES"])
def w2_group_kernel(
    inner, low, high, scales, alpha, lists, counts, item_expert, item_block, items, y, INNER, N, CAP, ROWS, PIECES,
    LOOP: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr, MASK_K: tl.constexpr,
    ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Many tokens. Program (LOOP n blocks, item): y[pair, :] = W2[e] . inner[pair], fp16, saturating, still times
    the token's `between`."""
    pn, item = tl.program_id(0), tl.program_id(1)
    if item < tl.load(items):
        e = tl.load(item_expert + item)
        s = tl.load(item_block + item) * BM + tl.arange(0, BM)
        ok = s < tl.load(counts + e)
        pair = tl.load(lists + e.to(tl.int64) * CAP + s, mask=ok, other=0)
        low, high, scales = planes(low, high, scales, e, ROWS, PIECES, FORM)
        hp = inner + pair.to(tl.int64)[None, :] * INNER
        one = tl.full([BM], 1.0, tl.float32)
        for i in tl.range(0, LOOP, num_stages=STAGES):
            rn = (pn * LOOP + i) * BN + tl.arange(0, BN)
            acc = tl.zeros([BN, BM], tl.float32)
            for u in tl.static_range(UNITS):
                acc = unit_dot(
                    acc, low, high, scales, ROWS, rn, hp, INNER, ok, one, u, FORM, UNIT, MASK_K, False, ASM, BN
                )
            at = pair.to(tl.int64)[None, :] * N + rn[:, None]
            tl.store(y + at, saturated(acc * alpha), mask=ok[None, :] & (rn < N)[:, None])


@triton.jit
def sum_kernel(y, norms, ids, expert_map, out, N, TOPK: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr):
    """out[token, :] = sum over its pairs on this rank of y[pair, :] / between. Program (token, BLOCK columns)."""
    token, r = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(TOPK):
        mine = local_expert(ids, expert_map, token * TOPK + s, True, HAS_MAP) >= 0
        total += tl.load(y + (token * TOPK + s).to(tl.int64) * N + r, mask=(r < N) & mine, other=0.0).to(tl.float32)
    total /= tl.load(norms + 2 * token + 1)
    tl.store(out + token.to(tl.int64) * N + r, total.to(out.dtype.element_ty), mask=r < N)
