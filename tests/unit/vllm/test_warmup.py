"""What is asked before ready: every entry of the tables is met, by prompts that no cache shortens, within a time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engines.vllm import canary, warmup
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.kernels.choose import MOE_M
from service.engines.vllm.options import VllmOptions
from service.engines.vllm.warmup import Batch
from service.errors import UserError
from service.types import LoadProgress


def entry(tokens: int) -> int:
    """The entry of the tables that serves so many tokens."""
    return min((m for m in MOE_M if m >= tokens), default=MOE_M[-1])


@pytest.mark.parametrize(
    ("context", "sequences", "step_tokens", "wanted"),
    [
        # Lengths between an entry and the context, and entries above it by prompts together.
        (200, 8, 2048, [(8, 1592), (6, 1024), (3, 512), (1, 199), (1, 128)]),
        (1500, 4, 8192, [(1, 1499), (1, 1024)]),
        (1500, 1, 1200, [(1, 1200), (1, 1024)]),
        (100_000, 64, 8192, [(1, 2048), (1, 1024)]),
    ],
)
def test_the_plan_reaches_what_users_can(
    context: int, sequences: int, step_tokens: int, wanted: list[tuple[int, int]]
) -> None:
    found = warmup.plan(context, sequences, step_tokens)
    assert [(batch.count, batch.tokens) for batch in found][: len(wanted)] == wanted


def test_the_lm_head_meets_the_tables_numbers_of_users() -> None:
    found = [batch for batch in warmup.plan(4096, 12, 8192) if batch.answer == 2]
    assert found == [Batch(n, n, 2) for n in (12, 8, 4, 2, 1)]


@given(st.integers(2, 5000), st.integers(1, 1100), st.integers(0, 9000))
def test_every_plan_meets_all_entries_and_fits(context: int, sequences: int, more: int) -> None:
    step_tokens = sequences + more
    found = warmup.plan(context, sequences, step_tokens)
    reachable = min(step_tokens, sequences * (context - 1))
    assert {entry(batch.tokens) for batch in found} == {entry(tokens) for tokens in range(1, reachable + 1)}
    assert {entry(batch.count) for batch in found if batch.answer == 2} == {entry(n) for n in range(1, sequences + 1)}
    for batch in found:
        assert sum(batch.lengths) == batch.tokens <= step_tokens
        assert len(batch.lengths) == batch.count <= sequences
        assert 1 <= min(batch.lengths) <= max(batch.lengths) < context


class FakeLayer:
    """Answers at once, or never; or fails."""

    context_tokens, vocab_size, sequences, step_tokens = 200, 384, 8, 512

    def __init__(self, *, hangs: bool = False, fault: Exception | None = None) -> None:
        self.asked: list[tuple[list[list[int]], dict[str, Any]]] = []
        self.closed = 0
        self._hangs, self._fault = hangs, fault

    async def generate_together(self, prompts: list[list[int]], params: dict[str, Any], identity: str) -> list[Any]:
        self.asked.append((prompts, params))
        if self._hangs:
            await asyncio.Event().wait()
        if self._fault:
            raise self._fault
        return [SimpleNamespace(prompt_token_ids=prompt, num_cached_tokens=0) for prompt in prompts]

    def close(self) -> None:
        self.closed += 1


async def test_what_is_asked_is_the_plan_in_prompts_that_begin_apart() -> None:
    layer: Any = FakeLayer()
    batches = warmup.plan(layer.context_tokens, layer.sequences, layer.step_tokens)
    assert await warmup.warm(layer, batches, 60) == sum(batch.tokens for batch in batches)
    assert [[len(prompt) for prompt in prompts] for prompts, _ in layer.asked] == [b.lengths for b in batches]
    assert [params["max_tokens"] for _, params in layer.asked] == [batch.answer for batch in batches]
    firsts = [prompt[0] for prompts, _ in layer.asked for prompt in prompts]
    firsts += [prompt[0] for prompt in canary.prompts(layer.vocab_size)[2:]]
    assert len(set(firsts)) == len(firsts)
    assert 0 <= min(firsts) <= max(firsts) < layer.vocab_size


async def test_it_ends_at_its_limit() -> None:
    layer: Any = FakeLayer(hangs=True)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await warmup.warm(layer, [Batch(1, 4, 1)], 0.05)
    assert time.monotonic() - started < 30


def loaded(layer: FakeLayer, **options: Any) -> VllmEngine:
    """An engine as it is when vLLM has come up."""
    made = VllmEngine(model="/m.gguf", served_name="m", slots=8, context_tokens=200, options=VllmOptions(**options))
    made._layer = layer  # type: ignore[assignment]
    return made


async def prove(engine: VllmEngine, *, seconds: float = 60, on_cpu: bool = False) -> list[LoadProgress]:
    told: list[LoadProgress] = []
    await engine._prove(engine.layer, on_cpu, time.monotonic() + seconds, told.append)
    return told


async def test_a_model_that_passes_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def judge(*_: object) -> canary.Verdict:
        return canary.Verdict((), "as it should be")

    monkeypatch.setattr(canary, "judge", judge)
    layer = FakeLayer()
    engine = loaded(layer)
    assert [step.phase for step in await prove(engine)] == ["warming up", "judging"]
    assert (layer.closed, engine._notes) == (0, ["as it should be"])
    assert (await prove(engine, on_cpu=True))[0].phase == "judging"  # nothing is compiled there


@pytest.mark.parametrize(
    ("layer", "seconds", "words"),
    [
        (FakeLayer(fault=RuntimeError("no tile")), 60, r"m\.gguf could not answer the prompts of the warm-up.*no tile"),
        (FakeLayer(hangs=True), 0.05, r"m\.gguf did not answer .* the warm-up within load_timeout_s \(9 s"),
        (FakeLayer(fault=UserError("said already")), 60, "^said already$"),
    ],
)
async def test_a_warm_up_that_fails_says_so_and_ends_the_engine_once(
    layer: FakeLayer, seconds: float, words: str
) -> None:
    engine = loaded(layer, load_timeout_s=9)
    with pytest.raises(UserError, match=words):
        await prove(engine, seconds=seconds)
    assert (layer.closed, engine._layer) == (1, None)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (canary.Verdict(("token 7 again and again",), ""), "answers wrongly and may not serve: token 7 again"),
        (RuntimeError("died"), "could not answer the gate's prompts: .*died"),
        (UserError("said already"), "^said already$"),
    ],
)
async def test_a_gate_that_refuses_ends_the_engine_once(
    outcome: canary.Verdict | Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def judge(*_: object) -> canary.Verdict:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(canary, "judge", judge)
    layer = FakeLayer()
    with pytest.raises(UserError, match=words):
        await prove(loaded(layer), on_cpu=True)
    assert layer.closed == 1


async def test_a_load_that_is_given_up_meanwhile_ends_the_engine() -> None:
    layer = FakeLayer(hangs=True)
    proving = asyncio.create_task(prove(loaded(layer)))
    while not layer.asked:
        await asyncio.sleep(0.01)
    proving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await proving
    assert layer.closed == 1
