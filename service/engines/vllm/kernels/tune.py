"""Find the fastest tiles for a set of shapes on the GPU at hand, and write them as this GPU model's table.

Every candidate is compiled first, in parallel processes; then each is timed (measure.py). A candidate that does not
compile or fit the GPU drops out. Results of tuning are data (tuned/*.json): read, review and commit the diff.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from service.engines.vllm.kernels.choose import (
    LINEAR_M,
    MOE_M,
    LinearTile,
    MoeTile,
    Table,
    dump,
    linear_key,
    linear_tile,
    moe_key,
    moe_tile,
)
from service.engines.vllm.kernels.linear import COUNTERS, linear, unit
from service.engines.vllm.kernels.measure import Bench, Job, LinearShape, MoeShape, graph_us, precompile
from service.engines.vllm.kernels.offline import Resources, linear_resources, moe_resources

GLM5_LINEARS = (
    LinearShape("q_a+kv_a", 4, 2624, 6144),
    LinearShape("q_b", 4, 2048, 2048),
    LinearShape("o", 4, 6144, 2048),
    LinearShape("shared gate_up", 4, 512, 6144),
    LinearShape("shared down", 5, 6144, 256),
    LinearShape("dense gate_up", 4, 3072, 6144),
    LinearShape("dense down", 5, 6144, 1536),
    LinearShape("lm_head", 6, 19360, 6144),
)
"""One TP=8 rank of GLM-5 as UD-Q4_K_XL quantises it."""

GLM5_MOE = (
    MoeShape("experts Q4_K/Q5_K", (4, 5), 256, 256, 6144, 8),
    MoeShape("experts Q4_K/Q6_K", (4, 6), 256, 256, 6144, 8),
)

LIMIT = 2.2e-3
"""Relative error to float64 above which a tile is wrong, not imprecise (bf16 output alone: 1.65e-3)."""


@dataclass(frozen=True)
class Result:
    """One shape at one M: the best tile (None: decode and cuBLAS), its time, and how many candidates were timed."""

    shape: LinearShape | MoeShape
    m: int
    tile: LinearTile | MoeTile | None
    us: float
    tried: int
    error: float = 0.0


def linear_candidates(shape: LinearShape, m: int) -> Iterator[LinearTile]:
    """Tiles worth timing: for each tile and depth the three splits of K that come nearest to 2, 4 and 8 programs a
    multiprocessor of an H200 (partial sums cost more than they give beyond that)."""
    rows, step = -(-shape.n // 64) * 64, unit(shape.form, shape.k // 64)
    units = shape.k // 64 // step
    splits = [s for s in range(1, 25) if units % s == 0]
    bms = [8] if m <= 8 else [b for b in (8, 16, 32, 64, 128) if m / 4 <= b < 2 * m] or [64, 128]
    for bn, bm in itertools.product((32, 64, 128) if m <= 16 else (64, 128), bms):
        tiles = rows // bn * -(-m // bm)
        if rows % bn or bn * bm > 128 * 64 or tiles > COUNTERS:
            continue
        near = {min(splits, key=lambda s: abs(tiles * s - wish)) for wish in (264, 528, 1056)}
        for split, (warps, stages) in itertools.product(sorted(near), _depths(bn, bm)):
            yield LinearTile(bn, bm, split, warps, stages)


def moe_candidates(shape: MoeShape, m: int) -> Iterator[MoeTile]:
    """Pairs up to 16 tokens, launched early too up to 2; groups from 8 on."""
    units = shape.hidden // 256
    if m <= 16:
        splits = [s for s in (1, 2, 4, 8, 12) if units % s == 0 and m * s <= 16]
        w13s = [LinearTile(bn, 8, s, w, st) for bn in (32, 64) for s in splits for w, st in ((2, 3), (2, 4), (1, 3))]
        w2s = [LinearTile(bn, 8, 1, w, st) for bn in (32, 64) for w, st in ((2, 2), (2, 3), (2, 4), (1, 3))]
        if m <= 4:
            aparts = [s for s in (2, 4) if shape.top_k % s == 0]
            w2s += [LinearTile(bn, 8, s, w, 2) for bn in (32, 64) for s in aparts for w in (1, 2)]
        # vary one of the two kernels at a time around a good default, tune() joins the best of each
        usual = max(w13s, key=lambda w13: w13.split * (w13.split <= 4))
        for early in (False, True) if m <= 2 else (False,):
            yield MoeTile(False, usual, w2s[0], 1, early)
            yield from (MoeTile(False, w13, w2s[0], 1, early) for w13 in w13s if w13 != usual)
            yield from (MoeTile(False, usual, w2, 1, early) for w2 in w2s[1:])
    if m >= 8:
        each = m * shape.top_k / shape.experts
        for bm in (b for b in (8, 16, 32, 64, 128) if each / 2 <= b <= 4 * each + 8):
            bns = [bn for bn in (64, 128) if bn * bm <= 8192]
            w13s = [LinearTile(bn, bm, 1, w, st) for bn in bns for w, st in _depths(bn, bm)]
            downs = [
                (LinearTile(bn, bm, 1, w, st), loop)
                for bn in bns
                for w, st in _depths(bn, bm)
                for loop in (2, 4, 8, 16)
                if shape.hidden % (bn * loop) == 0
            ]
            yield from (MoeTile(True, w13, *downs[0]) for w13 in w13s)
            yield from (MoeTile(True, w13s[0], w2, loop) for w2, loop in downs[1:])


def _depths(bn: int, bm: int) -> list[tuple[int, int]]:
    """(warps, stages): a warp wants 16 rows or more; big tiles want a warpgroup or two, and fewer stages."""
    if bn * bm <= 64 * 16:
        return [(2, 3), (2, 4), (4, 3)]
    if bn * bm <= 64 * 64:
        return [(4, 2), (4, 3)]
    return [(4, 3), (8, 2)]


def tune(
    linears: Sequence[LinearShape],
    moes: Sequence[MoeShape],
    linear_m: Sequence[int],
    moe_m: Sequence[int],
    processes: int,
    say: Callable[[str], None],
    bandwidth: float = 4.0,
    save: Callable[[Table], None] = lambda table: None,
) -> tuple[Table, list[Result]]:
    """Time all candidates. `say` gets one line a shape and M, and one about compiling. `bandwidth`: TB/s.

    `save` is called with what is known so far after each shape.
    """
    wanted: list[tuple[LinearShape | MoeShape, int, Sequence[LinearTile | MoeTile]]] = []
    wanted += [(s, m, list(linear_candidates(s, m))) for s in linears for m in linear_m]
    ready = torch.cuda.get_device_capability() >= (9, 0)
    wanted += [(s, m, [t for t in moe_candidates(s, m) if ready or not t.early]) for s in moes for m in moe_m]
    jobs: dict[tuple[object, ...], Job] = {}
    for shape, m, tiles in wanted:
        for tile in tiles:
            jobs.setdefault(compiled_as(shape, tile), (shape, m, tile))
    errors = precompile(list(jobs.values()), processes)
    broken = {key for key, error in zip(jobs, errors, strict=True) if error}
    say(f"compiled {len(jobs)} candidates, {len(broken)} failed {[e for e in errors if e][:1]}")
    properties = torch.cuda.get_device_properties(0)
    table = Table(properties.name, properties.multi_processor_count, {}, {})
    results: list[Result] = []
    shapes: list[LinearShape | MoeShape] = [*linears, *moes]
    for shape in shapes:
        bench = Bench(shape)
        for _, m, tiles in (w for w in wanted if w[0] == shape):
            usable = [t for t in tiles if compiled_as(shape, t) not in broken]
            if isinstance(shape, LinearShape):
                result = _best_linear(bench, shape, m, [t for t in usable if isinstance(t, LinearTile)])
                assert not isinstance(result.tile, MoeTile)
                key = linear_key(shape.form, -(-shape.n // 64) * 64, shape.k)
                table.linear.setdefault(key, {})[m] = result.tile
            else:
                result = _best_moe(bench, shape, m, [t for t in usable if isinstance(t, MoeTile)])
                assert isinstance(result.tile, MoeTile)
                key = moe_key(*shape.forms, shape.experts, shape.inner, shape.hidden)
                table.moe.setdefault(key, {})[m] = result.tile
            results.append(result)
            if not result.error <= LIMIT:
                raise RuntimeError(f"{shape.name} M={m}: {result.tile} is wrong by {result.error:.1e}")
            floor = shape.floor_us(m, bandwidth)
            say(
                f"{shape.name:20s} M={m:5d} {result.us:8.1f} us  floor {floor:6.1f}  {result.error:.1e}  "
                f"{brief(result.tile)}"
            )
        del bench
        save(table)
        torch.cuda.empty_cache()
    return table, results


def chosen(table: Table, shape: LinearShape | MoeShape, m: int) -> LinearTile | MoeTile | None:
    """The tile that `table` or the rules give a shape at m tokens (None: decode and cuBLAS)."""
    if isinstance(shape, MoeShape):
        units = shape.hidden // 256
        return moe_tile(table, shape.forms, shape.experts, shape.inner, shape.hidden, m, shape.top_k, units)
    pieces = shape.k // 64
    return linear_tile(table, shape.form, -(-shape.n // 64) * 64, pieces, unit(shape.form, pieces), m)


def chosen_jobs(table: Table, shapes: Iterable[LinearShape | MoeShape], ms: Iterable[int]) -> list[Job]:
    """What must be compiled to run these shapes at these numbers of tokens; each machine code once."""
    found: dict[tuple[object, ...], Job] = {}
    for shape, m in itertools.product(shapes, ms):
        tile = chosen(table, shape, m)
        if tile is not None:
            found.setdefault(compiled_as(shape, tile), (shape, m, tile))
    return list(found.values())


def compiled_as(shape: LinearShape | MoeShape, tile: LinearTile | MoeTile) -> tuple[object, ...]:
    """What decides the machine code: shapes and splits are run-time values of the kernels."""
    if isinstance(shape, LinearShape):
        assert isinstance(tile, LinearTile)
        return (shape.form, shape.k // 64 % 4, replace(tile, split=min(tile.split, 2)))
    return (shape.forms, shape.inner, shape.top_k, tile)


def _best_linear(bench: Bench, shape: LinearShape, m: int, tiles: list[LinearTile]) -> Result:
    timed = [(_or_never(lambda t=t: bench.linear_us(m, t)), t) for t in tiles]  # type: ignore[misc]
    best = min(timed, key=lambda p: p[0], default=(float("inf"), None))
    us, tile = best
    if m >= 128:
        x = bench.tokens(m)
        decoded = graph_us(lambda i: linear(x, bench.w[i], bench.counters, None), bench.copies)
        if decoded < us:
            us, tile = decoded, None
    return Result(shape, m, tile, us, len(timed), bench.linear_error(m, tile))


def _best_moe(bench: Bench, shape: MoeShape, m: int, tiles: list[MoeTile]) -> Result:
    """The best w13 and the best w2 of each kind (pairs, early pairs, or groups of bm) joined; the best of those."""
    sets = bench.routing(m)
    joined: list[tuple[float, MoeTile]] = []
    for _, group in itertools.groupby(tiles, key=lambda t: (t.grouped, t.early, t.w13.bm)):
        alike = list(group)
        timed = {t: _or_never(lambda t=t: bench.moe_us(m, t, sets)) for t in alike}  # type: ignore[misc]
        base = alike[0]
        w13 = min((t for t in alike if (t.w2, t.loop) == (base.w2, base.loop)), key=lambda t: timed[t])
        w2 = min((t for t in alike if t.w13 == base.w13), key=lambda t: timed[t])
        both = replace(base, w13=w13.w13, w2=w2.w2, loop=w2.loop)
        joined += [(timed[w13], w13), (timed[w2], w2), (_or_never(lambda b=both: bench.moe_us(m, b, sets)), both)]  # type: ignore[misc]
    us, tile = min(joined, key=lambda p: p[0])
    return Result(shape, m, tile, us, len(tiles) + 1, bench.moe_error(m, tile))


def brief(tile: LinearTile | MoeTile | None) -> str:
    """A tile in a few characters: BN,BM,split,warps,stages."""
    if tile is None:
        return "decode + cuBLAS"
    if isinstance(tile, LinearTile):
        return ",".join(map(str, (tile.bn, tile.bm, tile.split, tile.warps, tile.stages)))
    kind = "grouped" if tile.grouped else "pairs, early" if tile.early else "pairs"
    return f"{kind} w13 {brief(tile.w13)} w2 {brief(tile.w2)} loop {tile.loop}"


def _or_never(time_us: Callable[[], float]) -> float:
    """Infinity for a tile that needs more of a multiprocessor than it has."""
    from triton.runtime.errors import OutOfResources

    try:
        return time_us()
    except OutOfResources:
        return float("inf")


def resources(capability: int) -> Iterator[Resources]:
    """What the kernels need that GLM-5's rank would run at 1 to 1024 tokens, by the rules of choose.py."""
    for m in (1, 16, 64, 256, 1024):
        seen = set()
        for shape in GLM5_LINEARS:
            tile = chosen(Table(), shape, m)
            if isinstance(tile, LinearTile) and compiled_as(shape, tile) not in seen:
                seen.add(compiled_as(shape, tile))
                yield from linear_resources(shape.form, shape.n, shape.k, m, tile, capability)
        moe = GLM5_MOE[0]
        pair = chosen(Table(), moe, m)
        assert isinstance(pair, MoeTile)
        yield from moe_resources(moe.forms, moe.experts, moe.inner, moe.hidden, m, moe.top_k, pair, capability)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plain entry point for machines that have torch and Triton only: python -m service.engines.vllm.kernels.tune."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where to write the table (JSON)")
    parser.add_argument("--linear-m", type=_numbers, default=LINEAR_M, help="numbers of tokens, as 1,16,256")
    parser.add_argument("--moe-m", type=_numbers, default=MOE_M)
    parser.add_argument("--only", default="", help="only the shapes whose name contains this")
    parser.add_argument("--processes", type=int, default=14, help="compilers at a time")
    given = parser.parse_args(arguments)
    linears = [s for s in GLM5_LINEARS if given.only in s.name]
    moes = [s for s in GLM5_MOE if given.only in s.name]

    def say(line: str) -> None:
        print(line, flush=True)  # noqa: T201 - the command's output

    def save(table: Table) -> None:
        given.out.write_text(dump(table, versions()))

    tune(linears, moes, given.linear_m, given.moe_m, given.processes, say, save=save)
    return 0


def versions() -> dict[str, str]:
    """What the figures depend on besides the GPU."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
