"""When a `shared` replica reloads in its other mode: what is seen here, decided by service/scaling/conversion.py."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from deployments.board import Post
from service.config import Config, PoolConfig
from service.metrics.declared import Metrics
from service.metrics.recorders import ControlRecorder
from service.planning.step_model import StepModel, step_model
from service.scaling.conversion import OTHER, Memory, Mode, Verdict, judge

THROUGHPUT_SLOTS = 64
"""A shared replica with so many slots is set up for throughput (docs/modes.md)."""
SLOTS: dict[Mode, int] = {"latency": 4, "throughput": 256}
"""Of the mode that a dry run would change to, where the profile does not say."""


class Conversion:
    """Watches the demand for one replica. Raises UserError where the step-time model knows not the model or the box."""

    def __init__(self, config: Config, metrics: Metrics, reload_s: float) -> None:
        self._config, self._recorder = config, ControlRecorder(metrics)
        self._begin(config.pools["shared"], reload_s)

    def _begin(self, pool: PoolConfig, reload_s: float) -> None:
        """Watch a replica that is `pool` from now on."""
        self._memory, self._reload_s = Memory(), reload_s
        self._since = self._judged = self._seen = time.monotonic()
        hardware = self._config.scaling.hardware
        assert hardware is not None, "the profile was checked"
        shape = pool.engine.shape if pool.engine.name == "simulated" else str(self._config.model.file())
        self._mode: Mode = "throughput" if pool.slots >= THROUGHPUT_SLOTS else "latency"
        other = OTHER[self._mode]
        slots = {self._mode: pool.slots, other: pool.other_mode.slots if pool.other_mode else SLOTS[other]}
        self._models: dict[Mode, StepModel] = {
            mode: step_model(shape, hardware, slots=count) for mode, count in slots.items()
        }

    def observe(self, wanted: int, priority_running: int) -> Verdict | None:
        """Call every interval with the requests that want this replica at once; every `judge_s` there is a verdict."""
        now = time.monotonic()
        self._memory.add(wanted, now - self._seen)
        self._seen = now
        if now - self._judged < self._config.scaling.judge_s:
            return None
        self._judged = now
        verdict = judge(
            self._mode,
            self._memory.seen,
            lambda mode, requests: self._models[mode].tokens_per_s(requests),
            reload_s=self._reload_s,
            since_reload_s=now - self._since,
            priority_running=priority_running,
        )
        real = self._config.scaling.convert == "on"
        if not (real and verdict.convert):  # a real one is counted when it is done
            self._recorder.conversion(verdict.mode, False, verdict.why)
        logging.getLogger("ray.serve").warning("conversion%s: this replica %s", "" if real else ", dry run", verdict)
        return verdict if real and verdict.convert else None

    def done(self, pool: PoolConfig, verdict: Verdict, reload_s: float) -> None:
        """The replica is `pool` now, after `reload_s` without service. What was demanded before is forgotten."""
        self._recorder.conversion(verdict.mode, True, verdict.why)
        self._begin(pool, reload_s)


def wanted(posts: Iterable[Post], replicas: int) -> int:
    """Requests that want one of `replicas` at once, running or waiting at any ingress: this replica's part of them."""
    every = [post.demand.get("shared") for post in posts if post.role == "ingress"]
    return math.ceil(sum(d.running + d.waiting for d in every if d is not None) / max(1, replicas))
