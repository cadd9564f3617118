"""Obeyed or refused by name, never ignored: each field of each endpoint, for each engine.

vLLM's part of the effects is in tests/unit/vllm/test_fields.py: it needs vLLM imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import orjson
import pytest

from service.engines.fields import HONOURED
from service.engines.llamacpp_grammar import grammar, wanted_schema
from service.engines.llamacpp_stops import stop_texts
from service.engines.llamacpp_wire import request_body
from service.engines.options import SimulatedOptions
from service.engines.simulated import SimulatedEngine
from service.errors import UnsupportedField
from service.http.honour import OURS
from service.http.plan import Plan
from service.http.schema import ChatRequest, CompletionRequest
from service.types import Endpoint, EngineRequest
from tests.unit.engines.field_cases import ASKED, CASES, ENGINES_FIELDS, asking, engine_body, planned, without

ELDERS: Final = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
"""Whoever obeys the second obeys the first (docs/http.md says they are one thing)."""


def test_every_field_of_the_schemas_has_a_case() -> None:
    assert CASES["chat"].keys() == ChatRequest.model_fields.keys()
    assert CASES["completions"].keys() == CompletionRequest.model_fields.keys()
    assert HONOURED["simulated"] | HONOURED["llamacpp"] | HONOURED["vllm"] <= {name for _, name in ASKED}


def refused(endpoint: Endpoint, name: str, honours: frozenset[str]) -> None:
    with pytest.raises(UnsupportedField, match=repr(name)) as caught:
        planned(asking(endpoint, name), honours)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_field", name)


@pytest.mark.parametrize(("endpoint", "name"), ENGINES_FIELDS)
@pytest.mark.parametrize("engine", HONOURED)
def test_what_an_engine_does_not_obey_is_refused_by_name(engine: str, endpoint: Endpoint, name: str) -> None:
    obeyed = HONOURED[engine]
    if not {name, ELDERS.get(name)} & obeyed:
        refused(endpoint, name, obeyed)
    else:
        assert planned(asking(endpoint, name), obeyed).parts


@pytest.mark.parametrize(("endpoint", "name"), ENGINES_FIELDS)
def test_a_field_that_an_engine_ceases_to_obey_is_refused_by_name(endpoint: Endpoint, name: str) -> None:
    everything = frozenset(name for _, name in ASKED)
    refused(endpoint, name, everything - {name, ELDERS.get(name, name)})


@pytest.mark.parametrize(
    ("endpoint", "name", "engines"),
    [
        ("chat", "verbosity", set()),
        ("completions", "suffix", set()),
        ("completions", "best_of", set()),
        ("completions", "echo", {"vllm"}),
        ("chat", "min_tokens", {"vllm"}),
        ("completions", "min_tokens", {"vllm"}),
        ("chat", "stop_token_ids", {"vllm"}),
        ("completions", "stop_token_ids", {"vllm"}),
    ],
)
def test_who_obeys_what_docs_http_names(endpoint: Endpoint, name: str, engines: set[str]) -> None:
    assert {engine for engine, fields in HONOURED.items() if name in fields} == engines
    for engine in HONOURED.keys() - engines:
        refused(endpoint, name, HONOURED[engine])


# -- what http/ obeys itself -----------------------------------------------------------------------------------------

PLAN: Final[dict[str, Callable[[Plan], Any]]] = {
    "model": lambda plan: plan.model,
    "messages": lambda plan: orjson.loads(plan.parts[0].request.body)["messages"],
    "prompt": lambda plan: orjson.loads(plan.parts[0].request.body)["prompt"],
    "stream": lambda plan: plan.stream and plan.context.stream,
    "stream_options": lambda plan: {"include_usage": plan.include_usage},
    "n": lambda plan: len(plan.parts),
    "service_tier": lambda plan: plan.parts[0].request.tier,
}
SESSION: Final = {"user", "prompt_cache_key"}
"""Docs: they find the replica, and change nothing else."""
LABELS: Final = OURS - PLAN.keys() - SESSION
"""Docs: accepted, without effect. (`modalities` and `store` have one value each: what happens anyway.)"""


@pytest.mark.parametrize(("endpoint", "name"), [pair for pair in ASKED if pair[1] in OURS])
@pytest.mark.parametrize("engine", HONOURED)
def test_what_http_obeys_itself_has_its_effect_in_the_plan(engine: str, endpoint: Endpoint, name: str) -> None:
    made, plain = (planned(make(endpoint, name), HONOURED[engine]) for make in (asking, without))
    if name in LABELS:
        assert made == plain
    elif name in SESSION:
        assert made.context.session != plain.context.session
        assert replace(made, context=replace(made.context, session=plain.context.session)) == plain
    else:
        assert PLAN[name](made) == CASES[endpoint][name].value
        assert name == "model" or PLAN[name](made) != PLAN[name](plain)


def test_labels_are_those_that_docs_http_names() -> None:
    assert {"metadata", "safety_identifier", "modalities", "store"} == LABELS


# -- llama.cpp: under the names that its server reads ----------------------------------------------------------------

SAME: Final = {
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "min_p",
    "parallel_tool_calls",
    "presence_penalty",
    "seed",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
}
"""llama.cpp's server has OpenAI's name for them."""
LLAMACPP: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "max_completion_tokens": lambda body: body["max_tokens"],
    "repetition_penalty": lambda body: body.get("repeat_penalty"),
    "reasoning_effort": lambda body: body.get("chat_template_kwargs", {}).get("reasoning_effort"),
}
BESIDE: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "response_format": lambda body: wanted_schema(body) and grammar(wanted_schema(body)),
    "stop": stop_texts,
}
"""What the engine itself makes of them: a grammar, and texts that it looks for in the answer."""


def test_every_field_that_llamacpp_obeys_is_read_here() -> None:
    assert SAME | LLAMACPP.keys() | BESIDE.keys() == HONOURED["llamacpp"] - OURS


def obeyed_by(engine: str) -> list[tuple[Endpoint, str]]:
    return [(endpoint, name) for endpoint, name in ENGINES_FIELDS if name in HONOURED[engine]]


@pytest.mark.parametrize(("endpoint", "name"), [pair for pair in obeyed_by("llamacpp") if pair[1] in BESIDE])
def test_llamacpp_s_engine_reads_what_it_obeys_itself(endpoint: Endpoint, name: str) -> None:
    asked, plain = (BESIDE[name](engine_body(make(endpoint, name), HONOURED["llamacpp"])) for make in (asking, without))
    assert asked and not plain


def test_llamacpp_gets_a_grammar_for_a_schema() -> None:
    body = engine_body(asking("chat", "response_format"), HONOURED["llamacpp"])
    assert orjson.loads(request_body(body, 64))["grammar"] == BESIDE["response_format"](body)


@pytest.mark.parametrize(("endpoint", "name"), [pair for pair in obeyed_by("llamacpp") if pair[1] not in BESIDE])
def test_llamacpp_gets_what_it_obeys(endpoint: Endpoint, name: str) -> None:
    read = LLAMACPP.get(name, lambda body: body.get(name))
    asked, plain = (
        read(orjson.loads(request_body(engine_body(make(endpoint, name), HONOURED["llamacpp"]), 64)))
        for make in (asking, without)
    )
    assert asked == CASES[endpoint][name].value != plain


# -- the simulated engine --------------------------------------------------------------------------------------------

LENGTH: Final = {"max_tokens", "max_completion_tokens"}
SAMPLES_NOTHING: Final = HONOURED["simulated"] - OURS - LENGTH
"""Taken without effect: it draws no samples from its words, which never hold an end of text."""


def test_the_simulated_engine_has_no_other_fields() -> None:
    drawing = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"}
    penalties = {"frequency_penalty", "presence_penalty", "repetition_penalty"}
    assert drawing | penalties | {"ignore_eos", "stop"} == SAMPLES_NOTHING


@contextlib.asynccontextmanager
async def simulated() -> Any:
    options = SimulatedOptions(step_ms=1)
    made = SimulatedEngine(model="x", served_name="m", slots=2, context_tokens=64, options=options)
    await made.load(lambda progress: None)
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize(("endpoint", "name"), [pair for pair in obeyed_by("simulated") if pair[1] in LENGTH])
async def test_the_simulated_engine_obeys_lengths(endpoint: Endpoint, name: str) -> None:
    body = orjson.dumps(engine_body(asking(endpoint, name), HONOURED["simulated"]))
    async with simulated() as engine:
        chunks = [chunk async for chunk in engine.generate(EngineRequest("r", endpoint, body))]
    assert sum(chunk.output_tokens for chunk in chunks) == CASES[endpoint][name].value
