"""The official Anthropic SDK against the app on loopback: its own objects go back in, errors are its own classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import orjson
import pytest

from service.http.dialects.messages.answers import MessageAnswer
from tests.unit.http.conftest import Served, serving
from tests.unit.http.echo import EchoBackend

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "cache_control": {"type": "ephemeral"},
}


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with serving(EchoBackend(key="k")) as found:
        yield found


@pytest.fixture
async def sdk(server: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0, timeout=10) as client:
        yield client


def asked(server: Served, at: int = -1) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(server.backend.seen[at][0].body)
    return body


async def test_a_message(sdk: anthropic.AsyncAnthropic) -> None:
    raw = await sdk.messages.with_raw_response.create(model="echo", max_tokens=9, messages=user("hi there"))
    MessageAnswer.model_validate_json(await raw.http_response.aread())
    answer = await raw.parse()
    [block] = answer.content
    assert block.type == "text" and block.text == "hi there "
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.service_tier) == (2, 2, "standard")
    assert answer.id.startswith("msg_") and answer._request_id == raw.headers["x-request-id"]
    assert "x-glm-ignored" not in raw.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_thinking_a_call_and_its_result(
    sdk: anthropic.AsyncAnthropic, server: Served, stream: bool
) -> None:
    """The tools loop, with the SDK's own objects sent back."""
    history = user('tool:{"a": 1}')
    fields: Any = {"model": "echo", "max_tokens": 60, "tools": [ADD], "system": "Add things."}
    if stream:
        async with sdk.messages.stream(messages=history, **fields) as events:
            first: Any = await events.get_final_message()
    else:
        first = await sdk.messages.create(messages=history, **fields)
    [call] = first.content
    assert (call.type, call.name, call.input, first.stop_reason) == ("tool_use", "add", {"a": 1}, "tool_use")
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (1, 1)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "think:2 it is"}]}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    if stream:
        async with sdk.messages.stream(messages=history, **fields) as events:
            second: Any = await events.get_final_message()
    else:
        second = await sdk.messages.create(messages=history, **fields)
    thought, said = second.content
    assert (thought.type, thought.thinking, said.text) == ("thinking", "so ", "2 it is ")
    assert thought.signature.startswith("glm5.")
    assert second.usage.output_tokens_details.thinking_tokens == 3
    # The thinking goes back with its signature, and reaches the model's template.
    history += [{"role": "assistant", "content": second.content}, *user("more")]
    await sdk.messages.create(messages=history, **fields)
    assert asked(server)["messages"] == [
        {"role": "system", "content": "Add things."},
        {"role": "user", "content": 'tool:{"a": 1}'},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
            ],
            "content": None,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "think:2 it is"},
        {"role": "assistant", "content": "2 it is ", "reasoning_content": "so "},
        {"role": "user", "content": "more"},
    ]
    [tool] = asked(server)["tools"]
    assert tool["function"] == {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}


async def test_events_come_in_anthropics_order(sdk: anthropic.AsyncAnthropic) -> None:
    stream = await sdk.messages.create(model="echo", max_tokens=60, messages=user("think:a b"), stream=True)
    seen = [event async for event in stream]
    kinds = [event.type for event in seen]
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_delta"]
    assert (
        kinds
        == [
            "message_start",
            *block,
            "content_block_delta",  # the signature
            "content_block_stop",
            *block[:3],
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    )
    last: Any = seen[-2]
    assert (last.delta.stop_reason, last.usage.input_tokens, last.usage.output_tokens) == ("end_turn", 2, 5)


async def test_a_call_without_arguments_is_an_empty_object(sdk: anthropic.AsyncAnthropic) -> None:
    for stream in (False, True):
        fields: Any = {"model": "echo", "max_tokens": 9, "messages": user("tool:"), "tools": [ADD]}
        if stream:
            async with sdk.messages.stream(**fields) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await sdk.messages.create(**fields)
        assert [(block.name, block.input) for block in answer.content] == [("add", {})]


async def test_fields_reach_the_engine_by_its_names(sdk: anthropic.AsyncAnthropic, server: Served) -> None:
    raw = await sdk.messages.with_raw_response.create(
        model="echo",
        max_tokens=1000,
        messages=user("x"),
        stop_sequences=["end"],
        tools=[ADD],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        extra_body={
            "temperature": 0.5,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    )
    body = asked(server)
    assert body["max_tokens"] == 64 and body["stop"] == ["end"] and body["temperature"] == 0.5
    assert body["parallel_tool_calls"] is False and body["tool_choice"] == "auto"
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "clear_thinking": False}
    assert set(raw.headers["x-glm-ignored"].split(", ")) == {
        "tools.cache_control",
        "max_tokens",
        "thinking_token_budget",
        "reasoning_effort",
    }


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_tool_choice(sdk: anthropic.AsyncAnthropic, server: Served, choice: Any, wanted: Any) -> None:
    await sdk.messages.create(
        model="echo", max_tokens=9, messages=user("x" if wanted == "none" else "tool:"), tools=[ADD], tool_choice=choice
    )
    assert asked(server).get("tool_choice") == wanted


async def test_the_billing_line_is_cut_so_that_prompts_begin_alike(
    sdk: anthropic.AsyncAnthropic, server: Served
) -> None:
    for cch in ("a1", "b2"):
        billing = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={cch};"
        system: list[Any] = [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent."}]
        raw = await sdk.messages.with_raw_response.create(
            model="echo", max_tokens=9, messages=user("x"), system=system if cch == "a1" else f"{billing}\nBe brief."
        )
        assert raw.headers["x-glm-ignored"] == "system.x-anthropic-billing-header"
    assert [asked(server, at)["messages"][0]["content"] for at in (-2, -1)] == ["You are an agent.", "Be brief."]


async def test_blocks_become_messages(sdk: anthropic.AsyncAnthropic, server: Served) -> None:
    document: Any = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "inside"},
        "title": "T",
    }
    failed = {"type": "tool_result", "tool_use_id": "t", "content": "no file", "is_error": True}
    use = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}, "caller": {"type": "direct"}}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    raw = await sdk.messages.with_raw_response.create(
        model="echo",
        max_tokens=9,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, document]},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": [hidden, {"type": "text", "text": "c"}, use]},  # type: ignore[list-item]
            {"role": "user", "content": [failed, {"type": "text", "text": "d"}]},  # type: ignore[list-item]
        ],
    )
    assert [(m["role"], m["content"]) for m in asked(server)["messages"]] == [
        ("user", "a\n\nT\n\ninside\n\nb"),
        ("assistant", "c"),
        ("tool", "Error: no file"),
        ("user", "d"),
    ]
    assert set(raw.headers["x-glm-ignored"].split(", ")) == {
        "messages.content.source.media_type",
        "messages.content.caller",
        "messages.content.redacted_thinking",
    }


async def test_count_tokens(sdk: anthropic.AsyncAnthropic) -> None:
    counted = await sdk.messages.count_tokens(model="echo", messages=user("abc"), tools=[ADD], system="s")
    assert counted.input_tokens == 3


async def test_the_key_in_either_header(server: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="k", max_retries=0) as bearer:
        assert (await bearer.messages.create(model="echo", max_tokens=9, messages=user("x"))).content
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await stranger.messages.create(model="echo", max_tokens=9, messages=user("x"))
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error" and body["request_id"] == caught.value.request_id


IMAGE: Any = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}]


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"model": "nope"}, anthropic.NotFoundError, "does not exist"),
        ({"messages": user("x " * 80)}, anthropic.BadRequestError, "prompt is too long: .*81 tokens"),
        ({"messages": user(IMAGE)}, anthropic.BadRequestError, "'image' is refused: the model 'echo' reads text"),
        ({"messages": [*user("x"), {"role": "assistant", "content": "{"}]}, anthropic.BadRequestError, "prefill"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "tools.0.*Anthropic's own"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, anthropic.BadRequestError, "mcp_servers"),
        ({"extra_body": {"sytem": "x"}}, anthropic.BadRequestError, "did you mean 'system'"),
        (
            {"tools": [ADD | {"input_schema": {"$ref": "#/nowhere"}}]},
            anthropic.BadRequestError,
            r"tools\[0\].input_schema",
        ),
        ({"messages": user("refuse:")}, anthropic.InternalServerError, "refused to start"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_the_sdks_own_classes(
    sdk: anthropic.AsyncAnthropic, fields: Any, kind: type[anthropic.APIStatusError], says: str, stream: bool
) -> None:
    with pytest.raises(kind, match=says):
        await sdk.messages.create(
            **{"model": "echo", "max_tokens": 9, "messages": user("x"), "stream": stream} | fields
        )


@pytest.mark.parametrize("order", ["die", "vanish"])
async def test_a_stream_that_fails_raises_in_the_sdk(sdk: anthropic.AsyncAnthropic, order: str) -> None:
    stream = await sdk.messages.create(model="echo", max_tokens=60, messages=user(f"{order}:a b c d"), stream=True)
    seen = []
    with pytest.raises(anthropic.APIStatusError, match="engine"):
        async for event in stream:
            seen.append(event.type)
    assert "content_block_delta" in seen and "message_stop" not in seen


async def test_a_cut_answer_says_why(sdk: anthropic.AsyncAnthropic) -> None:
    answer = await sdk.messages.create(model="echo", max_tokens=2, messages=user("a b c"))
    assert answer.stop_reason == "max_tokens"


async def test_a_stream_that_waits_is_kept_alive_with_pings() -> None:
    settings = {"open_stream_after_s": 0.1, "keepalive_s": 0.1}
    async with (
        serving(EchoBackend(slots=1), **settings) as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0) as sdk,
    ):
        fields: Any = {"model": "echo", "max_tokens": 9, "messages": user("slow:x"), "stream": True}
        raw = await sdk.messages.with_streaming_response.create(**fields).__aenter__()
        body = b"".join([piece async for piece in raw.iter_bytes()])
        assert body.count(b'event: ping\ndata: {"type":"ping"}\n\n') >= 1 and b"event: message_stop\n" in body
