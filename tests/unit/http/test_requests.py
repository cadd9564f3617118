"""What a request may be: the schema, honoured fields, and the engine requests made of it."""

from typing import Any

import orjson
import pytest

from service.errors import BadRequest, ModelNotFound, ServiceError, UnsupportedField
from service.http.honour import refuse_unhonoured
from service.http.plan import Headers, Plan, make_plan
from service.http.schema import ChatRequest, CompletionRequest
from service.http.settings import HttpSettings
from service.http.validate import validate
from service.types import ModelCard

CARD = ModelCard("m", "echo", "none", context_tokens=64, vocab_size=1000)
ALL = frozenset(ChatRequest.model_fields) | frozenset(CompletionRequest.model_fields)
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "x", **fields}


def plan(raw: dict[str, Any], honours: frozenset[str] = ALL, **settings: Any) -> Plan:
    model = ChatRequest if "messages" in raw else CompletionRequest
    return make_plan(
        validate(model, raw),
        raw,
        id="id",
        headers=Headers(),
        settings=HttpSettings(**settings),
        cards=[CARD],
        honours=honours,
    )


def refused(raw: dict[str, Any], **kwargs: Any) -> ServiceError:
    with pytest.raises(BadRequest) as caught:
        plan(raw, **kwargs)
    return caught.value


# ---------------------------------------------------------------- schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"hello": 1}}, "logit_bias.hello"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        # What needs more than the schema:
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 9}, "n"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_completion_tokens": 65}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
    ],
)
def test_chat_fields_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(chat(**fields)).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 33}, "prompt"),
        ({"prompt": [5, 1000]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"messages_": []}, "messages_"),
    ],
)
def test_completion_fields_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(text(**fields)).param == param


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "be brief"}, USER],
        [{"role": "system", "content": [{"type": "text", "text": "a"}], "name": "s"}, USER],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "4"}],
        [
            {
                "role": "assistant",
                "content": "hi",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
            }
        ],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    ],
)
def test_conversations_accepted(messages: list[Any]) -> None:
    [part] = plan(chat(messages=messages)).parts
    for message in orjson.loads(part.request.body)["messages"]:
        assert message["role"] in {"system", "user", "assistant", "tool"}
        assert message.keys() <= {"role", "content", "name", "tool_calls", "tool_call_id"}


def test_unknown_names_come_with_the_nearest() -> None:
    error = refused(chat(temprature=1))
    assert isinstance(error, UnsupportedField)
    assert "temprature" in error.message and "did you mean 'temperature'" in error.message
    nested = refused(chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}))
    assert "did you mean 'schema'" in nested.message


@pytest.mark.parametrize(
    "name", ["audio", "prediction", "web_search_options", "functions", "function_call", "extra_body"]
)
def test_some_names_are_always_refused_with_a_reason_but_null_asks_nothing(name: str) -> None:
    error = refused(chat(**{name: {}}))
    assert isinstance(error, UnsupportedField) and error.param == name and len(error.message) > 40
    assert plan(chat(**{name: None})).parts


def test_other_parts_than_text_are_refused_as_unsupported() -> None:
    for role in ("user", "assistant"):
        part = {"type": "image_url", "image_url": {"url": "data:"}}
        error = refused(chat(messages=[{"role": role, "content": [part]}]))
        assert isinstance(error, UnsupportedField) and "text" in error.message
        assert (error.param or "").startswith("messages[0].content[0]")


def test_labels_are_accepted_and_go_no_further() -> None:
    labels = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "modalities": ["text"],
        "service_tier": "fast",
        "n": 1,
    }
    made = plan(chat(**labels, temperature=0.5))
    assert orjson.loads(made.parts[0].request.body).keys() == {"model", "messages", "temperature"}
    assert made.context.requested_tier == "priority" and made.parts[0].request.tier == "priority"
    assert refused(chat(store=True)).param == "store"
    assert refused(chat(modalities=["text", "audio"])).param == "modalities"


# ---------------------------------------------------------------- honoured or refused


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1},
        {"top_p": 1.0},
        {"n": 1},
        {"logprobs": False},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"top_k": -1},
        {"seed": None},
        {"verbosity": "medium"},
    ],
)
def test_fields_that_ask_for_nothing_are_harmless_and_dropped(fields: dict[str, Any]) -> None:
    made = plan(chat(**fields), honours=frozenset({"max_tokens"}))
    assert orjson.loads(made.parts[0].request.body).keys() == {"model", "messages"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0}, "temperature"),
        ({"seed": 1}, "seed"),
        ({"stop": "a"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [TOOL]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"top_k": 5}, "top_k"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_fields_the_engine_does_not_know_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(chat(**fields), honours=frozenset({"nothing"}))
    assert isinstance(error, UnsupportedField) and error.param == param
    assert plan(chat(**fields), honours=frozenset({"nothing", "max_tokens", *fields})).parts


def test_top_logprobs_and_max_completion_tokens_are_honoured_with_their_elders() -> None:
    refuse_unhonoured(
        {"logprobs": True, "top_logprobs": 3, "max_completion_tokens": 4}, frozenset({"logprobs", "max_tokens"})
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [(chat(logprobs=True, top_logprobs=6), "top_logprobs"), (text(logprobs=6), "logprobs")],
)
def test_max_logprobs_bounds_both_endpoints(fields: dict[str, Any], param: str) -> None:
    assert plan(fields, max_logprobs=6).parts
    error = refused(fields, max_logprobs=5)
    assert (error.param, error.message) == (param, f"{param} may be at most 5 here, not 6")


def test_nothing_loaded_yet_refuses_nothing_here() -> None:
    raw = chat(model="any", seed=1)
    made = make_plan(
        validate(ChatRequest, raw),
        raw,
        id="i",
        headers=Headers(),
        settings=HttpSettings(),
        cards=[],
        honours=frozenset(),
    )
    assert made.model == "any"


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        plan(chat(model="mm"))


# ---------------------------------------------------------------- engine requests


def test_fan_out_of_choices_and_prompts() -> None:
    made = plan(text(prompt=["a", [1, 2]][:1] * 2, n=2, seed=7, stream=True))
    assert [(part.index, part.prompt) for part in made.parts] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert len({part.request.id for part in made.parts}) == 4
    bodies = [orjson.loads(part.request.body) for part in made.parts]
    assert [body["seed"] for body in bodies] == [7, 8, 7, 8]
    assert all(body.keys().isdisjoint(("n", "stream", "stream_options")) for body in bodies)
    assert made.context.siblings == 4 and made.context.stream


@pytest.mark.parametrize(
    ("prompt", "bodies"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompts_in_all_their_shapes(prompt: Any, bodies: list[Any]) -> None:
    made = plan(text(prompt=prompt))
    assert [orjson.loads(part.request.body)["prompt"] for part in made.parts] == bodies


def test_the_largest_seed_wraps_instead_of_leaving_its_range() -> None:
    made = plan(chat(seed=2**63 - 1, n=2))
    assert [orjson.loads(part.request.body)["seed"] for part in made.parts] == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_may_not_replace_the_conversation(name: str) -> None:
    error = refused(chat(chat_template_kwargs={name: []}))
    assert error.param == "chat_template_kwargs" and name in error.message


def test_both_names_of_max_tokens_become_one() -> None:
    made = plan(chat(max_tokens=5, max_completion_tokens=5))
    body = orjson.loads(made.parts[0].request.body)
    assert body["max_tokens"] == 5 and "max_completion_tokens" not in body
    assert made.context.max_tokens == 5


def test_a_client_can_shorten_the_deadline_not_lengthen_it() -> None:
    for asked, got in ((5.0, 5.0), (5000.0, 600.0), (None, 600.0)):
        raw = chat()
        made = make_plan(
            validate(ChatRequest, raw),
            raw,
            id="i",
            headers=Headers(deadline_s=asked),
            settings=HttpSettings(),
            cards=[CARD],
            honours=ALL,
        )
        assert made.timeout_s == made.parts[0].request.timeout_s == got


def test_a_credential_is_not_in_the_repr_of_the_context() -> None:
    raw = chat()
    made = make_plan(
        validate(ChatRequest, raw),
        raw,
        id="i",
        headers=Headers(credential="sk-secret"),
        settings=HttpSettings(),
        cards=[CARD],
        honours=ALL,
    )
    assert made.context.credential == "sk-secret"
    assert "sk-secret" not in repr(made)
