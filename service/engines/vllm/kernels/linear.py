"""out[M, N] = x[M, K] @ W[N, K]^T for a `Packed` W: the kernel for few to some hundred tokens, and for prefill.

Few tokens: one kernel; split-K partial sums meet in global memory and the last program to arrive adds them (one launch,
always in the same order, so results repeat bit for bit). Many tokens: W is decoded into an fp16 scratch matrix once
and cuBLAS does the product, with every token scaled into fp16's range by a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from service.engines.vllm.kernels.choose import LinearTile
from service.engines.vllm.kernels.decode import piece, powers, product
from service.engines.vllm.kernels.repack import AFFINE5, SIGNED6, Packed

COUNTERS = 4096
"""int32 slots a layer lends to split-K, one for each tile of the output. Zero before a launch, and after it."""


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
            total = tl.zeros([BN, BM], tl.float32)
            for k in range(SPLIT):
                total += tl.load(base + k * (BN * BM), mask=ok, other=0.0, cache_modifier=".cg")
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
    most = tl.zeros([BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        most = tl.maximum(most, tl.abs(tl.load(x + m * K + k + r, mask=k + r < K, other=0.0).to(tl.float32)))
    factor, undo = powers(tl.max(most, 0))
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


SCRATCH = 1 << 26
"""Weights decoded at a time for prefill (128 MiB of fp16)."""


def unit(form: int, pieces: int) -> int:
    """Pieces of 64 that a kernel takes an iteration: 4, or what divides `pieces`."""
    return 4 if pieces % 4 == 0 or form == AFFINE5 else 2 if pieces % 2 == 0 or form == SIGNED6 else 1


def asm_for(t: torch.Tensor) -> bool:
    """Whether to use the PTX path: everywhere but on the CPU, where Triton's interpreter runs plain Triton."""
    return t.device.type != "cpu"


def registers(tile: LinearTile) -> int | None:
    """Cap for small tiles, whose speed is occupancy: 24 warps a multiprocessor. None: let the compiler choose."""
    return 80 if tile.bn * tile.bm <= 64 * 16 else None


def linear(x: torch.Tensor, w: Packed, counters: torch.Tensor, tile: LinearTile | None) -> torch.Tensor:
    """x [M, K] (any float type) -> [M, N] of the same type. `tile` None: the prefill path (decode, then cuBLAS)."""
    x = x.contiguous()
    assert x.shape[1] == w.k, (tuple(x.shape), w.k)
    out = torch.empty(x.shape[0], w.n, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    if tile is None:
        return _by_cublas(x, w, out)
    launch_linear(linear_kernel, x, w, out, counters, tile)
    return out


def launch_linear(kernel: Any, x: torch.Tensor, w: Packed, out: torch.Tensor, counters: Any, tile: LinearTile) -> None:
    """`kernel` is linear_kernel, or a stand-in whose `[grid]` only compiles (tune.py)."""
    m, step = x.shape[0], unit(w.form, w.pieces)
    units = w.pieces // step
    assert w.rows % tile.bn == 0 and units % tile.split == 0, (tile, w.rows, units)
    grid = (w.rows // tile.bn, tile.split, -(-m // tile.bm))
    assert grid[0] * grid[2] <= COUNTERS or tile.split == 1, grid
    words = grid[0] * grid[2] * tile.split * tile.bn * tile.bm if tile.split > 1 else 1
    partial = torch.empty(words, dtype=torch.float32, device=x.device)
    kernel[grid](
        x, w.low, w.high, w.scales, out, partial, counters, w.alpha, m, w.n, w.rows, w.k, units // tile.split,
        tile.split, JOIN=tile.split > 1, FORM=w.form, UNIT=step, MASK_K=w.pieces * 64 != w.k, ASM=asm_for(x), BN=tile.bn, BM=tile.bm,
        STAGES=tile.stages, num_warps=tile.warps, maxnreg=registers(tile),
    )  # fmt: skip


def decode_rows(w: Packed, first: int, count: int, out: torch.Tensor, alpha: float, ids: Any = None) -> torch.Tensor:
    """Rows first.. (a multiple of 64) of W, or the rows `ids`, times `alpha`, into `out` [count, K]."""
    shape = 64 if ids is None else 8
    step = unit(w.form, w.pieces)
    low, high = w.low[:, :, first:], w.high[:, :, first:]
    grid = (-(-count // shape), w.pieces // step)
    rows_kernel[grid](
        ids if ids is not None else out, low, high, w.scales[:, :, first:], out, alpha, count, w.rows, w.k, SPAN=step,
        FORM=w.form, ASM=asm_for(out), MASK_K=w.pieces * 64 != w.k, GATHER=ids is not None, BN=shape, num_warps=4 if ids is None else 1,
    )  # fmt: skip
    return out


def dense(w: Packed, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of W as the kernels see it (fp16 steps, then rounded to `dtype`)."""
    out = torch.empty(w.n, w.k, dtype=dtype, device=w.low.device)
    return decode_rows(w, 0, w.n, out, w.alpha)


def embed(ids: torch.Tensor, w: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [T] of W -> [T, K]."""
    out = torch.empty(ids.shape[0], w.k, dtype=dtype, device=ids.device)
    return decode_rows(w, 0, ids.shape[0], out, w.alpha, ids) if ids.shape[0] else out


def _by_cublas(x: torch.Tensor, w: Packed, out: torch.Tensor) -> torch.Tensor:
    m = x.shape[0]
    x16, back = torch.empty_like(x, dtype=torch.float16), torch.empty(m, dtype=torch.float32, device=x.device)
    scale_kernel[(m,)](x, x16, back, w.k, BLOCK=1024, num_warps=4)
    step = max(64, SCRATCH // w.k // 64 * 64)
    for first in range(0, w.n, step):
        width = min(step, w.n - first)
        w16 = torch.empty(width, w.k, dtype=torch.float16, device=x.device)
        decode_rows(w, first, width, w16, 1.0)
        wide = torch.mm(x16, w16.T, out_dtype=torch.float32) if x.is_cuda else x16.float() @ w16.float().T
        unscale_kernel[(m, -(-width // 1024))](wide, back, out, w.alpha, w.n, width, first, BLOCK=1024, num_warps=4)
    return out
