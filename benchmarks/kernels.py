"""Every product of a GLM-5 rank, microseconds: plugin, Marlin int4, cuBLAS on bf16, packed kernels, and the floor.

    python benchmarks/kernels.py                       # all columns where vLLM and the plugin are installed
    python benchmarks/kernels.py --only q_a --m 1,256  # `-` in a column: not installed, or it cannot

CUDA-graph medians over rotated weights (experts: 16 routings), random weights and tokens. `floor` is the packed bytes
at --bandwidth TB/s. `skew` sends all tokens to the same 8 experts. `error` is to float64. A second table splits the
prefill path (decode to fp16, cuBLAS) into its steps, and says how fast raw GGUF blocks are repacked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from service.engines.vllm.kernels import choose, linear, linear_device, measure, ops, repack, tune  # noqa: E402
from service.engines.vllm.kernels import reference as ref  # noqa: E402

TYPE_OF = {4: ref.Q4_K, 5: ref.Q5_K, 6: ref.Q6_K}


def attempt(time_us: Callable[[], float]) -> str:
    """The time, or `-` for a competitor that is not installed or does not do this shape."""
    try:
        return f"{time_us():9.1f}"
    except Exception as fault:  # noqa: BLE001 - a competitor's failure is its result
        print(f"  ({type(fault).__name__}: {str(fault)[:150]})", file=sys.stderr)
        return f"{'-':>9s}"


def header(*columns: str) -> None:
    print(f"{'product':22s}{'M':>6s}" + "".join(f"{c:>9s}" for c in columns) + "  error    tile")


def plugin_linear(bench: measure.Bench, m: int) -> float:
    from vllm_gguf_plugin.quantization.linear import _fused_mul_mat_gguf

    s = bench.shape
    assert isinstance(s, measure.LinearShape)
    kind = TYPE_OF[s.form]
    raw = [measure.random_raw(s.n, s.k, kind) for _ in range(bench.copies)]
    x = bench.tokens(m)
    return measure.graph_us(lambda i: _fused_mul_mat_gguf(x, raw[i], kind), bench.copies)


def plugin_experts(bench: measure.Bench, m: int) -> float:
    from vllm_gguf_plugin.quantization.fused_moe import _fused_moe_gguf

    s = bench.shape
    assert isinstance(s, measure.MoeShape)
    t13, t2 = (TYPE_OF[f] for f in s.forms)
    raw13 = measure.random_raw(s.experts * 2 * s.inner, s.hidden, t13).view(s.experts, 2 * s.inner, -1)
    raw2 = measure.random_raw(s.experts * s.hidden, s.inner, t2).view(s.experts, s.hidden, -1)
    x, sets = bench.tokens(m), bench.routing(m)
    return measure.graph_us(lambda i: _fused_moe_gguf(x, raw13, raw2, *sets[i], t13, t2, "silu"), len(sets))


def _marlin_weight(n: int, k: int, experts: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    head = () if experts is None else (experts,)
    codes = torch.randint(-(2**31), 2**31 - 1, (*head, k // 16, n * 2), dtype=torch.int32, device="cuda")
    return codes, torch.rand(*head, k // 128, n, device="cuda").bfloat16() * 1e-2


def marlin_linear(bench: measure.Bench, m: int) -> float:
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    s = bench.shape
    assert isinstance(s, measure.LinearShape)
    weights = [_marlin_weight(s.n, s.k) for _ in range(bench.copies)]
    empty = torch.empty(0, dtype=torch.int, device="cuda")
    workspace, x = marlin_utils.marlin_make_workspace_new(torch.device("cuda", 0)), bench.tokens(m)

    def call(i: int) -> Any:
        w, scale = weights[i]
        return marlin_utils.apply_gptq_marlin_linear(
            x, w, scale, empty, empty, empty, workspace, scalar_types.uint4b8, s.n, s.k, True
        )

    return measure.graph_us(call, bench.copies)


def marlin_experts(bench: measure.Bench, m: int) -> float:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    s = bench.shape
    assert isinstance(s, measure.MoeShape)
    w13, scale13 = _marlin_weight(2 * s.inner, s.hidden, s.experts)
    w2, scale2 = _marlin_weight(s.hidden, s.inner, s.experts)
    x, sets = bench.tokens(m), bench.routing(m)
    kind = scalar_types.uint4b8.id
    return measure.graph_us(
        lambda i: fused_marlin_moe(x, w13, w2, None, None, scale13, scale2, *sets[i], kind), len(sets)
    )


def cublas(bench: measure.Bench, m: int) -> float:
    s = bench.shape
    assert isinstance(s, measure.LinearShape)
    copies = max(2, min(16, measure.CACHE_BYTES // (2 * s.n * s.k)))
    weights = [torch.randn(s.n, s.k, device="cuda").bfloat16() for _ in range(copies)]
    x = bench.tokens(m)
    return measure.graph_us(lambda i: x @ weights[i].T, copies)


def linears(only: str, ms: list[int], table: choose.Table, bandwidth: float) -> None:
    print(
        f"{'product':22s}{'M':>6s}{'plugin':>9s}{'Marlin':>9s}{'cuBLAS':>9s}{'packed':>9s}{'floor':>9s}  error    tile"
    )
    for s in (s for s in tune.GLM5_LINEARS if only in s.name):
        bench = measure.Bench(s)
        for m in ms:
            tile = tune.chosen(table, s, m)
            assert not isinstance(tile, choose.MoeTile)
            x = bench.tokens(m)
            ours = measure.graph_us(partial(packed, bench, x, tile), bench.copies)
            print(
                f"{s.name:22s}{m:6d}{attempt(partial(plugin_linear, bench, m))}"
                f"{attempt(partial(marlin_linear, bench, m))}{cublas(bench, m):9.1f}{ours:9.1f}"
                f"{s.floor_us(m, bandwidth):9.1f}  {bench.linear_error(m, tile):.1e}  {tune.brief(tile)}",
                flush=True,
            )


def packed(bench: measure.Bench, x: torch.Tensor, tile: choose.LinearTile | None, i: int) -> torch.Tensor:
    return linear.linear(x, bench.w[i], bench.counters, tile)


def experts(only: str, ms: list[int], table: choose.Table, bandwidth: float) -> None:
    header("plugin", "Marlin", "packed", "skew", "floor")
    for s in (s for s in tune.GLM5_MOE if only in s.name):
        bench = measure.Bench(s)
        for m in ms:
            tile = tune.chosen(table, s, m)
            assert isinstance(tile, choose.MoeTile)
            print(
                f"{s.name:22s}{m:6d}{attempt(partial(plugin_experts, bench, m))}"
                f"{attempt(partial(marlin_experts, bench, m))}{bench.moe_us(m, tile):9.1f}"
                f"{bench.skewed_us(m, tile):9.1f}"
                f"{s.floor_us(m, bandwidth):9.1f}  {bench.moe_error(m, tile):.1e}  {tune.brief(tile)}",
                flush=True,
            )
            torch.cuda.empty_cache()


def prefill_steps(m: int) -> None:
    """Times of scale, decode, matrix product and unscale, for two linears."""
    for s in (tune.GLM5_LINEARS[0], tune.GLM5_LINEARS[-1]):
        bench = measure.Bench(s)
        w16 = [torch.randn(s.n, s.k, device="cuda").half() for _ in range(4)]
        x = bench.tokens(m)
        x16, back = x.half(), torch.ones(m, device="cuda")
        wide, out = torch.empty(m, s.n, device="cuda"), torch.empty(m, s.n, device="cuda", dtype=torch.bfloat16)

        def scale(i: int, s: Any = s, x: Any = x, x16: Any = x16, back: Any = back) -> None:
            linear_device.scale_kernel[(m,)](x, x16, back, s.k, BLOCK=1024, num_warps=4)

        def decode(i: int, s: Any = s, bench: Any = bench, w16: Any = w16) -> None:
            linear.decode_rows(linear.rows_kernel, bench.w[i % bench.copies], 0, s.n, w16[i], 1.0)

        def product(i: int, x16: Any = x16, w16: Any = w16) -> torch.Tensor:
            return torch.mm(x16, w16[i].T, out_dtype=torch.float32)

        def unscale(i: int, s: Any = s, wide: Any = wide, back: Any = back, out: Any = out) -> None:
            grid = (m, -(-s.n // 1024))
            linear_device.unscale_kernel[grid](wide, back, out, 1.0, s.n, s.n, 0, BLOCK=1024, num_warps=4)

        steps = {f.__name__: round(measure.graph_us(f, 4), 1) for f in (scale, decode, product, unscale)}
        print(f"{s.name} at {m} tokens: {steps}", flush=True)


def repack_speed() -> None:
    """GB/s of raw GGUF, and the extra memory it took, on one layer's gate and up experts."""
    for name, kind in (("Q4_K", ref.Q4_K), ("Q5_K", ref.Q5_K), ("Q6_K", ref.Q6_K), ("Q8_0", ref.Q8_0)):
        raw = measure.random_raw(256 * 512, 6144, kind).view(256, 512, -1)
        repack.repack(raw[:8], kind, interleave=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = measure.timed(lambda raw=raw, kind=kind: repack.repack(raw, kind, interleave=True))
        peak = torch.cuda.max_memory_allocated() - before
        print(f"repack {name}: {raw.numel() / seconds / 1e9:.1f} GB/s, {peak / 2**30:.2f} GiB besides the raw bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only products whose name contains this")
    parser.add_argument("--m", default="1,8,16,32,64,128,256,1024", help="numbers of tokens")
    parser.add_argument("--bandwidth", type=float, default=4.0, help="TB/s for the floor")
    parser.add_argument("--steps", action="store_true", help="also the steps of prefill, and repacking")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    table, ms = ops.here(torch.device("cuda", 0)), [int(m) for m in given.m.split(",")]
    # all tiles at once: one by one they would take most of the time
    shapes = [s for s in (*tune.GLM5_LINEARS, *tune.GLM5_MOE) if given.only in s.name]
    measure.precompile(tune.chosen_jobs(table, shapes, ms), 14)
    print(f"{torch.cuda.get_device_name()}, {tune.versions()}, table: {'yes' if table.linear else 'none'}")
    linears(given.only, ms, table, given.bandwidth)
    experts(given.only, ms, table, given.bandwidth)
    if given.steps:
        prefill_steps(1024)
        repack_speed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
