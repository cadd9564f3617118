"""The simulated engine with the step model behind it makes the model's tok/s, prefill included, within 3 %."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson
import pytest

from service.engines.options import SimulatedOptions
from service.engines.simulated import SimulatedEngine, StepClock
from service.planning.step_model import step_model
from service.types import EngineRequest

TOLERANCE = 0.03


async def tok_s(clock: StepClock, users: int, tokens: int, prompt_characters: int) -> tuple[float, int]:
    """(aggregate output tok/s from the first request's start to the last token, tokens of one prompt)."""
    engine = SimulatedEngine(
        model="glm-5", served_name="sim", slots=users, context_tokens=100_000, options=SimulatedOptions(), clock=clock
    )
    await engine.load(lambda _: None)
    body = orjson.dumps({"prompt": "x" * prompt_characters, "max_tokens": tokens})
    prompt = 0

    async def one(i: int) -> None:
        nonlocal prompt
        async with aclosing(engine.generate(EngineRequest(str(i), "completions", body))) as chunks:
            async for chunk in chunks:
                prompt = max(prompt, chunk.prompt_tokens)

    try:
        began = time.monotonic()
        async with asyncio.timeout(60):
            await asyncio.gather(*(one(i) for i in range(users)))
        return users * tokens / (time.monotonic() - began), prompt
    finally:
        await engine.close()


def expected(clock: StepClock, users: int, tokens: int, prompt: int) -> float:
    steps = sum(clock.decode_step_s(users, users * (prompt + i)) for i in range(tokens))
    return users * tokens / (steps + users * clock.prefill_s(prompt))


@pytest.mark.parametrize(("users", "tokens"), [(1, 120), (8, 80), (64, 30)])
async def test_tok_s_is_the_models(users: int, tokens: int):
    model = step_model("glm-5", "8x-rtx-pro-6000", slots=users)
    measured, prompt = await tok_s(model, users, tokens, prompt_characters=40)
    assert measured == pytest.approx(expected(model, users, tokens, prompt), rel=TOLERANCE)


async def test_prompts_cost_their_prefill():
    model = step_model("glm-5", "8x-rtx-pro-6000", slots=4)
    measured, prompt = await tok_s(model, 4, 20, prompt_characters=4000)
    whole = expected(model, 4, 20, prompt)
    assert 4 * model.prefill_s(prompt) > 0.2 * 4 * 20 / whole  # prefill is a real part of it
    assert measured == pytest.approx(whole, rel=TOLERANCE)


async def test_drafts_come_as_a_shorter_step():
    model = step_model("glm-5", "8x-rtx-pro-6000", slots=2, mtp=True)
    assert model.clock.decode_step_s(2, 0) == pytest.approx(model.decode_step_s(2, 0) / model.settings.tokens_per_step)
    measured, prompt = await tok_s(model.clock, 2, 100, prompt_characters=40)
    assert measured == pytest.approx(expected(model.clock, 2, 100, prompt), rel=TOLERANCE)


@dataclass
class Recorder:
    """Quick steps; remembers what the engine asked for."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def decode_step_s(self, running: int, context_tokens: int) -> float:
        self.asked.append((running, context_tokens))
        return 1e-3

    def prefill_s(self, tokens: int) -> float:
        return 0.0


async def test_context_is_that_of_all_requests_together():
    recorder = Recorder()
    _, prompt = await tok_s(recorder, 8, 5, prompt_characters=4000)
    assert (8, 8 * prompt) in recorder.asked
