"""out[M, N] = x[M, K] @ W[N, K]^T for a `Packed` W: the kernel for few to some hundred tokens, and for prefill.

Few tokens: one kernel; split-K partial sums meet in global memory and the last program to arrive adds them (one launch,
always in the same order, so results repeat bit for bit). Many tokens: W is decoded into an fp16 scratch matrix once
and cuBLAS does the product, with every token scaled into fp16's range by a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from service.engines.vllm.kernels.choose import LinearTile
from service.engines.vllm.kernels.linear_device import linear_kernel, rows_kernel, scale_kernel, unscale_kernel
from service.engines.vllm.kernels.repack import AFFINE5, SIGNED6, Packed

COUNTERS = 4096
"""int32 slots a layer lends to split-K, one for each tile of the output. Zero before a launch, and after it."""


SCRATCH = 1 << 26
"""Weights decoded at a time for prefill (128 MiB of fp16)."""


@dataclass(frozen=True)
class Decoding:
    """The kernels around cuBLAS, replaceable by stand-ins whose `[grid]` only compiles (ahead.py)."""

    rows: Any = rows_kernel
    scale: Any = scale_kernel
    unscale: Any = unscale_kernel


def unit(form: int, pieces: int) -> int:
    """Pieces of 64 that a kernel takes an iteration: 4, or what divides `pieces`."""
    return 4 if pieces % 4 == 0 or form == AFFINE5 else 2 if pieces % 2 == 0 or form == SIGNED6 else 1


def asm_for(t: torch.Tensor) -> bool:
    """Whether to use the PTX path: everywhere but on the CPU, where Triton's interpreter runs plain Triton."""
    return bool(t.device.type != "cpu")


def registers(tile: LinearTile) -> int | None:
    """Cap for small tiles, whose speed is occupancy: what their shared memory allows on an H200 (8 blocks of 2 warps
    a multiprocessor), no less, since spills cost too. None: let the compiler choose."""
    if tile.bn * tile.bm > 64 * 16:
        return None
    return 112 if tile.warps <= 2 else 96


def linear(x: torch.Tensor, w: Packed, counters: torch.Tensor, tile: LinearTile | None) -> torch.Tensor:
    """x [M, K] (any float type) -> [M, N] of the same type. `tile` None: the prefill path (decode, then cuBLAS)."""
    x = x.contiguous()
    assert x.shape[1] == w.k, (tuple(x.shape), w.k)
    out = torch.empty(x.shape[0], w.n, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    if tile is None:
        return by_cublas(Decoding(), x, w, out)
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
        tile.split, JOIN=tile.split > 1, FORM=w.form, UNIT=step, MASK_K=w.pieces * 64 != w.k, ASM=asm_for(x),
        BN=tile.bn, BM=tile.bm,
        STAGES=tile.stages, num_warps=tile.warps, maxnreg=registers(tile),
    )  # fmt: skip


def decode_rows(
    kernel: Any, w: Packed, first: int, count: int, out: torch.Tensor, alpha: float, ids: Any = None
) -> torch.Tensor:
    """Rows first.. (a multiple of 64) of W, or the rows `ids`, times `alpha`, into `out` [count, K]."""
    shape = 64 if ids is None else 8
    step = unit(w.form, w.pieces)
    low, high = w.low[:, :, first:], w.high[:, :, first:]
    grid = (-(-count // shape), w.pieces // step)
    kernel[grid](
        ids if ids is not None else out, low, high, w.scales[:, :, first:], out, alpha, count, w.rows, w.k, SPAN=step,
        FORM=w.form, ASM=asm_for(out), MASK_K=w.pieces * 64 != w.k, GATHER=ids is not None, BN=shape,
        num_warps=4 if ids is None else 1,
    )  # fmt: skip
    return out


def dense(w: Packed, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of W as the kernels see it (fp16 steps, then rounded to `dtype`)."""
    out = torch.empty(w.n, w.k, dtype=dtype, device=w.low.device)
    return decode_rows(rows_kernel, w, 0, w.n, out, w.alpha)


def embed(ids: torch.Tensor, w: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [T] of W -> [T, K]."""
    out = torch.empty(ids.shape[0], w.k, dtype=dtype, device=ids.device)
    return decode_rows(rows_kernel, w, 0, ids.shape[0], out, w.alpha, ids) if ids.shape[0] else out


def by_cublas(kernels: Decoding, x: torch.Tensor, w: Packed, out: torch.Tensor) -> torch.Tensor:
    """The prefill path into `out`."""
    m = x.shape[0]
    x16, back = torch.empty_like(x, dtype=torch.float16), torch.empty(m, dtype=torch.float32, device=x.device)
    kernels.scale[(m,)](x, x16, back, w.k, BLOCK=1024, num_warps=4)
    step = max(64, SCRATCH // w.k // 64 * 64)
    for first in range(0, w.n, step):
        width = min(step, w.n - first)
        w16 = torch.empty(width, w.k, dtype=torch.float16, device=x.device)
        decode_rows(kernels.rows, w, first, width, w16, 1.0)
        wide = torch.mm(x16, w16.T, out_dtype=torch.float32) if x.is_cuda else x16.float() @ w16.float().T
        kernels.unscale[(m, -(-width // 1024))](wide, back, out, w.alpha, w.n, width, first, BLOCK=1024, num_warps=4)
    return out
