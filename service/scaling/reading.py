"""From what processes say about themselves to the policy's reading of a pool. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from service.scaling.policy import Reading
from service.types import EngineStats

LEAST_BUSY_S = 1.0
"""A rate from less work than this is noise."""


@dataclass(frozen=True, slots=True)
class ReplicaWord:
    """A replica that lives. `start_s`: what it took to get ready."""

    id: str
    ready: bool
    stats: EngineStats | None = None
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class DemandWord:
    """What waits for the pool at one ingress."""

    waiting: int = 0
    missed: int = 0
    priority_wait_s: float = 0.0
    queued_tokens: float = 0.0


def read(
    target: int,
    running: Collection[str],
    replicas: Iterable[ReplicaWord],
    demands: Iterable[DemandWord],
    last_start_s: float | None = None,
) -> Reading:
    """A pool now. `target` and `running` (ids of its running replicas) as Ray has them. Ray forgets a replica as soon
    as it drains, and does not list one that starts: so whoever is ready but not listed drains, and still holds its box.
    Samples of a replica that is not ready are not looked at."""
    everybody = list(replicas)
    ready = [word for word in everybody if word.ready and word.id in running]
    draining = [word for word in everybody if word.ready and word.id not in running]
    stats = [word.stats for word in ready if word.stats is not None]
    busy_s = sum(s.busy_s for s in stats)
    starts = [word.start_s for word in everybody if word.start_s is not None]
    wants = list(demands)
    return Reading(
        target=target,
        ready=len(ready),
        alive=len(running),
        draining=len(draining),
        running=sum(s.running for s in stats),
        waiting=sum(want.waiting for want in wants),
        missed=sum(want.missed for want in wants),
        priority_wait_s=max((want.priority_wait_s for want in wants), default=0.0),
        queued_tokens=sum(want.queued_tokens for want in wants),
        tokens_per_s=sum(s.output_tokens for s in stats) / busy_s if busy_s > LEAST_BUSY_S else None,
        start_s=max(starts, default=last_start_s),
    )
