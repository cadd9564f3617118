"""Every type, shape and number of tokens against float64, on the GPU at hand. Run: python -m tests.gpu.kernels_check

Prints one line a type and the worst error; exits 1 if any exceeds LIMIT or is not finite. test_kernels.py runs it too.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass, replace

import torch

from service.engines.vllm.kernels import choose, linear, measure, moe
from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels import repack as rp

LIMIT = 2.2e-3
"""||out - ref|| / ||ref|| in float64; rounding the output to bf16 alone is 1.65e-3."""

MANY = (1, 2, 3, 8, 9, 17, 64, 100, 256, 512, 700, 1024)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    bad = not bool(torch.isfinite(got).all())
    return float("inf") if bad else float((got.double() - want).norm() / want.norm())


@dataclass
class Run:
    """Worst errors by label, and what was compiled beforehand."""

    table: choose.Table
    worst: dict[str, float]

    def note(self, label: str, value: float) -> None:
        self.worst[label] = max(self.worst.get(label, 0.0), value)

    def linear(self, x: torch.Tensor, w: rp.Packed, want: torch.Tensor, label: str) -> None:
        counters = torch.zeros(linear.COUNTERS, dtype=torch.int32, device="cuda")
        step = linear.unit(w.form, w.pieces)
        tile = choose.linear_tile(self.table, w.form, w.rows, w.pieces, step, x.shape[0])
        self.note(label, error(linear.linear(x, w, counters, tile), want))
        assert int(counters.abs().sum()) == 0, "split-K left its counters dirty"


def jobs(table: choose.Table) -> list[measure.Job]:
    """What the checks below will launch, to be compiled in parallel first."""
    found: dict[tuple[object, ...], measure.Job] = {}
    for t, (n, k) in itertools.product(ref.BLOCK, SHAPES):
        if k % ref.BLOCK[t][0]:
            continue
        pieces, rows = -(-k // (64 * rp.UNIT[rp.FORM[t]])) * rp.UNIT[rp.FORM[t]], -(-n // 64) * 64
        for m in MANY:
            step = linear.unit(rp.FORM[t], pieces)
            tile = choose.linear_tile(table, rp.FORM[t], rows, pieces, step, m)
            if tile is not None and k == pieces * 64:
                found[(rp.FORM[t], n, k, tile)] = (measure.LinearShape("check", rp.FORM[t], n, k), m, tile)
    for (t13, t2), m in itertools.product(PAIRS, MOE_M):
        forms = (rp.FORM[t13], rp.FORM[t2])
        tile = moe_tile(table, forms, m)
        found[(forms, tile)] = (measure.MoeShape("check", forms, E, INNER, HIDDEN, TOP_K), m, tile)
    return list(found.values())


SHAPES = ((2624, 6144), (6144, 2048), (576, 1536), (960, 576), (136, 160))
E, INNER, HIDDEN, TOP_K = 32, 256, 2048, 8
PAIRS = ((ref.Q4_K, ref.Q5_K), (ref.Q4_K, ref.Q6_K), (ref.Q8_0, ref.Q8_0), (ref.IQ4_XS, ref.Q4_1), (ref.Q6_K, ref.Q5_0))
MOE_M = (1, 2, 7, 16, 64, 256, 1024)


def moe_tile(table: choose.Table, forms: tuple[int, int], m: int) -> choose.MoeTile:
    units = HIDDEN // 64 // linear.unit(forms[0], HIDDEN // 64)
    return choose.moe_tile(table, forms, E, INNER, HIDDEN, m, TOP_K, units)


def check_linears(run: Run) -> None:
    for t, (n, k) in itertools.product(ref.BLOCK, SHAPES):
        if k % ref.BLOCK[t][0]:
            continue
        raw = measure.random_raw(n, k, t, spread=64)
        w, exact = rp.repack(raw, t), ref.dequantize(raw, t)
        run.note(f"dense {ref.NAMES[t]}", error(linear.dense(w, torch.float32), exact))
        ids = torch.randint(0, n, (37,), device="cuda")
        run.note(f"embed {ref.NAMES[t]}", error(linear.embed(ids, w, torch.bfloat16), exact[ids]))
        for m in MANY:
            x = torch.randn(m, k, device="cuda").bfloat16()
            run.linear(x, w, x.double() @ exact.T, f"linear {ref.NAMES[t]}")


def check_experts(run: Run) -> None:
    for t13, t2 in PAIRS:
        forms = (rp.FORM[t13], rp.FORM[t2])
        raw13 = measure.random_raw(E * 2 * INNER, HIDDEN, t13, 8).view(E, 2 * INNER, -1)
        raw2 = measure.random_raw(E * HIDDEN, INNER, t2, 8).view(E, HIDDEN, -1)
        w13, w2 = rp.repack(raw13, t13, interleave=True), rp.repack(raw2, t2)
        exact13 = ref.dequantize(raw13.flatten(0, 1), t13).view(E, 2 * INNER, HIDDEN)
        exact2 = ref.dequantize(raw2.flatten(0, 1), t2).view(E, HIDDEN, INNER)
        counters = torch.zeros(linear.COUNTERS, dtype=torch.int32, device="cuda")
        label = f"experts {ref.NAMES[t13]}/{ref.NAMES[t2]}"
        for m, kind in itertools.product(MOE_M, ("uniform", "one expert", "other rank", "huge", "small", "tiny")):
            x = torch.randn(m, HIDDEN, device="cuda").bfloat16()
            if kind == "huge":
                x[::2] *= 1e6
            if kind in ("small", "tiny"):
                x[::2] *= 1e-2 if kind == "small" else 1e-5
            ids = torch.rand(m, E, device="cuda").topk(TOP_K, 1).indices.int()
            if kind == "one expert":
                ids = ids.fill_(5)
            weights = torch.rand(m, TOP_K, device="cuda") + 0.1
            expert_map = None
            if kind == "other rank":
                expert_map = torch.full((E,), -1, dtype=torch.int32, device="cuda")
                expert_map[::2] = torch.arange(E // 2, dtype=torch.int32, device="cuda")
            tile = moe_tile(run.table, forms, m)
            got = moe.experts(x, w13, w2, weights, ids, expert_map, counters, lambda _, tile=tile: tile)
            want = oracle(x, exact13, exact2, weights, ids if expert_map is None else expert_map[ids.long()])
            # judged token by token: a huge token must not hide a wrong small one
            kept = want.norm(dim=1) > 0
            each = (got.double() - want).norm(dim=1)[kept] / want.norm(dim=1)[kept]
            bad = not bool(torch.isfinite(got).all()) or bool(got[~kept].any())
            whole = float("inf") if bad else float((each.square().mean()).sqrt()) if int(kept.sum()) else 0.0
            run.note(f"{label} {kind}{', grouped' if tile.grouped else ''}", whole)
            assert int(counters.abs().sum()) == 0, "a kernel left its counters dirty"


def oracle(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """float64, expert by expert."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64, device=x.device)
    for e in range(w13.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if token.numel():
            gate, up = (x[token].double() @ w13[e].T).chunk(2, 1)
            h = torch.nn.functional.silu(gate) * up * weights[token, slot].double()[:, None]
            out.index_add_(0, token, h @ w2[e].T)
    return out


def check_extremes(run: Run) -> None:
    """Zero, denormal and huge scales; tokens past fp16's range; all must stay finite and right."""
    for t in ref.BLOCK:
        for name, d in (("zero", 0.0), ("denormal", 6e-8), ("large", 8.0)):
            raw = measure.random_raw(64, 512, t)
            blocks = raw.view(64, -1, ref.BLOCK[t][1])
            half = torch.tensor([d], dtype=torch.float16, device="cuda").view(torch.uint8)
            if t == ref.Q6_K:
                blocks[..., 208:210] = half
            else:
                blocks[..., 0:2] = half
            w, exact = rp.repack(raw, t), ref.dequantize(raw, t)
            x = torch.randn(3, 512, device="cuda").bfloat16()
            want = x.double() @ exact.T
            if float(want.norm()) > 0:
                run.linear(x, w, want, f"scale {name}")
        raw = measure.random_raw(64, 512, t)
        w, exact = rp.repack(raw, t), ref.dequantize(raw, t)
        for name, size in (("1e5", 1e5), ("1e30", 1e30), ("1e-6", 1e-6)):
            for m in (3, 600):
                x = (torch.randn(m, 512, device="cuda") * size).bfloat16()
                run.linear(x, w, x.double() @ exact.T, f"tokens {name}")


def check_nan(run: Run) -> None:
    """A token of NaN answers NaN, and no other token's answer changes by a bit: linears, experts in both modes."""
    raw = measure.random_raw(512, HIDDEN, ref.Q6_K)
    w, counters = rp.repack(raw, ref.Q6_K), torch.zeros(linear.COUNTERS, dtype=torch.int32, device="cuda")
    gen = torch.Generator("cuda").manual_seed(5)
    forms = (rp.FORM[ref.Q4_K], rp.FORM[ref.Q6_K])
    w13 = measure.random_packed(forms[0], 2 * INNER, HIDDEN, E, gen)
    w2 = measure.random_packed(forms[1], HIDDEN, INNER, E, gen)
    for m in (3, 256):
        x = torch.randn(m, HIDDEN, device="cuda").bfloat16()
        spoilt = x.clone()
        spoilt[1, 77] = float("nan")
        ids = torch.rand(m, E, device="cuda").topk(TOP_K, 1).indices.int()
        weights = torch.rand(m, TOP_K, device="cuda") + 0.1
        tile = choose.linear_tile(run.table, w.form, w.rows, w.pieces, linear.unit(w.form, w.pieces), m)
        pair = moe_tile(run.table, forms, m)
        for label, answer in (
            ("linear", lambda x, tile=tile: linear.linear(x, w, counters, tile)),
            (
                f"experts{', grouped' if pair.grouped else ''}",
                lambda x, ids=ids, weights=weights, pair=pair: moe.experts(
                    x, w13, w2, weights, ids, None, counters, lambda _: pair
                ),
            ),
        ):
            want, got = answer(x), answer(spoilt)
            others = torch.arange(m, device="cuda") != 1
            right = bool(got[1].isnan().all()) and torch.equal(got[others], want[others])
            run.note(f"a token of NaN, {label}", 0.0 if right else float("inf"))


def early_tile(table: choose.Table, forms: tuple[int, int]) -> choose.MoeTile:
    """The one that GLM-5's experts on 8 GPUs are launched early with, where the table has it and the sizes here allow
    it; else one like it."""
    found = table.moe.get(choose.moe_key(*forms, 256, 256, 6144), {}).get(1)
    units = HIDDEN // 64 // linear.unit(forms[0], HIDDEN // 64)
    if (
        found is not None
        and found.early
        and 2 * INNER % found.w13.bn == 0
        and units % found.w13.split == 0
        and HIDDEN % (found.w2.bn * found.loop) == 0
    ):
        return found
    return choose.MoeTile(False, choose.LinearTile(64, 8, 2, 2, 3), choose.LinearTile(32, 8, 1, 2, 2), 1, True)


def check_early(run: Run) -> None:
    """Experts launched early between plain linears on two streams, in one CUDA graph, each fed by the one before. No
    bit may differ from the same launched one after the other: a kernel that reads too early gives other bits."""
    if torch.cuda.get_device_capability() < (9, 0):
        return
    forms = (rp.FORM[ref.Q4_K], rp.FORM[ref.Q5_K])
    gen = torch.Generator("cuda").manual_seed(7)
    square = [measure.random_packed(forms[0], HIDDEN, HIDDEN, 1, gen) for _ in range(4)]
    w13 = measure.random_packed(forms[0], 2 * INNER, HIDDEN, E, gen)
    w2 = measure.random_packed(forms[1], HIDDEN, INNER, E, gen)
    counters = torch.zeros(3, linear.COUNTERS, dtype=torch.int32, device="cuda")
    start = torch.randn(2, HIDDEN, device="cuda", generator=gen).bfloat16()
    shipped = early_tile(run.table, forms)
    beside = torch.cuda.Stream()

    def chain(early: bool) -> torch.Tensor:
        tile = choose.LinearTile(32, 8, 4, 2, 3)
        pair = replace(shipped, early=early)
        x = start.clone()
        for i in range(24):
            here = torch.cuda.current_stream()
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                z = linear.linear(x, square[i % 2], counters[0], tile)
            y = linear.linear(x, square[2 + i % 2], counters[1], tile)
            here.wait_stream(beside)
            x = torch.nn.functional.rms_norm(y + z, (HIDDEN,))
            weights, ids = torch.softmax(x[:, :E].float(), 1).topk(TOP_K, 1)
            x = x + moe.experts(x, w13, w2, weights, ids.int(), None, counters[2], lambda _: pair)
        return x

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = chain(False)
        chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(got, want)
        run.note("early launch, other bits", 0.0 if same else float("inf"))


def main() -> int:
    start = time.time()
    torch.manual_seed(time.time_ns() % (1 << 31))
    p = torch.cuda.get_device_properties(0)
    table = choose.table_for(p.name, p.multi_processor_count)
    run = Run(table, {})
    todo = jobs(table)
    failed = [e for e in measure.precompile(todo, 14) if e]
    print(f"compiled {len(todo)} in {time.time() - start:.0f} s, {len(failed)} failed", failed[:3], flush=True)
    for part in (check_linears, check_experts, check_extremes, check_nan, check_early):
        part(run)
        print(f"{part.__name__} done at {time.time() - start:.0f} s", flush=True)
    wrong = {k: v for k, v in run.worst.items() if not v <= LIMIT}
    for label, value in sorted(run.worst.items()):
        print(f"{label:36s} {value:.2e}{'  <-- over the limit' if label in wrong else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
