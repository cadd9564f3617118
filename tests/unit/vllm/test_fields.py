"""Every field that vLLM is said to obey arrives in vLLM's own request or in the parameters it samples by."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pytest

from service.engines.fields import HONOURED
from service.engines.vllm import canary
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.options import VllmOptions
from service.http.honour import OURS
from service.types import Delta, Endpoint, EngineRequest
from tests.unit.engines.field_cases import CASES, ENGINES_FIELDS, asking, engine_body, without

pytest.importorskip("vllm")


class Listener:
    """Stands where vLLM's layer stands: keeps the body that it is handed, and answers no text."""

    body: dict[str, Any]

    async def answer(self, endpoint: Endpoint, body: dict[str, Any]) -> AsyncIterator[Delta]:
        self.body = body
        yield Delta(finish="stop")


@dataclass(frozen=True)
class Arrived:
    """vLLM's own `request`, the `params` that it samples by, and the variables of the `template`."""

    request: Any
    params: Any
    template: dict[str, Any]


async def arrived(endpoint: Endpoint, raw: dict[str, Any]) -> Arrived:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = orjson.dumps(engine_body(raw, HONOURED["vllm"]))
    engine = VllmEngine(model="/m", served_name="m", slots=1, context_tokens=64, options=VllmOptions())
    layer = engine._layer = Listener()  # type: ignore[assignment]
    assert [delta async for delta in engine.generate(EngineRequest("r", endpoint, body))] == [Delta(finish="stop")]
    request: Any = (ChatCompletionRequest if endpoint == "chat" else CompletionRequest)(**layer.body)
    template = request.build_chat_params(None, "auto").chat_template_kwargs if endpoint == "chat" else {}
    return Arrived(request, request.to_sampling_params(request.model_dump()["max_tokens"] or 50, {}), template)


def _schema(found: Arrived) -> dict[str, Any] | None:
    asked = found.params.structured_outputs
    if asked is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": asked.json}}


READ: Final[dict[str, Callable[[Arrived], Any]]] = {
    "max_tokens": lambda found: found.params.max_tokens,
    "max_completion_tokens": lambda found: found.params.max_tokens,
    "temperature": lambda found: found.params.temperature,
    "top_p": lambda found: found.params.top_p,
    "top_k": lambda found: found.params.top_k,
    "min_p": lambda found: found.params.min_p,
    "frequency_penalty": lambda found: found.params.frequency_penalty,
    "presence_penalty": lambda found: found.params.presence_penalty,
    "repetition_penalty": lambda found: found.params.repetition_penalty,
    "logit_bias": lambda found: {str(token): bias for token, bias in (found.params.logit_bias or {}).items()},
    "seed": lambda found: found.params.seed,
    "stop": lambda found: found.params.stop,
    "stop_token_ids": lambda found: found.params.stop_token_ids,
    "min_tokens": lambda found: found.params.min_tokens,
    "ignore_eos": lambda found: found.params.ignore_eos,
    "top_logprobs": lambda found: found.params.logprobs,
    "response_format": _schema,
    "echo": lambda found: found.request.echo,
    "tools": lambda found: [tool.model_dump(exclude_none=True) for tool in found.request.tools or ()],
    "tool_choice": lambda found: found.request.tool_choice,
    "parallel_tool_calls": lambda found: found.request.parallel_tool_calls,
    "reasoning_effort": lambda found: found.template.get("reasoning_effort"),
    "chat_template_kwargs": lambda found: {"colour": found.template.get("colour")},
}


def _logprobs(endpoint: Endpoint, found: Arrived) -> Any:
    return found.params.logprobs if endpoint == "completions" else found.params.logprobs is not None


def test_every_field_that_vllm_obeys_is_read_here() -> None:
    assert READ.keys() | {"logprobs"} == HONOURED["vllm"] - OURS


@pytest.mark.parametrize(("endpoint", "name"), [pair for pair in ENGINES_FIELDS if pair[1] in HONOURED["vllm"]])
async def test_vllm_gets_what_it_obeys(endpoint: Endpoint, name: str) -> None:
    found, plain = await arrived(endpoint, asking(endpoint, name)), await arrived(endpoint, without(endpoint, name))
    read = READ.get(name) or (lambda seen: _logprobs(endpoint, seen))
    assert read(found) == CASES[endpoint][name].value
    assert read(plain) != CASES[endpoint][name].value


def test_vllm_knows_what_the_gate_asks_by() -> None:
    from vllm import SamplingParams

    asked = SamplingParams(**canary._greedy(3))
    assert (asked.skip_reading_prefix_cache, asked.logprobs, asked.max_tokens) == (True, canary.TOP, 3)
