from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import orjson
import pytest

from service.engines import registry
from service.engines.options import SimulatedOptions
from service.engines.simulated import SimulatedEngine, count_tokens
from service.errors import ContextOverflow, UserError
from service.types import Delta, EngineRequest


@contextlib.asynccontextmanager
async def engine(**options: Any) -> Any:
    made = SimulatedEngine(
        model="x", served_name="x", slots=8, context_tokens=64, options=SimulatedOptions(**{"step_ms": 5, **options})
    )
    await made.load(lambda progress: None)
    try:
        yield made
    finally:
        await made.close()


def ask(tokens: int, prompt: str = "abcdefgh") -> EngineRequest:
    return EngineRequest("r", "completions", orjson.dumps({"prompt": prompt, "max_tokens": tokens}))


async def collect(made: SimulatedEngine, request: EngineRequest) -> list[Delta]:
    return [chunk async for chunk in made.generate(request)]


async def test_counts_are_exact_and_the_finish_comes_once_and_last() -> None:
    async with engine() as made:
        deltas = await collect(made, ask(7))
        assert sum(d.output_tokens for d in deltas) == 7 and sum(d.prompt_tokens for d in deltas) == 2
        assert len("".join(d.text for d in deltas).split()) == 7
        assert [d.finish for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert made.stats().output_tokens == 7 and made.stats().running == 0


async def test_steps_take_their_time_and_are_shared() -> None:
    async with engine(step_ms=10, step_ms_per_request=1) as made:
        began = time.monotonic()
        await asyncio.gather(*(collect(made, ask(20)) for _ in range(5)))
        # 20 steps of 10 + 4 * 1 ms; never faster, whatever the host.
        assert time.monotonic() - began >= 20 * 0.0139
        assert made.stats().steps <= 22


async def test_leaving_frees_the_slot_at_once() -> None:
    async with engine() as made:
        stream = made.generate(ask(50))
        await anext(stream)
        assert made.stats().running == 1
        await stream.aclose()
        assert made.stats().running == 0


async def test_a_prompt_that_is_too_long_says_both_numbers() -> None:
    async with engine() as made:
        with pytest.raises(ContextOverflow, match=r"100 tokens.*64 tokens"):
            await collect(made, ask(1, prompt="word" * 100))


async def test_close_fails_what_runs() -> None:
    async with engine() as made:
        stream = made.generate(ask(50))
        await anext(stream)
        await made.close()
        with pytest.raises(Exception, match="closed"):
            async for _ in stream:
                pass


def test_token_counting() -> None:
    assert count_tokens("abcde") == 2 and count_tokens([1, 2, 3]) == 3
    assert count_tokens([{"content": [{"type": "text", "text": "abcdefgh"}]}]) == 2


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="llamacpp, vllm, simulated"):
        registry.engine_class("llama")
