"""Three short cuts that led the reference operator astray, each refused with this model's own numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from service.planning.memory import memory
from service.planning.shape import Attention, Runtime
from service.planning.step_model import StepModel


@dataclass(frozen=True, slots=True)
class Refusal:
    """`claim`: the short cut; `claimed` and `true` in `unit`; `sentence`: why it is wrong."""

    name: str
    claim: str
    claimed: float
    true: float
    unit: str
    sentence: str


def whole_file(model: StepModel) -> Refusal:
    """Dividing the file by the bandwidth of all GPUs."""
    shape, gpus = model.shape, model.settings.tp
    claimed = shape.file_bytes / gpus / model.box.gpu.bandwidth * 1e3
    true = model.read_bytes(1) / model.box.gpu.bandwidth * 1e3
    gib = shape.file_bytes / 2**30
    if shape.experts:
        reason = (
            f"a token touches {shape.top_k} of {shape.experts} experts, so one GPU reads "
            f"{model.read_bytes(1) / 1e9:.1f} GB, not {shape.file_bytes / gpus / 1e9:.1f} GB"
        )
    else:
        reason = "embedding rows are looked up, not read whole"
    return Refusal(
        "whole file",
        f"{gib:.0f} GiB / {gpus} GPUs / bandwidth is the shortest step",
        claimed,
        true,
        "ms",
        f"{gib:.0f} GiB is not read per step: {reason}. The floor for one user is {true:.1f} ms, not {claimed:.1f} ms.",
    )


def active_weights_over_gpus(model: StepModel) -> Refusal:
    """Dividing the active weights by the number of GPUs."""
    shape, tp = model.shape, model.settings.tp
    bits = 8 * shape.file_bytes / shape.parameters
    whole = sum(r.read(1, shape.top_k, shape.experts) for r in shape.roles(1, *_how(model)) if r.role.read != "rows")
    replicated = [r for r in shape.roles(tp, *_how(model)) if not r.role.split and r.role.read == "all"]
    held = sum(r.per_gpu for r in replicated)
    claimed = shape.active_parameters * 4.5 / 8 / tp / 1e9
    true = model.read_bytes(1) / 1e9
    names = ", ".join(r.role.name for r in sorted(replicated, key=lambda r: -r.per_gpu)[:3])
    return Refusal(
        "active weights / GPUs",
        f"{shape.active_parameters / 1e9:.0f} B x 4.5 bit / {tp} GPUs is what one GPU reads",
        claimed,
        true,
        "GB",
        f"replicated projections are read whole by all {tp} GPUs ({names}: {held / 1e9:.2f} GB on each), and what a "
        f"token multiplies is kept finer than 4.5 bit ({whole * 8 / shape.active_parameters:.1f} bit on average; "
        f"the file's mean is {bits:.1f}). One GPU reads {true:.1f} GB, not {claimed:.1f} GB.",
    )


def fewer_gpus(model: StepModel, tp: int | None = None) -> Refusal:
    """Judging a smaller tensor-parallel group by bandwidth alone. `tp` defaults to half of the model's."""
    shape, now = model.shape, model.settings.tp
    tp = tp or max(1, now // 2)
    other = replace(model, settings=replace(model.settings, tp=tp))
    step, slower = model.split(1), other.split(1)
    extra_gb = (other.read_bytes(1) - model.read_bytes(1)) / 1e9
    by_weights = slower.weights + slower.kernels - step.weights - step.kernels
    difference = slower.total - step.total
    count = other.allreduces
    each = model.allreduce_s(1)
    if count:
        links = f"the {count} all-reduces stay ({count} x {each * 1e6:.0f} µs = {count * each * 1e3:.1f} ms)"
        turn = (
            f"A link whose all-reduce among {tp} GPUs is more than {by_weights / count * 1e6:.0f} µs quicker would "
            "turn it around"
        )
    else:
        links, turn = f"the {model.allreduces} all-reduces go", "One GPU has nothing to wait for"
    room = memory(shape, other.box, other.settings, 1024, 1)
    fits = (
        f"it fits, with {room.free / 1e9:.0f} GB to spare"
        if room.fits
        else f"and it does not fit ({room.used / 1e9:.0f} GB of {room.total / 1e9:.0f} GB a GPU)"
    )
    word = "slower" if difference > 0 else "faster"
    return Refusal(
        f"TP={tp} by bandwidth alone",
        f"TP={tp} reads twice as much, so a step takes twice as long",
        2 * step.total * 1e3,
        slower.total * 1e3,
        "ms",
        f"TP={tp}: split weights double (+{extra_gb:.1f} GB a GPU, {by_weights * 1e3:+.1f} ms), {links}: "
        f"{word} by {abs(difference) * 1e3:.1f} ms "
        f"({difference / step.total:+.0%}), not twice, because {step.allreduce / step.total:.0%} of the step is "
        f"communication. {turn}; {fits}.",
    )


def wrong_turns(model: StepModel) -> list[Refusal]:
    """The refusals that apply to this model and box."""
    first = whole_file(model)
    found = [first] if first.claimed > 1.1 * first.true else []
    if model.settings.tp > 1:
        found += [active_weights_over_gpus(model), fewer_gpus(model)]
    return found


def _how(model: StepModel) -> tuple[Attention, Runtime]:
    return model.settings.attention, model.settings.runtime
