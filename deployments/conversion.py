"""The dry run of `scaling.convert`: what a `shared` replica would do, and why, in Serve's log and in the metrics."""

from __future__ import annotations

import logging
import time

from service.config import Config
from service.metrics.declared import Metrics
from service.metrics.recorders import ControlRecorder
from service.planning.step_model import StepModel, step_model
from service.scaling.conversion import Memory, Mode, Verdict, judge
from service.types import EngineStats

JUDGE_S = 60.0
THROUGHPUT_SLOTS = 64
"""A shared replica with so many slots is set up for throughput (docs/modes.md)."""
SLOTS: dict[Mode, int] = {"latency": 4, "throughput": 256}


class DryRun:
    """Watches one replica's demand; raises UserError where the step-time model does not know model or hardware."""

    def __init__(self, config: Config, metrics: Metrics, reload_s: float) -> None:
        pool, hardware = config.pools["shared"], config.scaling.hardware
        assert hardware is not None, "the profile was checked"
        shape = pool.engine.shape if pool.engine.name == "simulated" else str(config.model.file())
        self._mode: Mode = "throughput" if pool.slots >= THROUGHPUT_SLOTS else "latency"
        self._models: dict[Mode, StepModel] = {
            mode: step_model(shape, hardware, slots=slots) for mode, slots in SLOTS.items()
        }
        self._recorder, self._memory, self._reload_s = ControlRecorder(metrics), Memory(), reload_s
        self._since = self._judged = self._seen = time.monotonic()

    def observe(self, stats: EngineStats) -> Verdict | None:
        """Call every interval; once a minute there is a verdict."""
        now = time.monotonic()
        self._memory.add(stats.running + stats.waiting, now - self._seen)
        self._seen = now
        if now - self._judged < JUDGE_S:
            return None
        self._judged = now
        verdict = judge(
            self._mode,
            self._memory.seen,
            lambda mode, requests: self._models[mode].tokens_per_s(requests),
            reload_s=self._reload_s,
            since_reload_s=now - self._since,
        )
        self._recorder.conversion(verdict.mode, False, verdict.why)
        logging.getLogger("ray.serve").warning("conversion, dry run: this replica %s", verdict)
        return verdict
