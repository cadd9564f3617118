"""What GLM clients, agents and histories of other servers send to /v1/chat/completions: obeyed, taken and named, or
refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import orjson
import pytest
from pydantic import BaseModel

from tests.unit.http.conftest import Served, ask, serving
from tests.unit.http.echo import EVERYTHING, EchoBackend
from tests.unit.http.test_app import CHAT, problem

USER: Any = {"role": "user", "content": "x"}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with serving(EchoBackend(fields=EVERYTHING | {"thinking_token_budget"})) as found:
        yield found


@pytest.fixture
async def http(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        yield client


def asked(server: Served) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(server.backend.seen[-1][0].body)
    return body


@pytest.mark.parametrize(
    ("fields", "reached"),
    [
        ({"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled", "clear_thinking": False, "budget_tokens": 9}},
            {"chat_template_kwargs": {"enable_thinking": True, "clear_thinking": False}, "thinking_token_budget": 9},
        ),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"colour": "red"}},
            {"chat_template_kwargs": {"enable_thinking": True, "colour": "red"}},
        ),
        ({"thinking_budget": 5}, {"thinking_token_budget": 5}),
        (
            {"guided_json": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        (
            {"structured_outputs": {"json": {"type": "object"}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        ({"skip_special_tokens": True, "include_reasoning": True, "priority": 0}, {}),
    ],
)
async def test_obeyed(server: Served, http: httpx.AsyncClient, fields: Any, reached: Any) -> None:
    response = await http.post(CHAT, json=ask("x", **fields))
    assert response.status_code == 200, response.text
    assert {key: value for key, value in asked(server).items() if key not in ("model", "messages")} == reached
    assert "x-glm-ignored" not in response.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "enable_thinking"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget"),
        ({"guided_json": {}, "response_format": {"type": "text"}}, "guided_json"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
    ],
)
async def test_what_cannot_be_is_a_400(http: httpx.AsyncClient, fields: Any, param: str) -> None:
    problem(await http.post(CHAT, json=ask("x", **fields)), 400, "invalid_request", param)


@pytest.mark.parametrize("name", ["guided_regex", "guided_choice", "guided_grammar"])
async def test_other_guides_are_refused_by_name(http: httpx.AsyncClient, name: str) -> None:
    problem(await http.post(CHAT, json=ask("x", **{name: "a"})), 400, "unsupported_field", name)
    short = name.removeprefix("guided_")
    where = f"structured_outputs.{short}"
    problem(await http.post(CHAT, json=ask("x", structured_outputs={short: "a"})), 400, "unsupported_field", where)


async def test_a_budget_that_the_engine_cannot_keep_is_refused_by_name() -> None:
    async with serving(EchoBackend()) as server, httpx.AsyncClient(base_url=server.url) as http:
        response = await http.post(CHAT, json=ask("x", thinking_token_budget=5))
        problem(response, 400, "unsupported_field", "thinking_token_budget")


@pytest.mark.parametrize(("priority", "tier"), [(-5, "priority"), (0, "default"), (3, "flex")])
async def test_priority_is_a_tier(server: Served, http: httpx.AsyncClient, priority: int, tier: str) -> None:
    await http.post(CHAT, json=ask("x", priority=priority))
    assert server.backend.seen[-1][0].tier == tier
    await http.post(CHAT, json=ask("x", priority=priority, service_tier="flex"))
    assert server.backend.seen[-1][0].tier == "flex"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_where_the_client_wants_none(http: httpx.AsyncClient, stream: bool) -> None:
    told = await http.post(CHAT, json=ask("think:a", stream=stream))
    assert "reasoning_content" in told.text
    silent = await http.post(CHAT, json=ask("think:a", stream=stream, include_reasoning=False))
    assert silent.status_code == 200 and "reasoning_content" not in silent.text and "a " in silent.text
    if not stream:  # the tokens were made all the same
        assert silent.json()["usage"] == told.json()["usage"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"metadata": {"a": "b"}, "cache_salt": "s"}, {"metadata", "cache_salt"}),
        ({"user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}, {"safety_identifier"}),
        (
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"stream_options.continuous_usage_stats"},
        ),
    ],
)
async def test_labels_are_taken_and_named(http: httpx.AsyncClient, fields: Any, names: set[str]) -> None:
    response = await http.post(CHAT, json=ask("x", **fields))
    assert response.status_code == 200 and set(response.headers["x-glm-ignored"].split(", ")) == names


@pytest.mark.parametrize(
    ("message", "becomes", "named"),
    [
        ({"content": "hi", "audio": None, "function_call": None, "annotations": []}, {"content": "hi"}, "annotations"),
        ({"content": "hi", "parsed": {"a": 1}}, {"content": "hi"}, "parsed"),
        ({"content": "hi", "reasoning": "so"}, {"content": "hi", "reasoning_content": "so"}, ""),
        (
            {"content": "hi", "reasoning_content": "so", "reasoning": "so"},
            {"content": "hi", "reasoning_content": "so"},
            "",
        ),
        ({"content": "hi", "reasoning_details": [{"type": "x"}]}, {"content": "hi"}, "reasoning_details"),
        ({"content": "hi", "reasoning_content": ""}, {"content": "hi"}, ""),
        ({"content": "hi", "tool_calls": []}, {"content": "hi"}, ""),
        ({"content": [], "tool_calls": [CALL]}, {"content": None, "tool_calls": [CALL]}, ""),
        ({"content": []}, {"content": ""}, ""),
        ({"content": None, "refusal": "no"}, {"content": "no"}, ""),
        ({"tool_calls": [CALL | {"index": 0}]}, {"content": None, "tool_calls": [CALL]}, "tool_calls.index"),
        (
            {"tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {}}}]},
            {"content": None, "tool_calls": [CALL]},
            "tool_calls.function.parsed_arguments",
        ),
    ],
)
async def test_histories_of_other_servers_are_taken(
    server: Served, http: httpx.AsyncClient, message: Any, becomes: Any, named: str
) -> None:
    response = await http.post(CHAT, json={"model": "echo", "messages": [USER, {"role": "assistant"} | message, USER]})
    assert response.status_code == 200, response.text
    sent = asked(server)["messages"][1]
    assert {key: value for key, value in sent.items() if key != "role"} == becomes
    assert response.headers.get("x-glm-ignored", "") == (f"messages.{named}" if named else "")


async def test_the_sdks_parsed_objects_go_back_as_they_are(server: Served) -> None:
    class Sum(BaseModel):
        value: int

    tool = openai.pydantic_function_tool(Sum, name="add")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        answer = await sdk.chat.completions.parse(
            model="echo", messages=[{"role": "user", "content": '{"value":5}'}], response_format=Sum
        )
        called = await sdk.chat.completions.parse(
            model="echo", messages=[{"role": "user", "content": 'tool:{"value":6}'}], tools=[tool]
        )
        message, calling = answer.choices[0].message, called.choices[0].message
        assert message.parsed == Sum(value=5)
        [call] = calling.tool_calls or []
        assert call.function.parsed_arguments == Sum(value=6)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "11"}
        history: Any = [USER, message, USER, calling, result]
        again = await sdk.chat.completions.create(model="echo", messages=history)
        assert again.choices[0].message.content == "11 "
        history = [USER, message.model_dump(), USER, calling.model_dump(), result]
        assert (await sdk.chat.completions.create(model="echo", messages=history)).choices
    assert asked(server)["messages"][3]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"value":6}'}}
    ]
