"""When a `shared` replica reloads in its other mode: what is seen here, decided by service/scaling/conversion.py."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable

from service.config import Config, PoolConfig
from service.fleet.post import Post
from service.metrics.declared import Metrics
from service.metrics.recorders import ControlRecorder
from service.planning.drafts import careful_rate
from service.planning.served import pool_model, usual_options
from service.planning.step_model import StepModel
from service.scaling.conversion import OTHER, Memory, Mode, Verdict, judge

THROUGHPUT_SLOTS = 64
"""A shared replica with so many slots is set up for throughput (docs/modes.md)."""
SLOTS: dict[Mode, int] = {"latency": 4, "throughput": 256}
"""Of the mode that a dry run would change to, where the profile does not say; its engine then has the settings that are
usual in that mode (usual_options)."""


class Conversion:
    """Watches the demand for one replica. Raises UserError where the step-time model knows not the model or the box.
    `clock`: seconds that never go back."""

    def __init__(
        self, config: Config, metrics: Metrics, reload_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._recorder, self._clock = config, ControlRecorder(metrics), clock
        self._begin(config.pools["shared"], reload_s)

    def _begin(self, pool: PoolConfig, reload_s: float) -> None:
        """Watch a replica that is `pool` from now on."""
        self._memory, self._reload_s = Memory(), reload_s
        self._since = self._judged = self._seen = self._clock()
        self._held_up = False
        """A change pays and was announced; it waits for priority requests."""
        hardware = self._config.scaling.hardware
        assert hardware is not None, "the profile was checked"
        self._mode: Mode = "throughput" if pool.slots >= THROUGHPUT_SLOTS else "latency"
        here, other = pool_model(self._config.model, pool, hardware), OTHER[self._mode]
        changed = pool.converted() if pool.other_mode else _usual(pool, other, here)
        self._models: dict[Mode, StepModel] = {
            self._mode: here,
            other: pool_model(self._config.model, changed, hardware),
        }

    def rate(self, mode: Mode, requests: int) -> float:
        """Output tokens per second that so many requests at once would get in `mode`, with its own engine settings."""
        return careful_rate(self._models[mode], requests, context=0.0)

    def observe(self, wanted: int, priority_running: int) -> Verdict | None:
        """Call every interval with the requests that want this replica at once; every `judge_s` there is a verdict. One
        that only priority requests hold up is looked at again at every call: their user leaves short gaps."""
        now = self._clock()
        self._memory.add(wanted, now - self._seen)
        self._seen = now
        if now - self._judged < self._config.scaling.judge_s and not self._held_up:
            return None
        verdict = judge(
            self._mode,
            self._memory.seen,
            self.rate,
            reload_s=self._reload_s,
            since_reload_s=now - self._since,
            priority_running=priority_running,
        )
        announced, self._held_up = self._held_up, verdict.why == "busy"
        if announced and self._held_up:
            return None
        self._judged = now
        real = self._config.scaling.convert == "on"
        if not (real and verdict.convert):  # a real one is counted when it is done
            self._recorder.conversion(verdict.mode, False, verdict.why)
        logging.getLogger("ray.serve").warning("conversion%s: this replica %s", "" if real else ", dry run", verdict)
        return verdict if real and verdict.convert else None

    def done(self, pool: PoolConfig, verdict: Verdict, reload_s: float) -> None:
        """The replica is `pool` now, after `reload_s` without service. What was demanded before is forgotten."""
        self._recorder.conversion(verdict.mode, True, verdict.why)
        self._begin(pool, reload_s)


def _usual(pool: PoolConfig, mode: Mode, now: StepModel) -> PoolConfig:
    """`pool` as it would usually be set for `mode`. `now`: its present step model."""
    engine = usual_options(pool.engine, mode, now.shape)
    return pool.model_copy(update={"engine": engine, "slots": SLOTS[mode]})


def wanted(posts: Iterable[Post], replicas: int) -> int:
    """Requests that want one of `replicas` at once, running or waiting at any ingress: this replica's part of them."""
    every = [post.demand.get("shared") for post in posts if post.role == "ingress"]
    return math.ceil(sum(d.running + d.waiting for d in every if d is not None) / max(1, replicas))
