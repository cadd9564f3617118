from __future__ import annotations

import json

import orjson
import pytest

from service.engines.llamacpp_tools import Gatherer, unwrap, wrap
from service.engines.llamacpp_wire import Meter, alternatives, counter, error_from, folded, request_body
from service.errors import BadRequest, ContextOverflow, EngineFailed
from service.types import Delta, TokenLogprob

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_openai_s_defaults_replace_llama_cpp_s() -> None:
    body = orjson.loads(request_body({"messages": [], "user": "u", "max_completion_tokens": 9}, 100))
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert body["max_tokens"] == 9 and body["stream"] is True and "user" not in body


def test_limits_and_spellings() -> None:
    body = orjson.loads(request_body({"prompt": "p", "max_tokens": 5000, "repetition_penalty": 1.2, "top_k": -1}, 100))
    assert body["max_tokens"] == 100 and body["repeat_penalty"] == 1.2 and body["top_k"] == 0
    body = orjson.loads(request_body({"prompt": "p", "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}, 100))
    assert body["chat_template_kwargs"] == {"reasoning_effort": "low", "a": 1}


def test_errors_become_ours() -> None:
    over = error_from({"type": "exceed_context_size_error", "n_prompt_tokens": 5001, "n_ctx": 2048, "code": 400})
    assert isinstance(over, ContextOverflow) and "5001" in over.message and "2048" in over.message
    assert error_from({"type": "exceed_context_size_error"}, "prompt").param == "prompt"
    assert isinstance(error_from({"code": 400, "message": "bad"}), BadRequest)
    assert isinstance(error_from({"code": 500, "message": "worse"}), EngineFailed)


def test_meter_turns_counters_into_differences() -> None:
    meter = Meter()
    assert meter.read({"choices": [], "prompt_progress": {"processed": 5}, "timings": {"prompt_n": 5}}) is None
    assert meter.read({"choices": [{"delta": {"role": "assistant", "content": None}}]}) is None
    timings = {"cache_n": 3, "prompt_n": 7, "predicted_n": 1}
    first = meter.read({"choices": [{"delta": {"content": "a"}}], "timings": timings})
    assert first == Delta("a", output_tokens=1, prompt_tokens=10, cached_tokens=3)
    drafts = {**timings, "predicted_n": 4, "draft_n": 4, "draft_n_accepted": 2}
    second = meter.read({"choices": [{"delta": {"content": "bcd"}}], "timings": drafts})
    assert second == Delta("bcd", output_tokens=3, drafted=4, accepted=2)
    assert not meter.finished
    assert meter.read({"choices": [{"delta": {}, "finish_reason": "stop"}]}) == Delta(finish="stop")
    last = meter.read({"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 10}})
    assert last == Delta(output_tokens=1) and meter.finished
    assert meter.read({"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 10}}) is None


def test_tools_become_a_schema_and_come_back() -> None:
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ask = {"messages": told, "tools": [TOOL]}
    wrapped = wrap(ask)
    assert "tools" not in wrapped and wrapped["messages"][0]["content"].startswith("Be brief.")
    assert len(wrapped["response_format"]["json_schema"]["schema"]["anyOf"]) == 2
    assert "anyOf" not in wrap({**ask, "tool_choice": "required"})["response_format"]["json_schema"]["schema"]
    text, (call,) = unwrap('{"tool_calls": [{"name": "f", "arguments": {"a": "ä"}}]}')
    assert text == "" and call.id and (call.index, call.name) == (0, "f")
    assert json.loads(call.arguments) == {"a": "ä"}
    assert unwrap('{"response": "hello"}') == ("hello", ())


def test_a_tool_that_is_not_there() -> None:
    with pytest.raises(BadRequest, match="'g'"):
        wrap({"messages": [], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}})


CUT = '{ "tool_calls": [{"name": "f", "arguments": {"a": "},"}}, {"name": "g", "arguments": {"b": [1'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (CUT, "", [("f", '{"a": "},"}'), ("g", '{"b": [1')]),
        (CUT[:66], "", [("f", '{"a": "},"}')]),
        ('{"tool_calls": [{"na', "", []),
        ('{"response": "hel', "hel", []),
        ('{"response": "hel\\n\\u00e', "hel\n", []),
        ('{"response": "a\\ud83d', "a", []),
        ('{"response": {"a": 1}}', '{"a": 1}', []),
        ("", "", []),
    ],
)
def test_a_cut_answer_keeps_what_was_finished(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    """Nothing of our own wire form is shown."""
    found, parts = unwrap(text)
    assert (found, [(part.name, part.arguments) for part in parts]) == (said, calls)


def test_a_named_tool_is_called_once_and_a_reply_may_have_a_schema() -> None:
    named = wrap({"messages": [], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}})
    assert named["response_format"]["json_schema"]["schema"]["properties"]["tool_calls"]["maxItems"] == 1
    ask = {"messages": [], "tools": [TOOL], "response_format": {"type": "json_object"}}
    _, reply = wrap(ask)["response_format"]["json_schema"]["schema"]["anyOf"]
    assert reply["properties"]["response"] == {"type": "object"}


def test_definitions_of_tools_move_to_the_outermost_schema() -> None:
    with_definition = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/f.X"}},
        "$defs": {"f.X": {"type": "null"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": with_definition}}, TOOL]
    schema = wrap({"messages": [], "tools": tools})["response_format"]["json_schema"]["schema"]
    assert schema["$defs"] == {"f.X": {"type": "null"}} and "$defs" in with_definition


def test_alternatives_are_those_that_were_asked_for() -> None:
    for asked, sent, beside in (
        ({"logprobs": True}, ("top_logprobs", 1), 0),
        ({"logprobs": True, "top_logprobs": 0}, ("top_logprobs", 1), 0),
        ({"logprobs": True, "top_logprobs": 3}, ("top_logprobs", 3), 3),
        ({"logprobs": 0}, ("logprobs", 1), 0),
        ({"logprobs": 2}, ("logprobs", 2), 2),
    ):
        assert orjson.loads(request_body(asked, 64))[sent[0]] == sent[1] and alternatives(asked) == beside
    entry = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}
    chunk = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [entry]}}]}
    bare = Meter(0).read(chunk)
    assert bare is not None and bare.logprobs == (TokenLogprob("a", -1.0),)
    full = Meter(1).read(chunk)
    assert full is not None and len(full.logprobs[0].top) == 1


def test_seeds_are_folded_and_none_is_random() -> None:
    assert [folded(seed) for seed in (0, 7, 0xFFFFFFFE)] == [0, 7, 0xFFFFFFFE]
    odd = (-1, 7, 0xFFFFFFFF, 0xFFFFFFFF + 8, 2**63 - 1, -(2**63))
    assert len({folded(seed) for seed in odd}) == len(odd)
    assert all(0 <= folded(seed) < 0xFFFFFFFF for seed in odd)


def test_earlier_calls_and_results_become_text() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "x"},
    ]
    messages = wrap({"messages": turns, "tools": [TOOL]})["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert (
        messages[1]["content"] == "weather?" and '"f"' in messages[2]["content"] and "sunny" in messages[3]["content"]
    )


def test_gatherer_gives_all_in_one_piece_at_the_end() -> None:
    gatherer = Gatherer()
    for piece in ('{"response"', ': "yes"}'):
        assert gatherer.read(Delta(piece, output_tokens=1)) == Delta(output_tokens=1)
    assert gatherer.read(Delta(finish="stop", accepted=2)) == Delta("yes", finish="stop", accepted=2)
    assert gatherer.read(Delta(prompt_tokens=7)) == Delta(prompt_tokens=7)
    calling = Gatherer()
    last = calling.read(Delta('{"tool_calls": [{"name": "f", "arguments": {}}]}', finish="stop"))
    assert last.finish == "tool_calls" and last.calls[0].arguments == "{}"


def test_a_counter_out_of_prometheus_text() -> None:
    text = "# HELP x\nllamacpp:n_decode_total 1.2e+03\nllamacpp:n_decode_total_other 5\n"
    assert counter(text, "llamacpp:n_decode_total") == 1200
    assert counter(text, "llamacpp:absent") == 0
