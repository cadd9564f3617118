"""A value for every field of both endpoints that asks for something, and what becomes of it on its way to an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from service.http.honour import OURS
from service.http.plan import Headers, Plan, make_plan
from service.http.schema import ChatRequest, CompletionRequest
from service.http.settings import HttpSettings
from service.http.validate import validate
from service.types import Endpoint, ModelCard

CARD = ModelCard("m", "any", "none", context_tokens=64, vocab_size=1000)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@dataclass(frozen=True)
class Ask:
    """A value that changes the answer; `beside`: what it needs at its side to be allowed."""

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)


BOTH: Final[dict[str, Ask]] = {
    "model": Ask("m"),
    "stream": Ask(True),
    "stream_options": Ask({"include_usage": True}, {"stream": True}),
    "max_tokens": Ask(9),
    "temperature": Ask(0.25),
    "top_p": Ask(0.5),
    "frequency_penalty": Ask(0.75),
    "presence_penalty": Ask(-0.75),
    "logit_bias": Ask({"7": 1.5}),
    "stop": Ask(["end"]),
    "seed": Ask(11),
    "n": Ask(2),
    "user": Ask("someone"),
    "prompt_cache_key": Ask("k"),
    "service_tier": Ask("flex"),
    "top_k": Ask(5),
    "min_p": Ask(0.125),
    "repetition_penalty": Ask(1.25),
    "min_tokens": Ask(3),
    "ignore_eos": Ask(True),
    "stop_token_ids": Ask([5, 6]),
}
CASES: Final[dict[Endpoint, dict[str, Ask]]] = {
    "chat": BOTH
    | {
        "messages": Ask([{"role": "user", "content": "other"}]),
        "max_completion_tokens": Ask(9),
        "tools": Ask([TOOL]),
        "tool_choice": Ask("required", {"tools": [TOOL]}),
        "parallel_tool_calls": Ask(False, {"tools": [TOOL]}),
        "response_format": Ask(SCHEMA),
        "logprobs": Ask(True),
        "top_logprobs": Ask(4, {"logprobs": True}),
        "reasoning_effort": Ask("high"),
        "thinking_token_budget": Ask(7),
        "verbosity": Ask("low"),
        "chat_template_kwargs": Ask({"colour": "red"}),
        "modalities": Ask(["text"]),
        "metadata": Ask({"a": "b"}),
        "store": Ask(False),
        "safety_identifier": Ask("s"),
    },
    "completions": BOTH
    | {
        "prompt": Ask("other"),
        "logprobs": Ask(4),
        "echo": Ask(True),
        "suffix": Ask("after"),
        "best_of": Ask(3),
    },
}
ASKED: Final = [(endpoint, name) for endpoint, fields in CASES.items() for name in fields]
ENGINES_FIELDS: Final = [(endpoint, name) for endpoint, name in ASKED if name not in OURS]
"""Those that an engine obeys or not."""


def asking(endpoint: Endpoint, name: str) -> dict[str, Any]:
    """A body with the field, its case's value first of what is optional."""
    case = CASES[endpoint][name]
    return {name: case.value} | {key: value for key, value in without(endpoint, name).items() if key != name}


def without(endpoint: Endpoint, name: str) -> dict[str, Any]:
    """The same body, the field not given (or, where a body cannot be without it, another one)."""
    least = {"messages": [{"role": "user", "content": "x"}]} if endpoint == "chat" else {"prompt": "x"}
    return {"model": "m", **least, **CASES[endpoint][name].beside}


def planned(raw: dict[str, Any], honours: frozenset[str], **settings: Any) -> Plan:
    """As service/http makes it. Raises BadRequest."""
    request = validate(ChatRequest if "messages" in raw else CompletionRequest, raw)
    return make_plan(
        request, raw, id="id", headers=Headers(), settings=HttpSettings(**settings), cards=[CARD], honours=honours
    )


def engine_body(raw: dict[str, Any], honours: frozenset[str]) -> dict[str, Any]:
    """What an engine that obeys `honours` is given for `raw`."""
    body: dict[str, Any] = orjson.loads(planned(raw, honours).parts[0].request.body)
    return body
