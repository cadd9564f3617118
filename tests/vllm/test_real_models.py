"""The demo model in VllmEngine on CPUs: llama.cpp's text, and the engine's promises."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from service.engines.vllm import warmup
from service.errors import BadRequest, ContextOverflow
from service.http.schemas import fit_schemas
from service.http.shaping import text_logprobs
from service.types import Endpoint, EngineRequest
from tests.models import demo
from tests.unit.http.test_enforced import judged
from tests.vllm.conftest import Engines

PROMPT = "The three primary colours are red,"
STEPS = 24
# bf16 and llama.cpp's 8-bit activations may choose differently where two tokens are this close.
TIE = 0.6


def llamacpp(path: Path, prompt: str) -> str:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.verbosity, params.ui = 256, 1, 0, 0, False
    server = xllamacpp.Server(params)
    seen: list[Any] = []
    body = {"prompt": prompt, "max_tokens": STEPS, "temperature": 0}
    server.handle_completions(json.dumps(body), lambda chunk: bool(seen.append(chunk)))
    return str(json.loads(seen[-1])["choices"][0]["text"])


def same_up_to_ties(choice: dict[str, Any], theirs: str) -> None:
    """A choice with two log-probabilities a step gives this text, or leaves it where its own two best lie close."""
    text = ""
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        text += token
        if not theirs.startswith(text):
            best = sorted(top.values(), reverse=True)
            assert best[0] - best[1] < TIE, (choice["text"], theirs, top)
            return
    assert text == choice["text"] == theirs


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Iterator[Any]:
    made = engines.start(demo(), profiler=True)
    yield made
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert before
    engines.stop(made)
    deadline = time.monotonic() + 10
    while alive := [p for p in map(_process, before) if p is not None and "tracker" not in " ".join(p.cmdline())]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.2)


def test_warm_up_computes_whole_prompts_each_batch_in_one_step(engine: Any, engines: Engines) -> None:
    """Run on GPUs before ready. A prompt that the prefix cache shortened, or a batch that fell apart into steps, would
    compile other kernels."""
    layer, books = engine.layer, engine._books
    assert (layer.sequences, layer.step_tokens) == (8, 2048)
    batches = warmup.plan(200, layer.sequences, 512)
    assert {batch.count for batch in batches} == {1, 2, 3, 4, 8}
    steps = []

    async def work() -> None:
        for batch in batches:
            before = books.steps
            await warmup.warm(layer, [batch], 60)
            steps.append(books.steps - before)

    before = books.prompt_tokens
    assert engines.run(warmup.warm(layer, batches, 120)) == sum(batch.tokens for batch in batches)
    assert books.prompt_tokens - before == sum(batch.tokens for batch in batches)
    engines.run(work())
    assert steps == [batch.answer for batch in batches]
    with pytest.raises(TimeoutError):
        engines.run(warmup.warm(layer, batches, 0.01))
    assert engines.run(warmup.warm(layer, batches[-1:], 60)) == 1  # given up in the middle, it still answers


def _process(pid: int) -> psutil.Process | None:
    try:
        found = psutil.Process(pid)
        return found if found.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def test_llama_gives_llamacpps_text(engines: Engines, engine: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": STEPS, "temperature": 0, "logprobs": 2}
    answer = engines.answer(engine, "completions", body)
    choice = {"text": answer.text, "logprobs": text_logprobs(answer.logprobs, 0)}
    same_up_to_ties(choice, llamacpp(demo(), PROMPT))


def test_every_token_is_counted(engines: Engines, engine: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Count 🙂 to ten."}], "max_tokens": 20, "temperature": 0}
    answer = engines.answer(engine, "chat", body)
    assert (answer.output_tokens, answer.finish) == (20, "length")
    ask = orjson.dumps({"messages": body["messages"]})
    assert answer.prompt_tokens == orjson.loads(engines.run(engine.tokenize(ask)))["count"] > 10
    again = engines.answer(engine, "chat", body)
    assert (again.text, again.prompt_tokens) == (answer.text, answer.prompt_tokens)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_token_ids_end_an_answer_but_not_before_the_fewest_tokens(
    engines: Engines, engine: Any, endpoint: Endpoint
) -> None:
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if endpoint == "chat" else {"prompt": PROMPT}
    body = {**asked, "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def answer(**more: Any) -> tuple[str, str, int]:
        got = engines.answer(engine, endpoint, {**body, **more})
        assert got.finish is not None
        return got.text, got.finish, got.output_tokens

    free, reason, count = answer()
    assert (reason, count) == ("length", 12)
    ask = orjson.dumps({"prompt": free, "add_special_tokens": False})
    ends = orjson.loads(engines.run(engine.tokenize(ask)))["tokens"][5]
    text, reason, count = answer(stop_token_ids=[ends])
    assert free.startswith(text)
    assert reason == "stop"
    assert count <= 6
    assert answer(stop_token_ids=[ends], min_tokens=9)[2] >= 9


def test_faults_of_requests_are_named(engines: Engines, engine: Any) -> None:
    for body, kind, words in [
        ({"prompt": "a " * 2000, "max_tokens": 3}, ContextOverflow, "512"),
        ({"prompt": "a", "max_tokens": -3}, BadRequest, "max_tokens"),
        ({"prompt": "a", "temperature": "x"}, BadRequest, "temperature"),
    ]:
        with pytest.raises(kind, match=words):
            engines.answer(engine, "completions", body)


def test_tokenize_and_back(engines: Engines, engine: Any) -> None:
    answer = orjson.loads(engines.run(engine.tokenize(b'{"prompt": "Hello, world! \xf0\x9f\x99\x82"}')))
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    back = orjson.loads(engines.run(engine.detokenize(orjson.dumps({"tokens": answer["tokens"]}))))
    assert back["prompt"] == "Hello, world! 🙂"
    chat = b'{"messages": [{"role": "user", "content": "hi"}]}'
    assert orjson.loads(engines.run(engine.tokenize(chat)))["count"] > 5


def test_cancel_frees_the_slot_in_a_second(engines: Engines, engine: Any) -> None:
    body = orjson.dumps({"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True})

    async def work() -> float:
        async def drain() -> None:
            async for _ in engine.generate(EngineRequest("cancel", "completions", body)):
                pass

        task = asyncio.create_task(drain())
        deadline = time.monotonic() + 60
        while engine._books.running == 0:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine._books.running:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return time.monotonic() - started

    assert engines.run(work()) < 1.0
    assert engine.stats().running == 0


def test_a_profile_of_its_steps(engines: Engines, engine: Any) -> None:
    """A real torch profiler in the worker, while it decodes."""

    async def work() -> dict[str, Any]:
        body = orjson.dumps({"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True})

        async def drain() -> None:
            async for _ in engine.generate(EngineRequest("profiled", "completions", body)):
                pass

        task = asyncio.create_task(drain())
        found: dict[str, Any] = orjson.loads(await engine.profile(b'{"seconds": 0.5}'))
        await task
        return found

    found = engines.run(work())
    causes = found["causes_s"]
    assert found["steps"] > 3
    assert 0.05 < sum(causes.values()) < 5
    assert causes["gemm"] > causes["attention"] > 0, causes
    assert causes["allreduce"] == 0
    with pytest.raises(BadRequest, match="nothing was decoded"):
        engines.run(engine.profile(b'{"seconds": 0.2}'))


def test_books(engine: Any) -> None:
    stats = engine.stats()
    assert stats.alive
    assert stats.slots == 8
    assert stats.requests > 5
    assert stats.output_tokens > 0
    assert stats.steps > 20
    assert stats.kv_used is not None
    assert 0 <= stats.kv_used <= 1


def held_to(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As service/http hands it over."""
    raw = {
        "messages": [{"role": "user", "content": "Answer with JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "temperature": 1.5,
        "max_tokens": 60,
    }
    return fit_schemas(raw | more, "vllm")


# What xgrammar, vLLM's first choice, drops without a word.
OFTEN_DROPPED: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 4},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"minimum": 3, "type": ["integer", "null"], "maximum": 5},
    {"type": "integer", "enum": [1, 2, 3], "minimum": 2},
    {"type": "object", "required": ["z"], "additionalProperties": {"$ref": "#/definitions/Z"}, "maxProperties": 1,
     "definitions": {"Z": {"type": "boolean"}}},
    {"oneOf": [{"type": "string", "format": "ipv4"}, {"type": "number", "multipleOf": 0.5, "maximum": 4}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", OFTEN_DROPPED)
def test_answers_keep_their_schema(engine: Any, engines: Engines, schema: dict[str, Any]) -> None:
    for seed in range(4):
        answer = engines.answer(engine, "chat", held_to(schema, seed=seed))
        if answer.finish == "stop":
            judged(schema, answer.text)


def test_a_schema_that_nothing_fits_is_the_client_s_fault(engine: Any, engines: Engines) -> None:
    with pytest.raises(BadRequest, match="nsatisfiable"):
        engines.answer(engine, "chat", held_to({"type": "object", "required": ["z"], "additionalProperties": False}))
    assert engines.answer(engine, "chat", held_to({"const": 1})).text == "1"
