"""Build a fleet for `glm5 simulate` from a profile or from numbers, and run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from service.config import Config
from service.errors import UserError
from service.planning.fleet import Fleet, FleetRun, PoolSpec, Progress
from service.planning.fleet_scaling import Autoscaler, ScalingSettings
from service.planning.step_model import StepModel, step_model
from service.planning.workload import Arrival
from service.routing.pick import Spill
from service.types import PoolName

LATENCY_SLOTS, THROUGHPUT_SLOTS = 4, 64


@dataclass(frozen=True, slots=True)
class FleetWish:
    """What the command line asks for. `latency_boxes` 0: one shared pool."""

    boxes: int
    latency_boxes: int
    model: str
    hardware: str
    mtp: bool
    scale: bool
    load_s: float
    timeout_s: float
    seed: int


def specs(wish: FleetWish, profile: Config | None) -> list[PoolSpec]:
    """The pools: slots, reserved slots and queue of the profile, where there is one, else of the two modes' defaults.
    Raises UserError."""
    if wish.boxes < 1 or not 0 <= wish.latency_boxes <= wish.boxes:
        raise UserError(f"--latency-boxes must be 0 to {wish.boxes} (--boxes), not {wish.latency_boxes}")
    if profile is not None:
        return _of_profile(wish, profile)
    if wish.latency_boxes in (0, wish.boxes):
        return [_spec("shared", wish.boxes, THROUGHPUT_SLOTS, wish, reserved=4)]
    return [
        _spec("latency", wish.latency_boxes, LATENCY_SLOTS, wish),
        _spec("throughput", wish.boxes - wish.latency_boxes, THROUGHPUT_SLOTS, wish),
    ]


def _of_profile(wish: FleetWish, profile: Config) -> list[PoolSpec]:
    if set(profile.pools) == {"shared"}:
        split: Mapping[PoolName, int] = {"shared": wish.boxes}
    else:
        most = {name: pool.max_replicas for name, pool in profile.pools.items()}
        latency = wish.latency_boxes or max(1, round(wish.boxes * most["latency"] / sum(most.values())))
        split = {"latency": latency, "throughput": wish.boxes - latency}
        if min(split.values()) < 1:
            raise UserError("a profile with two pools needs two boxes or more")
    return [
        _spec(
            name,
            boxes,
            profile.pools[name].slots,
            wish,
            reserved=profile.pools[name].reserved_slots,
            queue=profile.admission.queue_requests,
        )
        for name, boxes in split.items()
    ]


def _spec(name: PoolName, boxes: int, slots: int, wish: FleetWish, reserved: int = 0, queue: int = 512) -> PoolSpec:
    drafts = {"mtp": True} if wish.mtp and name != "throughput" else {}
    model: StepModel = step_model(wish.model, wish.hardware, slots=slots, **drafts)
    return PoolSpec(
        name, boxes, slots, model, model.settings.tokens_per_step, reserved, queue, wish.load_s, min_boxes=1
    )


def simulate(
    trace: Sequence[Arrival], wish: FleetWish, profile: Config | None = None, progress: Progress | None = None
) -> FleetRun:
    """Run `trace` on the fleet. With `scale`, pools start at half of their boxes (one at least) and the service's
    scaling policy moves them, never beyond all boxes together."""
    found = specs(wish, profile)
    spill = Spill()
    if profile is not None:
        spill = Spill(profile.routing.spill_to_throughput, profile.routing.spill_to_latency)
    if wish.scale:
        found = [replace(spec, boxes=max(1, spec.boxes // 2)) for spec in found]
    fleet = Fleet(found, spill=spill, timeout_s=wish.timeout_s, seed=wish.seed)
    if wish.scale:
        changes = {"budget": float(wish.boxes), "start_s": wish.load_s}
        settings = (
            replace(ScalingSettings(), **changes) if profile is None else profile.scaling.model_copy(update=changes)
        )
        Autoscaler(fleet, settings, {spec.name: wish.boxes for spec in found}, until=trace[-1].arrived)
    return fleet.run(trace, progress)
