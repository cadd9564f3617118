"""The app without a network: endpoints, statuses, the envelope, whole answers and streams."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import orjson
import pytest

from service.http.answers import ChatAnswer, ChatChunk, ErrorEnvelope, ModelsBody, NotReadyEnvelope, Ready, TextAnswer
from tests.unit.http.conftest import ask, calling, serving
from tests.unit.http.echo import EchoBackend

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def events(response: httpx.Response) -> list[Any]:
    """Data of the SSE events, `[DONE]` as that string, an error event as ("error", envelope)."""
    found: list[Any] = []
    for block in response.text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        if data == ["[DONE]"]:
            found.append("[DONE]")
        elif lines[:1] == ["event: error"]:
            found.append(("error", orjson.loads(data[0])))
        elif data:
            found.append(orjson.loads(data[0]))
    return found


def problem(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = ErrorEnvelope.model_validate_json(response.content).error
    assert (error.code, error.param) == (code, param)
    return error.message


# ---------------------------------------------------------------- small endpoints


async def test_probes_and_listings(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert Ready.model_validate_json((await client.get("/ready")).content).ready
    assert (await client.get("/version")).json()["version"]
    metrics = await client.get("/metrics")
    assert metrics.text == "glm_echo_output_tokens_total 0\n" and metrics.headers["content-type"].startswith(
        "text/plain"
    )
    [card] = ModelsBody.model_validate_json((await client.get("/v1/models")).content).data
    assert (await client.get("/v1/models/echo")).json() == card.model_dump()
    problem(await client.get("/v1/models/org/other"), 404, "model_not_found", "model")


async def test_ready_says_what_it_waits_for() -> None:
    async with calling(EchoBackend(ready=False)) as client:
        response = await client.get("/ready")
        assert response.status_code == 503 and response.headers["retry-after"] == "8"
        body = NotReadyEnvelope.model_validate_json(response.content)
        assert body.error.code == "not_ready" and "loading" in body.error.message
        assert body.pools["shared"].eta_s == 7.2
        assert (await client.get("/health")).status_code == 200


async def test_profile(client: httpx.AsyncClient) -> None:
    answer = await client.post("/profile", json={"seconds": 0.5})
    assert answer.json() == {"causes_s": {"gemm": 0.5}, "steps": 3}
    for wrong, where in (({"seconds": 1000.0}, "seconds"), ({"pool": "latency"}, "pool"), ({"pool": "all"}, "pool")):
        problem(await client.post("/profile", json=wrong), 400, "invalid_request", where)


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"prompt": "abc"})).json()
    assert tokens == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 64}
    assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "abc"}
    assert (await client.post("/tokenize", json={"messages": ask("hi")["messages"]})).json()["count"] == 2
    problem(await client.post("/tokenize", json={}), 400, "invalid_request")
    problem(
        await client.post("/tokenize", json={"prompt": "a", "messages": [{"role": "user", "content": "b"}]}),
        400,
        "invalid_request",
    )
    problem(await client.post("/detokenize", json={"tokens": [1000]}), 400, "invalid_request", "tokens")
    problem(await client.post("/detokenize", json={"tokens": ["a"]}), 400, "invalid_request", "tokens[0]")
    problem(await client.post("/tokenize", json={"prompt": "a", "model": "x"}), 404, "model_not_found", "model")


async def test_head_answers_as_get_without_a_body() -> None:
    async with serving(EchoBackend()) as served, httpx.AsyncClient(base_url=served.url) as client:
        for path in ("/health", "/ready", "/version", "/v1/models", "/v1/models/echo", "/metrics", "/openapi.json"):
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            assert head.headers["content-length"] == got.headers["content-length"]
        missing = await client.head("/v1/models/none")
        assert (missing.status_code, missing.content) == (404, b"")
        for path in (CHAT, "/v1/service/live"):
            assert (await client.head(path)).status_code == 405, path


async def test_tokenize_is_asked_for_a_prompt_as_it_will_be_sent() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    beside = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    backend = EchoBackend()
    async with calling(backend) as client:
        assert (await client.post("/tokenize", json=chat | beside)).status_code == 200
        assert orjson.loads(backend.tokenized) == chat | beside
        for name, value in beside.items():
            alone = await client.post("/tokenize", json={"prompt": "a", name: value})
            assert name in problem(alone, 400, "invalid_request")
        replaced = chat | {"chat_template_kwargs": {"messages": []}}
        problem(await client.post("/tokenize", json=replaced), 400, "invalid_request", "chat_template_kwargs")


# ---------------------------------------------------------------- the envelope


async def test_every_way_to_miss_the_api_answers_in_the_envelope(client: httpx.AsyncClient) -> None:
    json = {"content-type": "application/json"}
    problem(await client.get("/nothing/here"), 404, "not_found")
    problem(await client.get("/health/"), 404, "not_found")
    wrong = await client.get(CHAT)
    problem(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    problem(await client.delete("/v1/models"), 405, "method_not_allowed")
    problem(await client.post(CHAT, content=b"{", headers=json), 400, "invalid_request")
    problem(await client.post(CHAT, content=b'{"a":NaN}', headers=json), 400, "invalid_request")
    problem(await client.post(CHAT, content=b'"\xff"', headers=json), 400, "invalid_request")
    problem(
        await client.post(CHAT, content=b'{"model":"a","model":"b"}', headers=json), 400, "invalid_request", "model"
    )
    assert "Content-Type" in problem(await client.post(CHAT, content=b"{}"), 400, "invalid_request")
    problem(await client.post(CHAT, data={"a": "b"}), 400, "invalid_request")
    problem(await client.post(CHAT, content=b"x", headers=json | {"content-encoding": "gzip"}), 400, "invalid_request")
    problem(await client.post(CHAT, json=ask("x", nn=2)), 400, "unsupported_field", "nn")
    problem(await client.post(CHAT, json=ask("x", model="y")), 404, "model_not_found", "model")
    problem(
        await client.post(CHAT, json=ask("x"), headers={"x-glm-mode": "warp"}), 400, "invalid_request", "x-glm-mode"
    )
    for bad in ("soon", "-1", "0", "inf", "nan"):
        headers = {"x-request-timeout": bad}
        problem(await client.post(CHAT, json=ask("x"), headers=headers), 400, "invalid_request", "x-request-timeout")
    problem(await client.post(CHAT, json=ask("refuse:x")), 500, "engine_failed")


async def test_a_body_too_large_is_refused_with_and_without_its_length() -> None:
    async def chunks() -> Any:
        for _ in range(3):
            yield b" " * 500

    headers = {"content-type": "application/json"}
    async with calling(EchoBackend(), max_body_bytes=1024) as client:
        problem(await client.post(CHAT, content=b" " * 1025, headers=headers), 413, "body_too_large")
        problem(await client.post(CHAT, content=chunks(), headers=headers), 413, "body_too_large")
        problem(await client.post(CHAT, content=b" " * 1024, headers=headers), 400, "invalid_request")


async def test_context_overflow_is_a_status_in_streams_too(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        response = await client.post(CHAT, json=ask("x " * 80, stream=stream))
        message = problem(response, 400, "context_length_exceeded", "messages")
        assert "81" in message and "64" in message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_shows_no_insides(
    client: httpx.AsyncClient, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "glm5.http"):
        response = await client.post(CHAT, json=ask("bug:x", stream=stream))
    problem(response, 500, "internal_error")
    assert "secret" not in response.text
    assert "secret insides" in caplog.text


async def test_keys_are_asked_for_before_the_body_and_not_of_probes() -> None:
    async with calling(EchoBackend(key="k1")) as client:
        refused = await client.post(CHAT, content=b"not json")
        problem(refused, 401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/models/echo"):
            problem(await client.get(path), 401, "invalid_api_key")
        problem(await client.post("/tokenize", json={"prompt": "a"}), 401, "invalid_api_key")
        for path in ("/metrics", "/openapi.json", "/v1/service/live"):
            problem(await client.get(path), 401, "invalid_api_key")
        problem(await client.post("/profile", content=b"not json"), 401, "invalid_api_key")
        for path in ("/health", "/ready", "/version"):
            assert (await client.get(path)).status_code == 200
        good = await client.post(CHAT, json=ask("x"), headers={"authorization": "bearer k1"})
        assert good.status_code == 200


async def test_what_concerns_the_service_asks_for_an_operators_key() -> None:
    callers, operators = {"authorization": "Bearer k1"}, {"authorization": "Bearer boss"}
    async with calling(EchoBackend(key="k1", operator_key="boss")) as client:
        for path in ("/metrics", "/openapi.json", "/v1/service/live"):
            problem(await client.get(path, headers=callers), 403, "operator_key_needed")
        problem(await client.post("/profile", json={"seconds": 1}, headers=callers), 403, "operator_key_needed")
        for path in ("/metrics", "/openapi.json"):
            assert (await client.get(path, headers=operators)).status_code == 200
        assert (await client.post("/profile", json={"seconds": 1}, headers=operators)).status_code == 200
        for headers in (callers, operators):
            assert (await client.post(CHAT, json=ask("x"), headers=headers)).status_code == 200
    async with calling(EchoBackend(key="k1", operator_key="boss"), open_metrics=True) as client:
        assert (await client.get("/metrics")).status_code == 200
        problem(await client.get("/v1/service/live", headers=callers), 403, "operator_key_needed")


async def test_request_ids_are_kept_if_sane(client: httpx.AsyncClient) -> None:
    response = await client.get("/health", headers={"x-request-id": "abc-123"})
    assert response.headers["x-request-id"] == "abc-123"
    odd = await client.get("/health", headers={"x-request-id": "a b<script>"})
    assert odd.headers["x-request-id"].startswith("req_")


async def test_cors_is_off_unless_configured() -> None:
    origin = {"origin": "https://a.example"}
    async with calling(EchoBackend()) as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers=origin)).headers
    async with calling(EchoBackend(), cors_origins=("https://a.example",)) as client:
        answer = await client.get("/health", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        preflight = await client.options(CHAT, headers=origin | {"access-control-request-method": "POST"})
        assert preflight.status_code == 200


# ---------------------------------------------------------------- answers


async def test_a_whole_answer(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=ask("one two thrée", max_tokens=3))
    answer = ChatAnswer.model_validate_json(response.content)
    assert answer.choices[0].message.content == "one two thrée "
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.model, answer.service_tier, answer.usage.total_tokens) == ("echo", "default", 6)
    assert response.headers["x-glm-pool"] == "shared" and float(response.headers["x-glm-queue-ms"]) >= 0


async def test_choices_and_prompts_are_merged_with_their_indices(client: httpx.AsyncClient) -> None:
    fields = {"model": "echo", "prompt": ["a b", "c"], "n": 2}
    whole = TextAnswer.model_validate_json((await client.post(TEXT, json=fields)).content)
    assert [(c.index, c.text) for c in whole.choices] == [(0, "a b "), (1, "a b "), (2, "c "), (3, "c ")]
    assert whole.usage is not None
    # Each prompt counts once, every generated token counts.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = events(await client.post(TEXT, json=fields | options))
    assert streamed.pop() == "[DONE]"
    assert streamed.pop()["usage"] == whole.usage.model_dump(exclude_none=True)
    texts, ends = ["", "", "", ""], [0, 0, 0, 0]
    for event in streamed:
        TextAnswer.model_validate(event)
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == ["a b ", "a b ", "c ", "c "] and ends == [1, 1, 1, 1]


async def test_a_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=ask("one two", stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-glm-pool"] == "shared"
    *chunks, done = events(response)
    assert done == "[DONE]"
    parsed = [ChatChunk.model_validate(chunk) for chunk in chunks]
    assert len({(c.id, c.created, c.model, c.service_tier, c.object) for c in parsed}) == 1
    assert [c.choices[0].delta.content for c in parsed] == ["", "one ", "two ", None]
    assert [c.choices[0].finish_reason for c in parsed] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_once_if_asked_and_is_null_before(client: httpx.AsyncClient) -> None:
    asked = ask("one two", stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(await client.post(CHAT, json=asked))
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize(
    ("order", "code"), [("die", "engine_failed"), ("vanish", "engine_failed"), ("crash", "internal_error")]
)
@pytest.mark.parametrize("n", [1, 3])
async def test_failure_after_the_first_byte_is_an_event_and_no_done(
    client: httpx.AsyncClient, order: str, code: str, n: int
) -> None:
    response = await client.post(CHAT, json=ask(f"{order}:a b c d", stream=True, n=n))
    assert response.status_code == 200
    found = events(response)
    assert found[-1][0] == "error" and found[-1][1]["error"]["code"] == code
    assert "[DONE]" not in found
    assert all(event["choices"][0]["finish_reason"] is None for event in found[:-1])
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("written", "arguments"), [('{"a": 1}', '{"a": 1}'), ("", "{}")])
async def test_tool_calls(client: httpx.AsyncClient, stream: bool, written: str, arguments: str) -> None:
    response = await client.post(CHAT, json=ask(f"tool:{written}", tools=TOOLS, stream=stream))
    if not stream:
        [choice] = ChatAnswer.model_validate_json(response.content).choices
        assert choice.message.tool_calls is not None
        [made] = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert (made.function.name, made.function.arguments) == ("f", arguments) and made.id
        return
    *chunks, done = events(response)
    parts = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", ())]
    assert done == "[DONE]" and [part["function"].get("name") for part in parts] == ["f"] + [None] * (len(parts) - 1)
    assert "".join(part["function"]["arguments"] for part in parts) == arguments


async def test_broken_tool_arguments_are_an_error_not_an_answer(client: httpx.AsyncClient) -> None:
    broken = ask("tool:{oops", tools=TOOLS)
    problem(await client.post(CHAT, json=broken), 500, "engine_failed")
    found = events(await client.post(CHAT, json=broken | {"stream": True}))
    assert found[-1][0] == "error" and "[DONE]" not in found


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_demanded_tool_call_that_does_not_come_is_an_error(client: httpx.AsyncClient, choice: Any) -> None:
    ignored = ask("just text", tools=TOOLS, tool_choice=choice)
    assert "tool_choice" in problem(await client.post(CHAT, json=ignored), 500, "engine_failed")
    found = events(await client.post(CHAT, json=ignored | {"stream": True}))
    assert found[-1][0] == "error" and "[DONE]" not in found
    cut = (await client.post(CHAT, json=ignored | {"max_tokens": 1})).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    called = (await client.post(CHAT, json=ask("tool:{}", tools=TOOLS, tool_choice=choice))).json()
    assert called["choices"][0]["message"]["tool_calls"]


async def test_logprobs_whole_and_streamed(client: httpx.AsyncClient) -> None:
    asked = ask("a b", logprobs=True, top_logprobs=1)
    whole = (await client.post(CHAT, json=asked)).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(await client.post(CHAT, json=asked | {"stream": True}))
    streamed = [t for c in chunks for t in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole
    assert [token["token"] for token in whole] == ["a ", "b "] and "id" not in whole[0]
    older = (await client.post(TEXT, json={"model": "echo", "prompt": "a b", "logprobs": 1})).json()["choices"][0]
    assert older["logprobs"]["text_offset"] == [0, 2] and older["logprobs"]["tokens"] == ["a ", "b "]
