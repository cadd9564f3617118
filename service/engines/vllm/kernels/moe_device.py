"""Device code of the experts: sorting tokens by expert, gate and up with SwiGLU, down, and the sum over experts.

A "pair" is (token, slot): pair p = token * TOPK + slot. Between the two products and before the sum values are fp16;
one that does not fit is infinite there, and its bf16 value stands at the same place of a `shadow` buffer that is
otherwise never touched. What is stored is LIFT times the value, which fp16 keeps to 11 bits from 4e-6 to 4094.
Expert ids outside the rank (mapped to -1) contribute nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from service.engines.vllm.kernels.decode import accumulate, suspicious, token_scale, unit_dot

HALF_MAX = tl.constexpr(65504.0)
LIFT = tl.constexpr(16.0)


@triton.jit
def store_half(ptr, shadow, offset, v, ok):
    """LIFT * v as fp16; beyond fp16's range infinity there, and bf16 in the shadow."""
    v = v * LIFT
    tl.store(ptr + offset, v.to(tl.float16), mask=ok)
    tl.store(shadow + offset, v.to(tl.bfloat16), mask=ok & (tl.abs(v) > HALF_MAX))


@triton.jit
def local_expert(ids, expert_map, at, ok, HAS_MAP: tl.constexpr):
    """Expert of pair `at` on this rank, or -1."""
    e = tl.load(ids + at, mask=ok, other=-1).to(tl.int32)
    if HAS_MAP:
        e = tl.load(expert_map + e, mask=ok & (e >= 0), other=-1).to(tl.int32)
    return e


@triton.jit(do_not_specialize=["PAIRS", "CAP"])
def group_kernel(
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
def swiglu(acc, alpha, weight, BN: tl.constexpr, BM: tl.constexpr):
    """acc [BN, BM] with gate and up rows alternating -> silu(gate) * up * weight, [BN / 2, BM]."""
    gate, up = tl.split(tl.permute(tl.reshape(acc * alpha, [BN // 2, 2, BM]), [0, 2, 1]))
    return gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]


@triton.jit
def gate_up(
    low, high, scales, xp, ok, K, rn, first, COUNT, ROWS, FORM: tl.constexpr,
    UNIT: tl.constexpr, MASK_K: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """W13[rn, part of K] . tokens, guarded: fp32 [BN, BM] before `alpha`."""
    one = tl.full([BM], 1.0, tl.float32)
    acc = tl.zeros([BN, BM], tl.float32)
    acc = accumulate(acc, low, high, scales, ROWS, rn, xp, xp, K, ok, one, first, COUNT, FORM, UNIT, MASK_K, False,
                     False, ASM, BN, STAGES)  # fmt: skip
    if suspicious(acc, FORM):
        factor, back = token_scale(xp, xp, K, ok, first * UNIT * 64, COUNT * UNIT * 64, MASK_K, False, BM)
        acc = tl.zeros([BN, BM], tl.float32)
        acc = accumulate(acc, low, high, scales, ROWS, rn, xp, xp, K, ok, factor, first, COUNT, FORM, UNIT, MASK_K,
                         False, True, ASM, BN, 1)  # fmt: skip
        acc = acc * back[None, :]
    return acc


@triton.jit(do_not_specialize=["COUNT", "SPLIT", "PIECES"])
def w13_pair_kernel(
    x, low, high, scales, alpha, ids, expert_map, weights, inner, shadow, partial, counters, K, INNER, TOPK,
    COUNT, SPLIT, ROWS, PIECES, JOIN: tl.constexpr, FORM: tl.constexpr,
    UNIT: tl.constexpr, MASK_K: tl.constexpr, ASM: tl.constexpr, HAS_MAP: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Few tokens. Program (n block, pair, k split): inner[pair, :] = weight * silu(gate) * up, last split adds up."""
    pn, pair, pk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    e = local_expert(ids, expert_map, pair, True, HAS_MAP)
    ok = (slot < 1) & (e >= 0)
    low, high, scales = planes(low, high, scales, tl.maximum(e, 0), ROWS, PIECES, FORM)
    xp = x + ((slot * 0)[None, :] + pair // TOPK).to(tl.int64) * K
    acc = gate_up(low, high, scales, xp, ok, K, rn, pk * COUNT, COUNT, ROWS, FORM, UNIT, MASK_K, ASM, BN, BM,
                  STAGES)  # fmt: skip
    last = True
    if JOIN:
        tile = pair * tl.num_programs(0) + pn
        base = partial + tile.to(tl.int64) * (SPLIT * BN) + tl.arange(0, BN)[:, None] + (slot * 0)[None, :]
        one = (slot < 1)[None, :] & (rn >= 0)[:, None]
        tl.store(base + pk * BN, acc, mask=one)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.zeros([BN, BM], tl.float32)
            for k in range(SPLIT):
                acc += tl.load(base + k * BN, mask=one, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        v = swiglu(acc, alpha, tl.load(weights + pair + slot * 0).to(tl.float32), BN, BM)
        ro = pn * (BN // 2) + tl.arange(0, BN // 2)
        at = pair.to(tl.int64) * INNER + ro[:, None] + (slot * 0)[None, :]
        store_half(inner, shadow, at, v, (slot < 1)[None, :] & (ro < INNER)[:, None])


@triton.jit(do_not_specialize=["CAP", "COUNT", "PIECES"])
def w13_group_kernel(
    x, low, high, scales, alpha, lists, counts, item_expert, item_block, items, weights, inner, shadow, K, INNER, TOPK,
    CAP, COUNT, ROWS, PIECES, FORM: tl.constexpr, UNIT: tl.constexpr,
    MASK_K: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Many tokens. Program (n block, item): as w13_pair_kernel for the item's up to BM pairs."""
    pn, item = tl.program_id(0), tl.program_id(1)
    if item < tl.load(items):
        e = tl.load(item_expert + item)
        s = tl.load(item_block + item) * BM + tl.arange(0, BM)
        ok = s < tl.load(counts + e)
        pair = tl.load(lists + e.to(tl.int64) * CAP + s, mask=ok, other=0)
        rn = pn * BN + tl.arange(0, BN)
        low, high, scales = planes(low, high, scales, e, ROWS, PIECES, FORM)
        xp = x + (pair // TOPK).to(tl.int64)[None, :] * K
        acc = gate_up(low, high, scales, xp, ok, K, rn, 0, COUNT, ROWS, FORM, UNIT, MASK_K, ASM, BN, BM,
                      STAGES)  # fmt: skip
        v = swiglu(acc, alpha, tl.load(weights + pair, mask=ok, other=0.0).to(tl.float32), BN, BM)
        ro = pn * (BN // 2) + tl.arange(0, BN // 2)
        at = pair.to(tl.int64)[None, :] * INNER + ro[:, None]
        store_half(inner, shadow, at, v, ok[None, :] & (ro < INNER)[:, None])


@triton.jit(do_not_specialize=["PIECES"])
def w2_pair_kernel(
    inner, shadow, low, high, scales, alpha, ids, expert_map, out, INNER, N, ROWS, PIECES,
    TOPK: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr, MASK_K: tl.constexpr,
    ASM: tl.constexpr, HAS_MAP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Few tokens. Program (n block, token): out[token, :] = sum over its experts of W2[e] . inner[pair]."""
    pn, token = tl.program_id(0), tl.program_id(1)
    slot = tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    hp = (token * TOPK + (slot * 0)[None, :]).to(tl.int64) * INNER
    factor, back = tl.full([BM], 1.0, tl.float32), tl.full([BM], 1.0, tl.float32)
    acc = tl.zeros([BN, BM], tl.float32)
    for i in tl.range(0, TOPK * UNITS, num_stages=STAGES):
        e = local_expert(ids, expert_map, token * TOPK + i // UNITS, True, HAS_MAP)
        el, eh, es = planes(low, high, scales, tl.maximum(e, 0), ROWS, PIECES, FORM)
        at = inner + hp + (i // UNITS) * INNER
        acc = unit_dot(acc, el, eh, es, ROWS, rn, at, at, INNER, (slot < 1) & (e >= 0), factor, i % UNITS, FORM, UNIT,
                       MASK_K, False, False, ASM, BN)  # fmt: skip
    if suspicious(acc, FORM):
        most = tl.full([BM], 0.0, tl.float32)
        for s in range(TOPK):
            # one power of two for all of the token's pairs: the largest
            at = hp + s * INNER
            _, mine = token_scale(inner + at, shadow + at, INNER, slot < 1, 0, UNITS * UNIT * 64, MASK_K, True, BM)
            # a slot of another rank was never written: its bytes must not decide
            e = local_expert(ids, expert_map, token * TOPK + s, True, HAS_MAP)
            most = tl.where(e >= 0, tl.maximum(most, mine), most)
        back = tl.where(most > 0, most, 1.0)
        factor = 1.0 / back
        acc = tl.zeros([BN, BM], tl.float32)
        for i in range(TOPK * UNITS):
            e = local_expert(ids, expert_map, token * TOPK + i // UNITS, True, HAS_MAP)
            el, eh, es = planes(low, high, scales, tl.maximum(e, 0), ROWS, PIECES, FORM)
            at = hp + (i // UNITS) * INNER
            acc = unit_dot(acc, el, eh, es, ROWS, rn, inner + at, shadow + at, INNER, (slot < 1) & (e >= 0), factor,
                           i % UNITS, FORM, UNIT, MASK_K, True, True, ASM, BN)  # fmt: skip
        acc = acc * back[None, :]
    at = token.to(tl.int64) * N + rn[:, None] + (slot * 0)[None, :]
    tl.store(out + at, (acc * (alpha / LIFT)).to(out.dtype.element_ty), mask=(slot < 1)[None, :] & (rn < N)[:, None])


@triton.jit(do_not_specialize=["CAP", "PIECES"])
def w2_group_kernel(
    inner, inner_shadow, low, high, scales, alpha, lists, counts, item_expert, item_block, items, y, y_shadow, INNER, N,
    CAP, ROWS, PIECES, LOOP: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr,
    UNIT: tl.constexpr, MASK_K: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Many tokens. Program (LOOP n blocks, item): y[pair, :] = W2[e] . inner[pair]."""
    pn, item = tl.program_id(0), tl.program_id(1)
    if item < tl.load(items):
        e = tl.load(item_expert + item)
        s = tl.load(item_block + item) * BM + tl.arange(0, BM)
        ok = s < tl.load(counts + e)
        pair = tl.load(lists + e.to(tl.int64) * CAP + s, mask=ok, other=0)
        low, high, scales = planes(low, high, scales, e, ROWS, PIECES, FORM)
        at = pair.to(tl.int64)[None, :] * INNER
        one = tl.full([BM], 1.0, tl.float32)
        for i in tl.range(0, LOOP, num_stages=STAGES):
            rn = (pn * LOOP + i) * BN + tl.arange(0, BN)
            acc = tl.zeros([BN, BM], tl.float32)
            for u in tl.static_range(UNITS):
                acc = unit_dot(acc, low, high, scales, ROWS, rn, inner + at, inner + at, INNER, ok, one, u, FORM, UNIT,
                               MASK_K, False, False, ASM, BN)  # fmt: skip
            if suspicious(acc, FORM):
                factor, back = token_scale(inner + at, inner_shadow + at, INNER, ok, 0, UNITS * UNIT * 64, MASK_K, True,
                                           BM)  # fmt: skip
                acc = tl.zeros([BN, BM], tl.float32)
                for again in range(UNITS):
                    acc = unit_dot(acc, low, high, scales, ROWS, rn, inner + at, inner_shadow + at, INNER, ok, factor,
                                   again, FORM, UNIT, MASK_K, True, True, ASM, BN)  # fmt: skip
                acc = acc * back[None, :]
            store_half(y, y_shadow, pair.to(tl.int64)[None, :] * N + rn[:, None], acc * (alpha / LIFT),
                       ok[None, :] & (rn < N)[:, None])  # fmt: skip


@triton.jit
def sum_kernel(
    y, y_shadow, ids, expert_map, out, N, TOPK: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[token, :] = sum over its pairs on this rank of y[pair, :]. Program (token, BLOCK columns)."""
    token, r = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(TOPK):
        mine = local_expert(ids, expert_map, token * TOPK + s, True, HAS_MAP) >= 0
        total += tl.load(y + (token * TOPK + s).to(tl.int64) * N + r, mask=(r < N) & mine, other=0.0).to(tl.float32)
    if tl.max(tl.where(tl.abs(total) < float("inf"), 0, 1), 0) > 0:
        total = tl.zeros([BLOCK], tl.float32)
        for slot in range(TOPK):
            mine = local_expert(ids, expert_map, token * TOPK + slot, True, HAS_MAP) >= 0
            at = (token * TOPK + slot).to(tl.int64) * N + r
            v = tl.load(y + at, mask=(r < N) & mine, other=0.0).to(tl.float32)
            wide = tl.load(y_shadow + at, mask=(r < N) & mine, other=0.0).to(tl.float32)
            total += tl.where(tl.abs(v) < float("inf"), v, wide)
    tl.store(out + token.to(tl.int64) * N + r, (total / LIFT).to(out.dtype.element_ty), mask=r < N)
