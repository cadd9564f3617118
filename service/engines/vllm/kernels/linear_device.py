"""Device code of the linear product: the packed kernel, decoding of rows, and scaling into and out of fp16's range."""

# Triton functions are not Python functions: types are the compiler's business.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from service.engines.vllm.kernels.decode import joined, piece, product, row_powers


@triton.jit(do_not_specialize=["M", "COUNT", "SPLIT"])
def linear_kernel(
    x, low, high, scales, out, partial, counters, alpha, M, N, ROWS, K, COUNT, SPLIT, JOIN: tl.constexpr,
    FORM: tl.constexpr, UNIT: tl.constexpr, MASK_K: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (n block, k split, m block). ROWS: N as stored. K: row length of x. COUNT units a split.

    JOIN: SPLIT > 1.
    """
    pn, pk, pm = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rn, rm = pn * BN + tl.arange(0, BN), pm * BM + tl.arange(0, BM)
    row_ok = rm < M
    xp = x + rm.to(tl.int64)[None, :] * K
    acc = product(
        low, high, scales, ROWS, rn, xp, K, row_ok, pk * COUNT, COUNT, FORM, UNIT, MASK_K, ASM, BN, BM, STAGES
    )
    acc = acc * alpha
    ok = row_ok[None, :] & (rn < N)[:, None]
    op = out + rm.to(tl.int64)[None, :] * N + rn[:, None]
    if not JOIN:
        tl.store(op, acc.to(out.dtype.element_ty), mask=ok)
    else:
        tile = pm * tl.num_programs(0) + pn
        base = partial + tile.to(tl.int64) * (SPLIT * BN * BM)
        base += tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(base + pk * (BN * BM), acc, mask=ok)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = joined(base, BN * BM, SPLIT, ok, BN, BM)
            tl.store(op, total.to(out.dtype.element_ty), mask=ok)
            tl.store(counters + tile, 0)


@triton.jit(do_not_specialize=["COUNT"])
def rows_kernel(
    ids, low, high, scales, out, alpha, COUNT, ROWS, K, SPAN: tl.constexpr, FORM: tl.constexpr, ASM: tl.constexpr,
    MASK_K: tl.constexpr, GATHER: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[i, :] = W[ids[i], :] if GATHER (an embedding) else W[i, :], i < COUNT. Program (BN rows, SPAN pieces)."""
    i, span = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    ok, r32 = i < COUNT, tl.arange(0, 32)
    rn = i
    if GATHER:
        rn = tl.load(ids + i, mask=ok, other=0).to(tl.int32)
    h = tl.zeros([BN, 32], tl.uint8)
    for J in tl.static_range(SPAN):
        kb = span * SPAN + J
        if FORM == 5 and J == 0:
            h = tl.load(high + (span * ROWS + rn)[:, None] * 32 + r32[None, :])
        if FORM == 6 and J % 2 == 0:
            h = tl.load(high + ((kb // 2) * ROWS + rn)[:, None] * 32 + r32[None, :])
        lo, hi = piece(low, h, scales, ROWS, kb, J, rn, FORM, ASM, BN)
        op = out + i[:, None].to(tl.int64) * K + kb * 64 + r32[None, :]
        if MASK_K:
            lo_ok, hi_ok = ok[:, None] & (kb * 64 + r32 < K)[None, :], ok[:, None] & (kb * 64 + 32 + r32 < K)[None, :]
        else:
            lo_ok, hi_ok = ok[:, None] & (r32 >= 0)[None, :], ok[:, None] & (r32 >= 0)[None, :]
        tl.store(op, (lo.to(tl.float32) * alpha).to(out.dtype.element_ty), mask=lo_ok)
        tl.store(op + 32, (hi.to(tl.float32) * alpha).to(out.dtype.element_ty), mask=hi_ok)


@triton.jit
def scale_kernel(x, out, back, K, BLOCK: tl.constexpr):
    """out[m, :] = fp16(x[m, :] * 2^-e), back[m] = 2^e, with e from the row's largest magnitude. Program: a row."""
    m = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK)
    factor, undo = row_powers(x + m * K, K, BLOCK)
    for k in range(0, K, BLOCK):
        v = tl.load(x + m * K + k + r, mask=k + r < K, other=0.0).to(tl.float32)
        tl.store(out + m * K + k + r, (v * factor).to(tl.float16), mask=k + r < K)
    tl.store(back + m, undo)


@triton.jit
def unscale_kernel(wide, back, out, alpha, N, WIDTH, FIRST, BLOCK: tl.constexpr):
    """out[m, FIRST + n] = wide[m, n] * back[m] * alpha. Program (row, BLOCK columns)."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = n < WIDTH
    v = tl.load(wide + m * WIDTH + n, mask=ok, other=0.0) * tl.load(back + m) * alpha
    tl.store(out + m * N + FIRST + n, v.to(out.dtype.element_ty), mask=ok)
