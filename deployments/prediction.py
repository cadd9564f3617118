"""The step model beside a live replica: what a decode step should take with the requests that run now."""

from __future__ import annotations

import logging

from service.config import Config, PoolConfig
from service.errors import UserError
from service.planning.served import pool_model
from service.planning.step_model import StepModel, TokenClock
from service.types import EngineStats

CONTEXT = 1024
"""Tokens that a request holds on the planned curve: before the first request nobody knows what will be asked."""


class Prediction:
    """For one replica."""

    def __init__(self, model: StepModel, steps: StepModel | TokenClock) -> None:
        self._model, self._steps = model, steps

    @staticmethod
    def of(config: Config, pool: PoolConfig) -> Prediction | None:
        """For the pool's engine as it is set, on `hardware` of the pool, else of the simulated engine. None where the
        profile names none or the planner does not know the model or the box: any model is served."""
        engine = pool.engine
        simulated = engine.name == "simulated"
        hardware = pool.hardware or (engine.hardware if engine.name == "simulated" else None)
        if hardware is None:
            return None
        try:
            model = pool_model(config.model, pool, hardware)
        except UserError as unknown:
            logging.getLogger("ray.serve").warning("no predicted step: %s", unknown)
            return None
        # The simulated engine emits one token a step, in a shorter step where drafts are kept.
        return Prediction(model, model.clock if simulated else model)

    def curve(self) -> dict[int, float]:
        """Tok/s of the replica with 1, 2, 4, ... requests at once, up to its slots, CONTEXT tokens each."""
        counts = [2**power for power in range(self._model.settings.slots.bit_length())]
        return {requests: self._model.tokens_per_s(requests, CONTEXT) for requests in counts}

    def step_s(self, stats: EngineStats) -> float | None:
        """Seconds, or None while nothing runs. The context held is the mean of all requests so far, half answered."""
        if not stats.running or not stats.requests:
            return None
        each = (stats.prompt_tokens + stats.output_tokens / 2) / stats.requests
        return self._steps.decode_step_s(stats.running, int(stats.running * each))
