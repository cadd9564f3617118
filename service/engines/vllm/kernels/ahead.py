"""Compile the kernels of a loaded model ahead, in parallel processes that need no GPU: into Triton's cache on disk.

Left alone Triton compiles a kernel when a shape first comes, one after the other, while a start waits (or a user, where
the warm-up missed the shape). Here every tile that any number of tokens can choose is compiled before the first step.
A process takes every `of`-th job: python -m service.engines.vllm.kernels.ahead < a Share as JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from service.engines.vllm.kernels import offline
from service.engines.vllm.kernels.choose import LinearTile, MoeTile, Table, linear_tile, moe_tile, table_for
from service.engines.vllm.kernels.linear import COUNTERS, Decoding, by_cublas, decode_rows, launch_linear, unit
from service.engines.vllm.kernels.linear_device import linear_kernel
from service.engines.vllm.kernels.moe import CHUNK, Kernels, launch

log = logging.getLogger("vllm.glm5")

LIMIT_S = 900.0
"""Longest that the compilers may take. What is not compiled then is compiled when it is first met."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x [M, k] times W [n, k] of `form`, for M up to `most`."""

    form: int
    n: int
    k: int
    most: int


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of W [n, k] of `form`, by ids of `ids` type."""

    form: int
    n: int
    k: int
    ids: str


@dataclass(frozen=True, slots=True)
class Experts:
    """top_k of `experts` experts, hidden -> 2 * inner -> hidden. `mapped`: they are one rank's of many."""

    form13: int
    form2: int
    experts: int
    inner: int
    hidden: int
    top_k: int
    mapped: bool
    most: int


@dataclass(frozen=True, slots=True)
class Model:
    """What is compiled for: the GPU, the activations' type, and the products of one rank."""

    device: str
    processors: int
    capability: int
    dtype: str
    linears: tuple[Linear, ...]
    embeddings: tuple[Embedding, ...]
    experts: tuple[Experts, ...]


Job = tuple[Linear | Embedding | Experts, int, LinearTile | MoeTile | None]
"""A product, a number of tokens that chooses this tile, and the tile (None: decode once and use cuBLAS)."""


def jobs(model: Model) -> list[Job]:
    """One for each tile that some number of tokens chooses, in an order that is the same in every process."""
    table = table_for(model.device, model.processors)
    found: list[Job] = []
    for linear in model.linears:
        found += [(linear, m, tile) for m, tile in _linear_tiles(table, linear)]
    found += [(embedding, 1, None) for embedding in model.embeddings]
    for experts in model.experts:
        found += [(experts, m, tile) for m, tile in _expert_tiles(table, experts)]
    return found


def _linear_tiles(table: Table, w: Linear) -> Iterator[tuple[int, LinearTile | None]]:
    rows, pieces = -(-w.n // 64) * 64, w.k // 64
    seen: set[object] = set()
    for m in range(1, w.most + 1):
        tile = linear_tile(table, w.form, rows, pieces, unit(w.form, pieces), m)
        # How often K is split is an argument; whether it is, is compiled in.
        kind = tile and (tile.bn, tile.bm, tile.split > 1, tile.warps, tile.stages)
        if kind not in seen:
            seen.add(kind)
            yield m, tile


def _expert_tiles(table: Table, w: Experts) -> Iterator[tuple[int, MoeTile]]:
    pieces = w.hidden // 64
    units = pieces // unit(w.form13, pieces)
    seen: set[object] = set()
    for m in range(1, min(w.most, CHUNK) + 1):
        tile = moe_tile(table, (w.form13, w.form2), w.experts, w.inner, w.hidden, m, w.top_k, units)
        both = [(t.bn, t.bm, t.split > 1, t.warps, t.stages) for t in (tile.w13, tile.w2)]
        kind = (tile.grouped, tile.loop, tile.early, m * w.top_k > 512, *both)
        if kind not in seen:
            seen.add(kind)
            yield m, tile


def compile_job(job: Job, dtype: torch.dtype) -> None:
    """Into Triton's cache, by the launchers themselves on tensors without data."""
    product, m, tile = job

    def meta(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    counters = meta(COUNTERS, kind=torch.int32)
    if isinstance(product, Experts):
        assert isinstance(tile, MoeTile)
        p, k = product, Kernels()
        warm = Kernels(*(Warm(f) for f in (k.prepare, k.w13_pair, k.w13_group, k.w2_pair, k.w2_group, k.sum)))
        w13 = offline.meta_packed(p.form13, 2 * p.inner, p.hidden, p.experts)
        w2 = offline.meta_packed(p.form2, p.hidden, p.inner, p.experts)
        weights, ids = meta(m, p.top_k, kind=torch.float32), meta(m, p.top_k, kind=torch.int32)
        chosen = meta(p.experts, kind=torch.int32) if p.mapped else None
        launch(warm, meta(m, p.hidden), w13, w2, weights, ids, chosen, counters, meta(m, p.hidden), tile)
        return
    w, d = offline.meta_packed(product.form, product.n, product.k), Decoding()
    if isinstance(product, Embedding):
        ids = meta(m, kind=getattr(torch, product.ids))
        decode_rows(Warm(d.rows), w, 0, m, meta(m, product.k), w.alpha, ids)
    elif isinstance(tile, LinearTile):
        launch_linear(Warm(linear_kernel), meta(m, product.k), w, meta(m, product.n), counters, tile)
    else:
        warm_decoding = Decoding(Warm(d.rows), Warm(d.scale), Warm(d.unscale))
        by_cublas(warm_decoding, meta(m, product.k), w, meta(m, product.n))


@dataclass(frozen=True)
class Warm:
    """Stands in for a kernel in a launcher: compiles it for Triton's active target, without data."""

    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def warm(*args: Any, **kwargs: Any) -> None:
            mock = [a.dtype if torch.is_tensor(a) else a for a in args]
            self.kernel.warmup(*mock, grid=(1,), **kwargs)

        return warm


@dataclass(frozen=True)
class Absent:
    """A driver for Triton that knows what GPU it is about and has none."""

    capability: int

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compile_share(model: Model, share: int, of: int) -> int:
    """Compile every `of`-th job from the `share`-th on, in this process, which then has no GPU. Returns how many."""
    from triton.runtime import driver

    driver.set_active(Absent(model.capability))
    dtype = getattr(torch, model.dtype)
    mine = jobs(model)[share::of]
    for job in mine:
        compile_job(job, dtype)
    return len(mine)


def key(model: Model) -> str:
    """Of what would be compiled: the model's products, the kernels' source, and Triton."""
    import triton

    digest = hashlib.sha256(json.dumps(asdict(model), sort_keys=True).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")) + sorted(Path(__file__).parent.glob("tuned/*.json")):
        digest.update(source.read_bytes())
    digest.update(triton.__version__.encode())
    return digest.hexdigest()[:24]


def compile_ahead(model: Model, rank: int, ranks: int, processes: int) -> float:
    """This rank's part of the jobs, `processes` at a time; returns the seconds it took. Nothing is done where an
    earlier start did it: a note beside Triton's kernels says so, and goes with them. A compiler that fails is logged;
    what it would have made is then compiled when it is first met."""
    from triton import knobs

    began, place = time.monotonic(), Path(knobs.cache.dir)
    note = place / f"glm5-ahead-{key(model)}-{rank}-of-{ranks}"
    if note.exists():
        return 0.0
    running = []
    for process in range(processes):
        told = {"model": asdict(model), "share": rank * processes + process, "of": ranks * processes}
        one = subprocess.Popen(
            [sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert one.stdin is not None
        one.stdin.write(json.dumps(told))
        one.stdin.close()
        one.stdin = None  # communicate() would flush it
        running.append(one)
    failed = ""
    for one in running:
        try:
            _, errors = one.communicate(timeout=max(1.0, LIMIT_S - (time.monotonic() - began)))
            failed = errors[-500:] if one.returncode else failed
        except subprocess.TimeoutExpired:
            one.kill()
            one.communicate()
            failed = f"not done after {LIMIT_S:.0f} s"
    if failed:
        log.warning("kernels could not be compiled ahead: %s", failed)
    else:
        place.mkdir(parents=True, exist_ok=True)
        note.touch()
    return time.monotonic() - began


def main() -> None:
    told = json.load(sys.stdin)
    tree = told["model"]
    tree["linears"] = tuple(Linear(**one) for one in tree["linears"])
    tree["embeddings"] = tuple(Embedding(**one) for one in tree["embeddings"])
    tree["experts"] = tuple(Experts(**one) for one in tree["experts"])
    compile_share(Model(**tree), told["share"], told["of"])


if __name__ == "__main__":
    main()
