"""What a model will do on a box: does it fit, how fast at each number of users, what limits it, how to set it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from service.planning import calibration as calibrations
from service.planning.drafts import careful_rate
from service.planning.hardware import Box
from service.planning.memory import Memory, memory, split_fault
from service.planning.settings import VLLM_CAPTURE_SIZES, EngineSettings
from service.planning.shape import ModelShape
from service.planning.step_model import StepModel, StepSplit
from service.planning.wrong_turns import Refusal, wrong_turns

Basis = Literal["predicted", "calibrated", "measured"]
Aim = Literal["latency", "throughput"]
AIMS: tuple[Aim, ...] = ("latency", "throughput")
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LATENCY_SLOTS = 4
WORTH = 0.02  # a setting that gains less is not worth having

SAYS = {
    "weights": "reading weights at full memory bandwidth",
    "kernels": "kernels and arithmetic beyond memory speed",
    "kv": "reading the KV cache",
    "allreduce": "all-reduces between GPUs",
    "launch": "gaps between kernels and waiting for the host's launches",
    "draft": "draft passes of speculative decoding",
    "host": "the host: scheduling, sampling, detokenising",
}


@dataclass(frozen=True, slots=True)
class Rate:
    """Aggregate output tok/s of `concurrency` users, decode only, within low..high."""

    concurrency: int
    tok_s: float
    low: float
    high: float
    split: StepSplit

    @property
    def per_user(self) -> float:
        return self.tok_s / self.concurrency

    @property
    def bottleneck(self) -> str:
        return self.split.bottleneck


@dataclass(frozen=True)
class Mode:
    """The best settings found for one aim, and why: of those that fit in memory."""

    aim: Aim
    settings: EngineSettings
    rate: Rate
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    model: StepModel
    context: int
    memory: Memory
    fault: str | None
    rates: tuple[Rate, ...]
    modes: tuple[Mode, ...]
    """One for each aim; none where no settings fit in memory."""
    refusals: tuple[Refusal, ...]

    @property
    def fits(self) -> bool:
        return self.fault is None and self.memory.fits

    @property
    def basis(self) -> Basis:
        """How far to trust the speeds: measured parts (preflight), constants checked by the back-test, or neither."""
        if self.model.calibration.calibrated:
            return "calibrated"
        return "measured" if self.model.box.measured_by_preflight else "predicted"


def rate(model: StepModel, concurrency: int, context: int) -> Rate:
    running = min(concurrency, model.settings.slots)
    tok_s = model.tokens_per_s(concurrency, context)
    band = model.band_at(running)
    return Rate(concurrency, tok_s, tok_s * (1 - band), tok_s * (1 + band), model.split(running, running * context))


def make(
    shape: ModelShape,
    box: Box,
    settings: EngineSettings,
    *,
    context: int,
    concurrency: int,
    concurrencies: Sequence[int] = CONCURRENCIES,
) -> Plan:
    """The plan for `settings` as given, and the best settings for each aim. `context`: tokens of prompt and answer that
    each of `concurrency` users holds at most; speeds are for half of it, the mean over an answer's life."""
    model = StepModel(shape, box, settings, calibrations.choose(shape, box, settings))
    held = context // 2
    wanted = sorted({*(c for c in concurrencies if c <= concurrency), concurrency})
    return Plan(
        model=model,
        context=context,
        memory=memory(shape, box, settings, context, concurrency),
        fault=split_fault(shape, settings.tp),
        rates=tuple(rate(model, c, held) for c in wanted),
        modes=tuple(mode for aim in AIMS if (mode := _best(model, aim, context, concurrency)) is not None),
        refusals=tuple(wrong_turns(model)),
    )


def candidates(model: StepModel, slots: int) -> Iterable[EngineSettings]:
    """Settings worth comparing: every TP that the blocks allow, graphs, drafts, all-reduce."""
    base, shape, box = model.settings, model.shape, model.box
    if base.runtime == "llamacpp":
        yield replace(base, slots=slots)
        return
    drafts = (0, 1, 2, 3) if shape.mtp_layers else (0,)
    sizes = tuple(sorted({*VLLM_CAPTURE_SIZES, slots} if slots <= VLLM_CAPTURE_SIZES[-1] else VLLM_CAPTURE_SIZES))
    for tp in (t for t in (1, 2, 4, 8, 16) if t <= box.gpus and not split_fault(shape, t)):
        for graphs in (True, False):
            for k in drafts:
                for allreduce in box.link.algorithms if tp > 1 else ("default",):
                    yield replace(
                        base,
                        tp=tp,
                        graphs=graphs,
                        draft_tokens=k,
                        allreduce=allreduce,
                        slots=slots,
                        capture_sizes=sizes,
                    )


def _best(model: StepModel, aim: Aim, context: int, concurrency: int) -> Mode | None:
    """None where nothing fits."""
    shape, box = model.shape, model.box
    slots = min(LATENCY_SLOTS, concurrency) if aim == "latency" else concurrency
    users = 1 if aim == "latency" else slots
    found: list[tuple[float, EngineSettings, StepModel]] = []
    for settings in candidates(model, slots):
        room = memory(shape, box, settings, context, slots)
        fitting = min(slots, room.most_tokens // max(1, context))
        if fitting < 1:
            continue
        chosen = replace(settings, slots=fitting)
        trial = StepModel(shape, box, chosen, calibrations.choose(shape, box, chosen))
        found.append((careful_rate(trial, min(users, fitting), context // 2), chosen, trial))
    if not found:
        return None
    # among those as good as the best, the plainest: graphs (the engine's default), no drafts, untuned all-reduce
    top = max(f[0] for f in found)
    plain = box.link.default.name
    _, settings, best = max(
        (f for f in found if f[0] >= top * (1 - WORTH)),
        key=lambda f: (f[1].graphs, -f[1].draft_tokens, f[1].allreduce in ("default", plain), f[0]),
    )
    return Mode(aim, settings, rate(best, min(users, settings.slots), context // 2), _reasons(best, found, slots))


def _reasons(best: StepModel, found: list[tuple[float, EngineSettings, StepModel]], slots: int) -> tuple[str, ...]:
    """What each choice is worth against its nearest alternative, from the candidates already computed."""
    s = best.settings
    speed = next(f[0] for f in found if f[1] == s)

    def alternative(**change: object) -> float | None:
        wanted = replace(s, **change)  # type: ignore[arg-type]
        near = [v for v, c, _ in found if replace(c, slots=s.slots) == wanted]
        return max(near, default=None)

    lines = []
    if s.runtime == "llamacpp":
        return ("one process on this machine's CPU; no other settings are modelled",)
    other = alternative(graphs=not s.graphs)
    if other:
        lines.append(f"CUDA graphs {'on' if s.graphs else 'off'}: {speed / other - 1:+.0%} against the other way")
    without = alternative(draft_tokens=0)
    if s.draft_tokens and without:
        lines.append(
            f"{s.draft_tokens} draft tokens: {speed / without - 1:+.0%} against none "
            f"(if {s.acceptance:.0%} of drafts are kept)"
        )
    elif best.shape.mtp_layers and (one := alternative(draft_tokens=1)):
        lines.append(f"no drafts: one draft token would change the rate by {one / speed - 1:+.0%}")
    plain = alternative(allreduce=best.box.link.default.name)
    if s.tp > 1 and plain and s.allreduce != best.box.link.default.name:
        lines.append(f"all-reduce {s.allreduce}: {speed / plain - 1:+.0%} against untuned {best.box.link.default.name}")
    if s.slots < slots:
        lines.append(f"{s.slots} slots instead of {slots}: memory holds no more context")
    return tuple(lines)
