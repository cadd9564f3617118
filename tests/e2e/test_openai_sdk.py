"""The official SDK against the running service with a real model."""

from __future__ import annotations

import json

import openai
import pytest
from openai import OpenAI

pytestmark = pytest.mark.e2e
PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=PARIS, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens > 10 and answer.usage.completion_tokens < 16
    assert answer.service_tier == "priority"


def test_stream_says_the_same(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=PARIS, temperature=0, max_tokens=16)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=PARIS,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_completions_logprobs(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and len(logprobs.tokens) == 4
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert all(len(top) == 3 for top in logprobs.top_logprobs or [])


def test_chat_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=PARIS, temperature=0, max_tokens=5, logprobs=True, top_logprobs=4
    )
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content is not None and len(content) == 5
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 4
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_json_schema(client: OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(client: OpenAI, model: str, stream: bool) -> None:
    ask = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 256,
    }
    if stream:
        name, arguments, reasons = "", "", []
        for chunk in client.chat.completions.create(stream=True, **ask):
            choice = chunk.choices[0]
            for call in choice.delta.tool_calls or []:
                name += (call.function.name or "") if call.function else ""
                arguments += (call.function.arguments or "") if call.function else ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        assert reasons == ["tool_calls"]
    else:
        answer = client.chat.completions.create(**ask)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls or []
        name, arguments = call.function.name, call.function.arguments
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city"}


def test_n_choices(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=PARIS, n=3, seed=7, temperature=1.0, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_seed_repeats(client: OpenAI, model: str) -> None:
    ask = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 12,
        "temperature": 1.0,
    }
    texts = {client.chat.completions.create(seed=11, **ask).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_stop(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="1 2 3 4 5 6", max_tokens=30, temperature=0, stop=[" 9"])
    assert " 9" not in answer.choices[0].text and answer.choices[0].finish_reason == "stop"


def test_logit_bias_bans_a_token(client: OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    first = client.completions.create(**ask).choices[0]
    url = str(client.base_url).replace("/v1/", "/tokenize")
    ids = client._client.post(url, json={"prompt": first.text, "add_special_tokens": False}).json()["tokens"]
    other = client.completions.create(logit_bias={str(ids[0]): -100}, **ask).choices[0]
    assert other.text != first.text


def test_errors_are_the_sdk_s_own(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=PARIS)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as over:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 4000}])
    assert over.value.code == "context_length_exceeded"
    assert "2048" in over.value.message and "40" in over.value.message
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=model, messages=PARIS, temperature=3)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as extra:
        client.chat.completions.create(model=model, messages=PARIS, extra_body={"temprature": 1})
    assert "temperature" in extra.value.message


def test_tokenize_round_trip(client: OpenAI) -> None:
    base = str(client.base_url).replace("/v1/", "")
    text = "Grüße, 世界! 🙂"
    tokens = client._client.post(f"{base}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 2048
    assert client._client.post(f"{base}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == text
