"""The step model beside a live replica: what a decode step should take with the requests that run now."""

from __future__ import annotations

import logging

from service.config import Config, PoolConfig
from service.errors import UserError
from service.planning.step_model import StepModel, step_model
from service.types import EngineStats


class Prediction:
    """For one replica."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    @staticmethod
    def of(config: Config, pool: PoolConfig) -> Prediction | None:
        """None where the profile names no hardware or the planner does not know the model: any model is served."""
        engine = pool.engine
        if engine.name == "simulated":
            if engine.hardware is None:
                return None
            return Prediction(step_model(engine.shape, engine.hardware, mtp=engine.mtp, cuda_graphs=engine.cuda_graphs))
        if pool.hardware is None:
            return None
        tp = engine.tensor_parallel if engine.name == "vllm" else 1
        try:
            return Prediction(step_model(str(config.model.file()), pool.hardware, tp=tp))
        except UserError as unknown:
            logging.getLogger("ray.serve").warning("no predicted step: %s", unknown)
            return None

    def step_s(self, stats: EngineStats) -> float | None:
        """Seconds, or None while nothing runs. The context held is the mean of all requests so far, half answered."""
        if not stats.running or not stats.requests:
            return None
        each = (stats.prompt_tokens + stats.output_tokens / 2) / stats.requests
        return self._model.decode_step_s(stats.running, int(stats.running * each))
