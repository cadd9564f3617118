"""A decode step of real-size GLM-5 layers (one rank of TP=8, bf16) on one GPU, against the step model.

    python3 benchmarks/planning_step_gpu.py            # one H200, under 90 s
    python3 benchmarks/planning_step_gpu.py --device cpu --tiny   # the arithmetic of this script, no measurement

Every layer has its own weights (nothing stays in cache between steps), routing is drawn uniformly, the KV cache holds
CONTEXT tokens a request, and the step runs as one CUDA graph. There is no all-reduce: one rank is measured. The model
gets the GPU's plain-read bandwidth (measured here first) and ONE fitted number, the share of it that kernels reach,
from the time at FIT_AT tokens; all other batch sizes are predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F

from service.planning import glm5, hardware
from service.planning.fit import least_squares
from service.planning.settings import Calibration, EngineSettings
from service.planning.shape import experts_touched, from_tensors
from service.planning.step_model import StepModel

TP, LAYERS, CONTEXT, FIT_AT = 8, 6, 1024, 8
TWO_AT = (1, 64)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Tensors = dict[str, Any]


class Rank:
    """LAYERS MoE layers of one TP rank, and the head. `scale` shrinks every width for a dry run on a CPU."""

    def __init__(self, device: str, scale: int = 1) -> None:
        self.device = device
        self.hidden, self.q_lora, self.kv_lora = glm5.HIDDEN // scale, glm5.Q_LORA // scale, glm5.KV_LORA // scale
        self.heads, self.nope, self.rope, self.v = glm5.HEADS // TP, glm5.QK_NOPE, glm5.QK_ROPE, glm5.V_HEAD
        self.ffn, self.experts, self.top_k = glm5.EXPERT_FFN // TP, glm5.EXPERTS // scale, glm5.TOP_K
        self.vocab = glm5.VOCAB // TP // scale
        self.layers = [self._layer() for _ in range(LAYERS)]
        self.head = self._weight(self.vocab, self.hidden)

    def _weight(self, *shape: int) -> Any:
        w = torch.empty(*shape, dtype=torch.bfloat16, device=self.device)
        return w.normal_(0, 0.02)

    def _layer(self) -> Tensors:
        w = self._weight
        return {
            "q_a": w(self.q_lora, self.hidden),
            "kv_a": w(self.kv_lora + self.rope, self.hidden),
            "q_b": w(self.heads * (self.nope + self.rope), self.q_lora),
            "k_b": w(self.heads, self.nope, self.kv_lora),
            "v_b": w(self.heads, self.kv_lora, self.v),
            "o": w(self.hidden, self.heads * self.v),
            "router": w(self.experts, self.hidden).float(),
            "w13": w(self.experts, self.hidden, 2 * self.ffn),
            "w2": w(self.experts, self.ffn, self.hidden),
            "s13": w(2 * self.ffn, self.hidden),
            "s2": w(self.hidden, self.ffn),
        }

    def caches(self, batch: int) -> list[Any]:
        return [self._weight(batch, CONTEXT, self.kv_lora + self.rope) for _ in range(LAYERS)]

    def step(self, x: Any, caches: list[Any], routes: list[Any]) -> Any:
        """One token for each of M requests: x (M, hidden) -> logits of this rank's part of the vocabulary."""
        for w, cache, chosen in zip(self.layers, caches, routes, strict=True):
            x = x + self._attention(F.rms_norm(x, (self.hidden,)), w, cache)
            x = x + self._moe(F.rms_norm(x, (self.hidden,)), w, chosen)
        return F.rms_norm(x, (self.hidden,)) @ self.head.T

    def _attention(self, x: Any, w: Tensors, cache: Any) -> Any:
        """MLA with absorbed projections: every head reads the same latent cache."""
        m = x.shape[0]
        q = F.rms_norm(x @ w["q_a"].T, (self.q_lora,)) @ w["q_b"].T
        q = q.view(m, self.heads, self.nope + self.rope)
        latent = x @ w["kv_a"].T
        cache[:, -1] = latent  # the new token's entry
        absorbed = torch.bmm(q[..., : self.nope].transpose(0, 1), w["k_b"]).transpose(0, 1)
        query = torch.cat([absorbed, q[..., self.nope :]], -1)
        scores = torch.bmm(query, cache.transpose(1, 2)) * (self.nope + self.rope) ** -0.5
        mixed = torch.bmm(scores.float().softmax(-1).bfloat16(), cache[..., : self.kv_lora])
        out = torch.bmm(mixed.transpose(0, 1), w["v_b"]).transpose(0, 1).reshape(m, -1)
        return out @ w["o"].T

    def _moe(self, x: Any, w: Tensors, chosen: Any) -> Any:
        """`chosen` (M, top_k): expert ids drawn beforehand; the router still runs and gives the weights."""
        m = x.shape[0]
        weights = (x.float() @ w["router"].T).sigmoid().gather(1, chosen)
        flat = chosen.flatten()
        order = flat.argsort()
        rows = x[order // self.top_k]
        ends = (
            torch.bincount(flat, minlength=self.experts).cumsum(0).to(torch.int32) if x.device.type == "cpu" else None
        )
        if ends is None:
            ends = torch.searchsorted(flat[order], torch.arange(self.experts, device=x.device), right=True).to(
                torch.int32
            )
        gate, up = grouped(rows, w["w13"], ends).chunk(2, -1)
        out = grouped(F.silu(gate) * up, w["w2"], ends)
        back = torch.empty_like(out).index_copy_(0, order, out).view(m, self.top_k, -1)
        routed = (back * weights.bfloat16()[..., None]).sum(1)
        gate, up = (x @ w["s13"].T).chunk(2, -1)
        return routed + (F.silu(gate) * up) @ w["s2"].T


def grouped(rows: Any, weights: Any, ends: Any) -> Any:
    """rows[i] @ weights[its expert]; rows are sorted by expert, ends[e] is the row after expert e's last."""
    if rows.device.type == "cuda":
        return torch._grouped_mm(rows, weights, offs=ends)
    parts, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        parts.append(rows[begin:end] @ weights[expert])
        begin = end
    return torch.cat(parts)


def read_bandwidth(device: str) -> float:
    """Bytes per second of a plain read: the best of a sum over 4 GiB of float32."""
    x = torch.ones(1 << 30, device=device)
    return x.numel() * 4 / min(timed(x.sum) for _ in range(5))


def timed(run: Callable[[], Any]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def measure(rank: Rank, batch: int, seed: int) -> tuple[float, float]:
    """(seconds of a step in a CUDA graph, mean experts touched a layer). Median of 15 replays."""
    generator = torch.Generator().manual_seed(seed)
    routes = [
        torch.stack([torch.randperm(rank.experts, generator=generator)[: rank.top_k] for _ in range(batch)])
        for _ in range(LAYERS)
    ]
    touched = sum(len(r.unique()) for r in routes) / LAYERS
    routes = [r.to(rank.device) for r in routes]
    caches = rank.caches(batch)
    x = torch.randn(batch, rank.hidden, device=rank.device).bfloat16()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            rank.step(x, caches, routes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = rank.step(x, caches, routes)
    for _ in range(3):
        graph.replay()
    times = sorted(timed(graph.replay) for _ in range(15))
    assert torch.isfinite(logits).all(), "the step's arithmetic broke"
    return times[len(times) // 2], touched


def model(bandwidth: float, share: float, layer_s: float | None = None) -> StepModel:
    """The step model of exactly these layers: LAYERS MoE layers and the head, all bf16, no all-reduce. `layer_s`:
    fixed seconds a layer (None: 24 launches of 2 µs, set before anything was measured)."""
    mix = replace(glm5.NVFP4, types=glm5.PLAIN)
    shape = from_tensors(*glm5.some_layers(mix, glm5.DENSE_LAYERS, LAYERS))
    gpu = replace(hardware.gpu("h200"), bandwidth=bandwidth, stream=1.0)
    box = replace(hardware.box("1x-h200"), gpu=gpu, gpus=TP)  # eight ranks, of which one is here; link "none": 0 s
    flat = ((1.0, share),)
    calibration = Calibration(moe_efficiency=flat, linear_efficiency=share, host_step_s=0.0, host_request_s=0.0)
    if layer_s is None:  # norms, rope-free attention parts, top-k sort, gather, scatter, sums
        calibration = replace(calibration, launches_per_layer=24.0)
    else:
        calibration = replace(calibration, launches_per_layer=0.0, layer_overhead_s=layer_s)
    settings = EngineSettings(tp=TP, kernels="nvfp4-cutlass", capture_sizes=BATCHES, slots=max(BATCHES))
    return StepModel(shape, box, settings, calibration)


def fit_share(bandwidth: float, batch: int, seconds: float) -> float:
    """The share with which the model's step at `batch` takes `seconds` (bisection)."""
    low, high = 0.02, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        predicted = model(bandwidth, middle).decode_step_s(batch, batch * CONTEXT)
        low, high = (middle, high) if predicted > seconds else (low, middle)
    return (low + high) / 2


def fit_two(bandwidth: float, seconds: dict[int, float]) -> tuple[float, float]:
    """(share, fixed seconds a layer) that meet the times at TWO_AT."""

    def residuals(values: Sequence[float]) -> list[float]:
        trial = model(bandwidth, values[0], values[1])
        return [math.log(trial.decode_step_s(m, m * CONTEXT) / seconds[m]) for m in TWO_AT]

    share, layer_s = least_squares(residuals, (0.5, 60e-6))
    return share, layer_s


def show_two(bandwidth: float, seconds: dict[int, float]) -> None:
    """Two constants instead of one: what the model's form can do."""
    share, layer_s = fit_two(bandwidth, seconds)
    prediction = model(bandwidth, share, layer_s)
    print(f"fitted at M={TWO_AT[0]} and {TWO_AT[1]}: share {share:.0%}, {layer_s * 1e6:.0f} us a layer")
    errors = []
    for m, measured in seconds.items():
        error = prediction.decode_step_s(m, m * CONTEXT) / measured - 1
        errors += [abs(error)] if m not in TWO_AT else []
        print(f"{m:3}  {measured * 1e3:11.3f}  {prediction.decode_step_s(m, m * CONTEXT) * 1e3:12.3f}  {error:+5.0%}")
    print(f"mean absolute error off the fitted M: {sum(errors) / len(errors):.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small widths, CPU: checks the script, measures nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, help="a file that --json wrote: fit two constants to it, measure nothing")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.again:
        stored = json.loads(options.again.read_text())
        show_two(stored["bandwidth"], {row["m"]: row["measured_s"] for row in stored["rows"]})
        return 0
    if options.tiny:
        rank = Rank("cpu", scale=8)
        routes = [torch.stack([torch.randperm(rank.experts)[: rank.top_k] for _ in range(3)]) for _ in range(LAYERS)]
        x = torch.randn(3, rank.hidden).bfloat16()
        logits = rank.step(x, rank.caches(3), routes)
        share = fit_share(4e12, FIT_AT, model(4e12, 0.61).decode_step_s(FIT_AT, FIT_AT * CONTEXT))
        print(f"dry run: logits {tuple(logits.shape)}, finite {bool(logits.isfinite().all())}, share found {share:.3f}")
        return 0 if abs(share - 0.61) < 1e-3 else 1
    began = time.monotonic()
    bandwidth = read_bandwidth(options.device)
    rank = Rank(options.device)
    measured = {batch: measure(rank, batch, seed=batch) for batch in BATCHES}
    share = fit_share(bandwidth, FIT_AT, measured[FIT_AT][0])
    prediction = model(bandwidth, share)
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}, {LAYERS} layers + head, context {CONTEXT}; "
        f"plain read {bandwidth / 1e12:.2f} TB/s"
    )
    print(f"fitted at M={FIT_AT}: kernels reach {share:.0%} of it")
    print("  M  measured ms  predicted ms  error  experts drawn / expected  GB read")
    errors, rows = [], []
    for batch, (seconds, touched) in measured.items():
        predicted = prediction.decode_step_s(batch, batch * CONTEXT)
        error = predicted / seconds - 1
        errors += [abs(error)] if batch != FIT_AT else []
        expected = experts_touched(batch, rank.top_k, rank.experts)
        read = prediction.read_bytes(batch) / 1e9
        print(
            f"{batch:3}  {seconds * 1e3:11.3f}  {predicted * 1e3:12.3f}  {error:+5.0%}  "
            f"{touched:9.1f} / {expected:5.1f}  {read:12.2f}"
        )
        rows.append({"m": batch, "measured_s": seconds, "predicted_s": predicted, "touched": touched})
    mean = sum(errors) / len(errors)
    print(f"mean absolute error off the fitted M: {mean:.1%}; {time.monotonic() - began:.0f} s")
    show_two(bandwidth, {batch: seconds for batch, (seconds, _) in measured.items()})
    if options.json:
        options.json.write_text(
            json.dumps({"gpu": name, "bandwidth": bandwidth, "share": share, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
