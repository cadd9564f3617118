"""The official OpenAI SDK against the app on loopback: answers parse, errors are the SDK's own classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import orjson
import pytest
from pydantic import BaseModel

from tests.unit.http.conftest import serving
from tests.unit.http.echo import EchoBackend

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


@pytest.fixture
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(EchoBackend(key="k")) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, timeout=10) as client,
    ):
        yield client


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    raw = await sdk.chat.completions.with_raw_response.create(model="echo", messages=user("hi there"))
    answer = raw.parse()
    assert answer.choices[0].message.content == "hi there "
    assert answer.usage and answer.usage.completion_tokens == 2
    assert answer.service_tier == "default"
    assert answer._request_id == raw.headers["x-request-id"]
    # What came back goes in again as it is, as clients do.
    again = [*user("hi"), answer.choices[0].message.model_dump(), *user("more")]
    assert (await sdk.chat.completions.create(model="echo", messages=again)).choices[0].message.content == "more "


async def test_streaming_with_usage(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="echo", messages=user("a b c"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "a b c "
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage and chunks[-1].usage.total_tokens == 6


async def test_the_sdks_own_stream_accumulator(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model="echo", messages=user('tool:{"a": 1}'), tools=[TOOL | {"function": TOOL["function"] | {"strict": True}}]
    ) as stream:
        final = await stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.name == "add" and orjson.loads(call.function.arguments) == {"a": 1}
    assert final.choices[0].finish_reason == "tool_calls"


async def test_parse_into_a_model(sdk: openai.AsyncOpenAI) -> None:
    class Sum(BaseModel):
        value: int

    answer = await sdk.chat.completions.parse(model="echo", messages=user('{"value":5}'), response_format=Sum)
    assert answer.choices[0].message.parsed == Sum(value=5)


async def test_tools_and_logprobs(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="echo", messages=user("tool:"), tools=[TOOL])
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.arguments == "{}"
    answer = await sdk.chat.completions.create(model="echo", messages=user("a"), logprobs=True, top_logprobs=1)
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "a "


async def test_completions_of_several_prompts(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="echo", prompt=["a", "b c"], n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["a ", "a ", "b c ", "b c "]
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.tokens == ["a "]
    stream = await sdk.completions.create(model="echo", prompt="a b", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "a b "


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["echo"]
    assert (await sdk.models.retrieve("echo")).owned_by == "glm5-serve"


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "invalid_request", "temperature"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "unsupported_field", "temprature"),
        ({"extra_body": {"extra_body": {}}}, openai.BadRequestError, "unsupported_field", "extra_body"),
        ({"messages": user("x " * 80)}, openai.BadRequestError, "context_length_exceeded", "messages"),
        ({"model": "nope"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": user("refuse:")}, openai.InternalServerError, "engine_failed", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_the_sdks_own_classes(
    sdk: openai.AsyncOpenAI,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str,
    param: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as caught:
        await sdk.chat.completions.create(**{"model": "echo", "messages": user("x"), "stream": stream} | fields)
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_keys_and_overload() -> None:
    async with serving(EchoBackend(key="k", slots=1, queue=0)) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(model="echo", messages=user("hang-later:x"), stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                await sdk.chat.completions.create(model="echo", messages=user("x"))
            assert caught.value.response.headers["retry-after"] == "2"
            await stream.close()


@pytest.mark.parametrize("order", ["die", "vanish"])
async def test_a_stream_that_fails_raises_in_the_sdk(sdk: openai.AsyncOpenAI, order: str) -> None:
    stream = await sdk.chat.completions.create(model="echo", messages=user(f"{order}:a b c d"), stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="engine"):
        async for chunk in stream:
            seen.append(chunk)
    assert len(seen) >= 3
