"""Time the products on the GPU at hand: CUDA-graph replays over rotated weights, so that no cache flatters them.

`floor_us` is the time to read the bytes that must be read, at the bandwidth given: nothing can be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from service.engines.vllm.kernels import offline
from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels.ahead import Warm
from service.engines.vllm.kernels.choose import LinearTile, MoeTile
from service.engines.vllm.kernels.linear import COUNTERS, dense, launch_linear, linear
from service.engines.vllm.kernels.linear_device import linear_kernel
from service.engines.vllm.kernels.moe import Kernels, launch
from service.engines.vllm.kernels.repack import AFFINE, AFFINE4, BITS, SUBNORMAL, TOP, Packed

CACHE_BYTES = 192 << 20
"""Rotate through at least this much: three times the H200's L2, and more than any other's."""


@dataclass(frozen=True)
class LinearShape:
    """x [M, k] times W [n, k] of `form`."""

    name: str
    form: int
    n: int
    k: int

    def floor_us(self, m: int, tb_per_s: float) -> float:
        return (self.n * self.k * BITS[self.form] / 8 + 2 * m * (self.n + self.k)) / tb_per_s / 1e6


@dataclass(frozen=True)
class MoeShape:
    """top_k of `experts` experts, hidden -> 2 * inner -> hidden."""

    name: str
    forms: tuple[int, int]
    experts: int
    inner: int
    hidden: int
    top_k: int

    def floor_us(self, m: int, tb_per_s: float) -> float:
        """Uniform routing: the expected number of experts met, their bytes, and the tokens' own."""
        met = self.experts * (1 - (1 - self.top_k / self.experts) ** m)
        bits = 2 * BITS[self.forms[0]] + BITS[self.forms[1]]
        return (met * self.inner * self.hidden * bits / 8 + 4 * m * self.hidden) / tb_per_s / 1e6


Job = tuple[LinearShape | MoeShape, int, LinearTile | MoeTile]


def compile_job(job: Job) -> str | None:
    """Compile what `job` launches into Triton's cache; the error's text if it cannot be."""
    shape, m, tile = job
    try:
        if isinstance(shape, LinearShape):
            assert isinstance(tile, LinearTile)
            offline.launch_linear_with(Warm(linear_kernel), shape.form, shape.n, shape.k, m, tile)
        else:
            assert isinstance(tile, MoeTile)
            k = Kernels()
            warm = Kernels(*(Warm(f) for f in (k.prepare, k.w13_pair, k.w13_group, k.w2_pair, k.w2_group, k.sum)))
            offline.launch_moe_with(warm, shape.forms, shape.experts, shape.inner, shape.hidden, m, shape.top_k, tile)
    except Exception as error:  # noqa: BLE001 - whatever a candidate does wrong, it only drops out
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        return f"{shape.name} M={m} {tile}: {error!r}"[:400]
    return None


def precompile(jobs: Sequence[Job], processes: int) -> list[str | None]:
    """Compile all jobs in parallel; one entry a job, its error or None."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_job, jobs, chunksize=1))


def graph_us(call: Callable[[int], object], copies: int, replays: int = 7) -> float:
    """Median time of call(i), i cycling through `copies`, in one CUDA graph; microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 16 // copies)
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i in range(copies):
                call(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / copies / rounds)
    return float(sorted(times)[len(times) // 2])


def random_packed(form: int, n: int, k: int, experts: int, gen: torch.Generator) -> Packed:
    """Random codes with scales of a usual size (weights around 0.02), made where the generator lives."""
    meta = offline.meta_packed(form, n, k, experts)

    def plane(t: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, 256, t.shape, dtype=torch.uint8, device=gen.device, generator=gen)

    fields = 4 if meta.scales.dtype == torch.int64 else 2
    scales = torch.rand((*meta.scales.shape, fields), device=gen.device, generator=gen) * 0.5 + 0.5
    scales *= 2.0**TOP
    if form in AFFINE:
        # the offset centres the codes: weights of both signs, as in real files
        scales[..., 1::2] *= -(2.0 ** -SUBNORMAL[form]) * (7 if form == AFFINE4 else 15)
    packed = scales.half().view(meta.scales.dtype)[..., 0]
    return Packed(form, n, k, 2.0**-4, plane(meta.low), plane(meta.high), packed)


def random_raw(rows: int, k: int, ggml_type: int, spread: float = 1.0, device: str = "cuda") -> torch.Tensor:
    """Random blocks with weights of about 0.02; `spread` > 1 makes the blocks' scales differ by up to that factor.

    uint8 [rows, bytes] of GGML type `ggml_type`.
    """
    per, size = ref.BLOCK[ggml_type]
    raw = torch.randint(0, 256, (rows, k // per, size), dtype=torch.uint8, device=device)
    typical = {ref.Q8_0: 2e-4, ref.Q6_K: 2e-5, ref.IQ4_XS: 2e-5, ref.IQ4_NL: 3e-4, ref.Q4_K: 1e-4, ref.Q5_K: 5e-5}

    def halves(size: float) -> torch.Tensor:
        r = torch.rand(rows, k // per, device=device)
        wide = torch.exp((torch.rand_like(r) * 2 - 1) * float(torch.log(torch.tensor(spread))) / 2)
        return ((r * 0.75 + 0.25) * size * wide).half().view(torch.uint8).view(rows, k // per, 2)

    d = halves(typical.get(ggml_type, 2e-3))
    if ggml_type == ref.Q6_K:
        raw[..., 208:210] = d
    else:
        raw[..., 0:2] = d
    if ggml_type in (ref.Q4_1, ref.Q5_1, ref.Q4_K, ref.Q5_K):
        minimum = halves(typical.get(ggml_type, 2e-3) * 7)
        raw[..., 2:4] = minimum
        if ggml_type in (ref.Q4_1, ref.Q5_1):
            raw[..., 3] |= 128
    return raw.view(rows, -1)


@dataclass
class Bench:
    """Data for one shape, made once: enough rotated weights (linears) or token sets (experts)."""

    shape: LinearShape | MoeShape
    seed: int = 0

    def __post_init__(self) -> None:
        gen = torch.Generator("cuda").manual_seed(self.seed)
        self.gen = gen
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")
        s = self.shape
        if isinstance(s, LinearShape):
            size = s.n * s.k * BITS[s.form] / 8
            self.copies = max(2, min(64, round(CACHE_BYTES / size)))
            self.w = [random_packed(s.form, s.n, s.k, 1, gen) for _ in range(self.copies)]
        else:
            self.w13 = random_packed(s.forms[0], 2 * s.inner, s.hidden, s.experts, gen)
            self.w2 = random_packed(s.forms[1], s.hidden, s.inner, s.experts, gen)
            self.copies = 16

    def tokens(self, m: int) -> torch.Tensor:
        k = self.shape.k if isinstance(self.shape, LinearShape) else self.shape.hidden
        return torch.randn(m, k, device="cuda", generator=self.gen).bfloat16()

    def linear_us(self, m: int, tile: LinearTile) -> float:
        assert isinstance(self.shape, LinearShape)
        x = self.tokens(m)
        out = torch.empty(m, self.shape.n, dtype=x.dtype, device="cuda")
        return graph_us(lambda i: launch_linear(linear_kernel, x, self.w[i], out, self.counters, tile), self.copies)

    def routing(self, m: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(weights, ids) of `copies` batches; each token's experts are drawn without repetition, uniformly."""
        s = self.shape
        assert isinstance(s, MoeShape)
        sets = []
        for _ in range(self.copies):
            scores = torch.rand(m, s.experts, device="cuda", generator=self.gen)
            w, ids = scores.topk(s.top_k, dim=1)
            sets.append((w / w.sum(1, keepdim=True), ids.int()))
        return sets

    def linear_error(self, m: int, tile: LinearTile | None) -> float:
        """||out - ref|| / ||ref||, ref in float64 from the weights that the kernels decode to."""
        x = self.tokens(m)
        want = x.double() @ dense(self.w[0], torch.float64).T
        return relative(linear(x, self.w[0], self.counters, tile), want)

    def moe_error(self, m: int, tile: MoeTile) -> float:
        """As `linear_error`, for all experts."""
        x, (w, ids) = self.tokens(m), self.routing(m)[0]
        out, want = torch.empty_like(x), torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        launch(Kernels(), x, self.w13, self.w2, w, ids, None, self.counters, out, tile)
        for e in range(self.w13.experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            if token.numel():
                both = x[token].double() @ dense(one_expert(self.w13, e), torch.float64).T
                h = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2] * w[token, slot].double()[:, None]
                want.index_add_(0, token, h @ dense(one_expert(self.w2, e), torch.float64).T)
        return relative(out, want)

    def skewed_us(self, m: int, tile: MoeTile) -> float:
        """All tokens to the same top_k experts (another set in each batch)."""
        assert isinstance(self.shape, MoeShape)
        sets = [(w, ids[:1].expand(m, -1).contiguous()) for w, ids in self.routing(m)]
        return self.moe_us(m, tile, sets)

    def moe_us(self, m: int, tile: MoeTile, sets: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> float:
        assert isinstance(self.shape, MoeShape)
        x = self.tokens(m)
        out, sets = torch.empty_like(x), sets or self.routing(m)

        def call(i: int) -> None:
            w, ids = sets[i]
            launch(Kernels(), x, self.w13, self.w2, w, ids, None, self.counters, out, tile)

        return graph_us(call, len(sets))


def one_expert(w: Packed, e: int) -> Packed:
    part = slice(e, e + 1)
    return Packed(w.form, w.n, w.k, w.alpha, w.low[part], w.high[part], w.scales[part])


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; infinite if `got` is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want).norm() / want.norm())


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call, the GPU's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
