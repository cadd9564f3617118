"""POST /v1/responses with the official OpenAI SDK: its own objects go back in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import orjson
import pytest
from pydantic import BaseModel

from service.http.dialects.responses.answers import ResponseAnswer
from tests.unit.http.conftest import Served, serving
from tests.unit.http.echo import EchoBackend

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": True,
}


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with serving(EchoBackend(key="k")) as found:
        yield found


@pytest.fixture
async def sdk(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, timeout=10) as client:
        yield client


def asked(server: Served, at: int = -1) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(server.backend.seen[at][0].body)
    return body


async def test_a_text(sdk: openai.AsyncOpenAI, server: Served) -> None:
    raw = await sdk.responses.with_raw_response.create(
        model="echo", input="hi there", instructions="Be brief.", temperature=0.5, max_output_tokens=9
    )
    ResponseAnswer.model_validate_json(raw.content)
    answer = raw.parse()
    assert answer.output_text == "hi there "
    assert (answer.status, answer.model, answer.service_tier) == ("completed", "echo", "default")
    assert (answer.instructions, answer.temperature, answer.max_output_tokens) == ("Be brief.", 0.5, 9)
    assert answer.usage and (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 2)
    assert answer.id.startswith("resp_") and "x-glm-ignored" not in raw.headers
    body = asked(server)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi there"}]
    assert (body["max_tokens"], body["temperature"]) == (9, 0.5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
async def test_a_conversation_with_thinking_a_call_and_its_result(
    sdk: openai.AsyncOpenAI, server: Served, stream: bool, include: Any
) -> None:
    async def ask(items: list[Any]) -> Any:
        fields: Any = {"model": "echo", "tools": [ADD], "include": include, "store": False, "input": items}
        if not stream:
            return await sdk.responses.create(**fields)
        async with sdk.responses.stream(**fields) as events:
            return await events.get_final_response()

    items: list[Any] = [{"role": "user", "content": 'tool:{"a": 1}'}]
    first = await ask(items)
    [call] = first.output
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
    assert first.usage.input_tokens_details.cached_tokens == 1
    items += first.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "think:2 it is"}]
    second = await ask(items)
    thought, said = second.output
    assert thought.content[0].text == "so " and said.content[0].text == "2 it is "
    assert second.usage.output_tokens_details.reasoning_tokens == 3
    if include:  # as agents do that keep nothing but what is sealed
        items += [{"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}, said]
    else:
        items += second.output
    await ask([*items, {"role": "developer", "content": "more"}])
    assert asked(server)["messages"] == [
        {"role": "user", "content": 'tool:{"a": 1}'},
        {
            "role": "assistant",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            "content": None,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "think:2 it is"},
        {"role": "assistant", "content": "2 it is ", "reasoning_content": "so "},
        {"role": "system", "content": "more"},
    ]
    assert asked(server)["tools"][0]["function"]["parameters"] == ADD["parameters"]


async def test_events_come_in_openais_order(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.responses.create(model="echo", input="think:a", stream=True)
    seen = [event async for event in stream]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.type.removeprefix("response.") for event in seen] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


async def test_parse_into_a_model_and_back(sdk: openai.AsyncOpenAI, server: Served) -> None:
    class Sum(BaseModel):
        value: int

    answer = await sdk.responses.parse(model="echo", input='{"value":5}', text_format=Sum)
    assert answer.output_parsed == Sum(value=5)
    assert asked(server)["response_format"]["json_schema"]["name"] == "Sum"
    again: Any = [*answer.output, {"role": "user", "content": "more"}]
    assert (await sdk.responses.create(model="echo", input=again)).output_text == "more "
    again = [item.model_dump() for item in answer.output] + [{"role": "user", "content": "more"}]
    raw = await sdk.responses.with_raw_response.create(model="echo", input=again)
    assert raw.headers["x-glm-ignored"] == "input.content.annotations, input.content.logprobs, input.content.parsed"


async def test_logprobs(sdk: openai.AsyncOpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer: Any = await sdk.responses.create(model="echo", input="a b", include=include, top_logprobs=1)
    given = answer.output[0].content[0].logprobs
    assert [token.token for token in given] == ["a ", "b "] and given[0].top_logprobs[0].token == "a "


async def test_a_cut_answer_is_incomplete(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model="echo", input="a b c", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
    assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    stream = await sdk.responses.create(model="echo", input="a b c", max_output_tokens=2, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_what_agents_send_beside_is_taken_and_named(sdk: openai.AsyncOpenAI) -> None:
    raw = await sdk.responses.with_raw_response.create(
        model="echo",
        input=[{"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAAA"}, _user("x")],
        tools=[{"type": "web_search"}, ADD],
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        prompt_cache_key="session",
        parallel_tool_calls=True,
        store=True,
        truncation="auto",
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert set(raw.headers["x-glm-ignored"].split(", ")) == {
        "reasoning.summary",
        "client_metadata",
        "store",
        "truncation",
        "include.web_search_call.action.sources",
        "input.encrypted_content",
        "tools.web_search",
        "reasoning_effort",
        "verbosity",
    }


def _user(text: str) -> Any:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_field", "previous_response_id"),
        ({"background": True}, "invalid_request", "background"),
        ({"input": "x " * 80}, "context_length_exceeded", "input"),
        ({"input": [_user("x") | {"content": [{"type": "input_image"}]}]}, "unsupported_field", "input[0].content[0]"),
        ({"max_output_tokens": 65}, "invalid_request", "max_output_tokens"),
        ({"tools": [{"type": "file_search"}]}, "invalid_request", "tools[0].type"),
        ({"extra_body": {"instruction": "x"}}, "unsupported_field", "instruction"),
        ({"tools": [ADD, ADD]}, "invalid_request", "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_name_the_field_as_the_client_knows_it(
    sdk: openai.AsyncOpenAI, fields: Any, code: str, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.responses.create(**{"model": "echo", "input": "x", "stream": stream} | fields)
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_a_stream_that_fails_says_so(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.responses.create(model="echo", input="die:a b c d", stream=True)
    *_, last = [event async for event in stream]
    assert last.type == "response.failed" and last.response.error
    assert last.response.error.message == "the engine died" and last.response.status == "failed"
