"""The plan's settings as a profile that `glm5 serve` accepts."""

from __future__ import annotations

from typing import Any

import yaml

from service.engines.vllm.options import VllmOptions
from service.planning import calibration as calibrations
from service.planning.drafts import schedule
from service.planning.plan import Mode, Plan
from service.planning.step_model import StepModel


def profile_tree(plan: Plan, model_path: str, boxes: int = 1) -> dict[str, Any]:
    """Plain data for service.config.parse. One box has room for one replica: a `shared` pool with the throughput
    settings and slots reserved for priority requests. More boxes: a quarter of them (one at least) for the latency
    pool, the rest for the throughput pool."""
    latency, throughput = (next(m for m in plan.modes if m.aim == aim) for aim in ("latency", "throughput"))
    pools: dict[str, Any]
    if boxes == 1:
        pools = {"shared": _pool(plan, throughput, 1)}
        slots = throughput.settings.slots
        if slots > 8 and throughput.settings.runtime != "llamacpp":
            pools["shared"]["reserved_slots"] = min(4, slots // 8)
    else:
        fast = max(1, boxes // 4)
        pools = {"latency": _pool(plan, latency, fast), "throughput": _pool(plan, throughput, boxes - fast)}
    return {"model": {"path": model_path, "context_tokens": plan.context}, "pools": pools}


def _pool(plan: Plan, mode: Mode, replicas: int) -> dict[str, Any]:
    pool: dict[str, Any] = {"slots": mode.settings.slots, "min_replicas": 1, "max_replicas": replicas}
    if mode.settings.runtime == "llamacpp":
        return pool | {"engine": {"name": "llamacpp"}}
    engine = {"name": "vllm"} | engine_options(mode) | _drafts(plan, mode)
    return pool | {"engine": engine, "gpus": float(mode.settings.tp)}


def engine_options(mode: Mode) -> dict[str, Any]:
    """Fields of VllmOptions for the mode that differ from its defaults. `attention` stays auto where it is dense: the
    engine knows up to which context dense is exact."""
    s = mode.settings
    wished: dict[str, Any] = {
        "tensor_parallel": s.tp,
        "mode": "balanced"
        if mode.aim == "throughput" and s.slots <= 64
        else mode.aim.replace("latency", "interactivity"),
        "cuda_graphs": s.graphs,
        "mtp_tokens": s.draft_tokens,
        "attention": "sparse" if s.attention == "sparse" else "auto",
        "kv_type": "fp8" if s.kv_value_bytes == 1 else "auto",
    }
    defaults = VllmOptions()
    return {k: v for k, v in wished.items() if getattr(defaults, k, v) != v}


def _drafts(plan: Plan, mode: Mode) -> dict[str, Any]:
    """Draft lengths by batch size, where the model has an MTP layer and any draft pays."""
    shape, box = plan.model.shape, plan.model.box
    model = StepModel(shape, box, mode.settings, calibrations.choose(shape, box, mode.settings))
    ranges = schedule(model, plan.context // 2)
    longest = max((tokens for _, _, tokens in ranges), default=0)
    if not longest:
        return {"mtp_tokens": 0} if shape.mtp_layers else {}
    found: dict[str, Any] = {"mtp_tokens": longest}
    if len(ranges) > 1:
        found["mtp_schedule"] = [list(entry) for entry in ranges]
    return found


def profile_text(plan: Plan, model_path: str, boxes: int = 1) -> str:
    """The YAML, with a head that says what was predicted and how far to trust it."""
    latency = next(m for m in plan.modes if m.aim == "latency")
    throughput = next(m for m in plan.modes if m.aim == "throughput")
    band = plan.model.band
    head = [
        f"# Written by glm5 plan for {plan.model.shape.name} on {plan.model.box.name}.",
        f"# {plan.basis}: {latency.rate.tok_s:.0f} tok/s for one user with latency settings, "
        f"{throughput.rate.tok_s:.0f} tok/s for {throughput.rate.concurrency} users with these (within {band:.0%}).",
        *(f"# {line}" for line in throughput.reasons if "draft" not in line),
    ]
    body = profile_tree(plan, model_path, boxes)
    engine = (body["pools"].get("shared") or body["pools"]["throughput"])["engine"]
    if engine.get("mtp_tokens"):
        ranges = engine.get("mtp_schedule") or [[1, throughput.settings.slots, engine["mtp_tokens"]]]
        lengths = ", ".join(f"{first} to {last} requests {tokens}" for first, last, tokens in ranges)
        head.append(f"# Draft tokens by batch size (if {throughput.settings.acceptance:.0%} are kept): {lengths}.")
    setting = _environment(plan, throughput)
    if setting:
        head.append(f"# Start it with {setting}: the all-reduce that this plan counts on.")
    return "\n".join(head) + "\n" + yaml.safe_dump(body, sort_keys=False)


def _environment(plan: Plan, mode: Mode) -> str:
    if mode.settings.tp == 1:
        return ""
    algorithm = plan.model.box.link.algorithms.get(mode.settings.allreduce)
    if algorithm is None:
        return ""
    return " ".join(f"{k}={v}" for k, v in algorithm.setting.items() if k.isupper())
