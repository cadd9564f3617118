"""llama.cpp's engine with the demo model, without the service around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.engines.llamacpp import LlamaCppEngine
from service.engines.options import LlamaCppOptions
from service.errors import BadRequest, EngineFailed
from service.http.schemas import fit_schemas
from service.types import Delta, EngineRequest
from tests.deltas import joined
from tests.models import demo
from tests.unit.http.test_enforced import judged, schemas

WEATHER = [{"role": "user", "content": "What is the weather in Paris? Use a tool."}]
# Hermes' way to write tools, in short: enough for llama.cpp to know it.
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nFor each call return json within <tool_call></tool_call>:' }}
{{- '\\n<tool_call>\\n{"name": "n", "arguments": {}}\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@contextlib.asynccontextmanager
async def loaded(
    kind: type[LlamaCppEngine] = LlamaCppEngine, model: Path | None = None
) -> AsyncIterator[LlamaCppEngine]:
    engine = kind(
        model=str(model or demo()),
        served_name="m",
        slots=2,
        context_tokens=1024,
        options=LlamaCppOptions(threads=1),
    )
    await engine.load(lambda progress: None)
    try:
        yield engine
    finally:
        await engine.close()


async def answered(engine: LlamaCppEngine, **body: Any) -> Delta:
    """As service/http would ask."""
    asked = fit_schemas({"messages": WEATHER, "max_tokens": 100, "seed": 5} | body, "llamacpp")
    endpoint = "completions" if "prompt" in asked else "chat"
    request = EngineRequest("r", endpoint, orjson.dumps(asked))  # type: ignore[arg-type]
    return joined([delta async for delta in engine.generate(request)])


def held_to(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def tool(name: str, kind: dict[str, Any]) -> dict[str, Any]:
    """A tool whose parameters are what pydantic writes: `$defs` with a name that other tools use too."""
    schema = {"type": "object", "properties": {"place": {"$ref": "#/$defs/Place"}}, "required": ["place"],
              "additionalProperties": False, "$defs": {"Place": kind}}  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": "weather", "parameters": schema}}


TOOLS = [tool("f", {"type": "string", "maxLength": 12}), tool("g", {"type": "integer", "minimum": 3, "maximum": 9})]


def checked_calls(answer: Delta) -> list[str]:
    """Names of the calls; each has arguments of its own tool."""
    for part in answer.calls:
        place = json.loads(part.arguments)["place"]
        assert (isinstance(place, str) and len(place) <= 12) if part.name == "f" else place in range(3, 10)
    return [part.name for part in answer.calls]


async def test_answers_at_a_high_temperature_validate() -> None:
    """Random schemas of the accepted kind; those that nothing fits are refused before the engine sees them."""
    seen = {"judged": 0, "refused": 0, "cut": 0}

    async with loaded() as engine:
        loop = asyncio.get_running_loop()

        @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(schema=schemas(), seed=st.integers(0, 2**31))
        def each(schema: dict[str, Any], seed: int) -> None:
            asked = answered(engine, **held_to(schema), temperature=1.8, seed=seed, max_tokens=60)
            try:
                answer = asyncio.run_coroutine_threadsafe(asked, loop).result(60)
            except BadRequest:
                seen["refused"] += 1
                return
            seen["cut" if answer.finish == "length" else "judged"] += 1
            if answer.finish == "stop":
                judged(schema, answer.text)

        await asyncio.to_thread(each)
    assert seen["judged"] > 10, seen


async def test_tools_with_definitions_of_one_name_stop_texts_and_lengths() -> None:
    async with loaded() as engine:
        assert checked_calls(await answered(engine, tools=TOOLS, tool_choice="required"))
        named = {"type": "function", "function": {"name": "g"}}
        assert checked_calls(await answered(engine, tools=TOOLS, tool_choice=named)) == ["g"]
        # Stop texts are for the reply's text: a call holds all of them.
        stopped = await answered(engine, tools=TOOLS, tool_choice="required", stop=["{", '"', ":"])
        assert checked_calls(stopped) and stopped.finish == "tool_calls"
        cut = await answered(engine, tools=TOOLS, tool_choice=named, max_tokens=4)
        assert (cut.text, cut.finish) == ("", "length")
        with pytest.raises(BadRequest, match="last message"):
            await answered(engine, tools=TOOLS, messages=[*WEATHER, {"role": "assistant", "content": "hm"}])


async def test_what_was_held_back_as_a_stop_text_is_not_lost() -> None:
    async with loaded() as engine:
        plain = await answered(engine, prompt="One two three", temperature=0, max_tokens=12)
        end = plain.text[-3:]
        held = await answered(engine, prompt="One two three", temperature=0, max_tokens=12, stop=end + "never")
        assert (held.text, held.finish) == (plain.text, "length")
        at = plain.text.index(end)
        stopped = await answered(engine, prompt="One two three", temperature=0, max_tokens=12, stop=end)
        assert (stopped.text, stopped.finish) == (plain.text[:at], "stop")


async def test_log_probabilities_without_alternatives() -> None:
    async with loaded() as engine:
        for asked in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}, {"prompt": "One", "logprobs": 0}):
            answer = await answered(engine, **asked, max_tokens=3)
            assert len(answer.logprobs) == 3 and not any(token.top for token in answer.logprobs)


class WithTools(LlamaCppEngine):
    """As a model whose own template has tools."""

    def _params(self, key: str) -> Any:
        params = super()._params(key)
        params.chat_template, params.use_jinja = TEMPLATE, True
        return params


async def test_a_template_with_tools_is_used_where_llama_cpp_keeps_all_that_parameters_say() -> None:
    with_bounds, without = TOOLS[1], tool("h", {"type": "object", "properties": {"next": {"$ref": "#/$defs/Place"}}})
    async with loaded(WithTools) as engine:
        assert engine._template_has_tools
        for tools, native in (([without], True), ([with_bounds], False), ([without, with_bounds], False)):
            asked = fit_schemas({"messages": WEATHER, "tools": tools}, "llamacpp")
            assert engine._native(asked) is native
            answer = await answered(engine, tools=tools, max_tokens=30)
            assert answer.finish is not None
        assert checked_calls(await answered(engine, tools=TOOLS, tool_choice="required"))


async def test_a_model_without_a_template_names_the_other_endpoint(tmp_path: Path) -> None:
    data = demo().read_bytes()
    assert data.count(b"tokenizer.chat_template") == 1
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_tomplate"))
    async with loaded(model=bare) as engine:
        with pytest.raises(BadRequest, match="/v1/completions"):
            await answered(engine)
        with pytest.raises(BadRequest, match="/v1/completions"):
            await engine.tokenize(orjson.dumps({"messages": WEATHER}))
        assert (await answered(engine, prompt="One", max_tokens=2)).finish == "length"


async def test_an_answer_that_llama_cpp_let_out_of_its_grammar_is_an_error() -> None:
    """What llama.cpp does with a grammar that it cannot follow: it goes on without one."""

    class Unheld(LlamaCppEngine):
        async def load(self, report: Any) -> Any:
            card = await super().load(report)
            handle = self._server.handle_chat_completions
            self._server = type("Server", (), {"handle_chat_completions": lambda _, body, receive: handle(
                orjson.dumps({key: value for key, value in orjson.loads(body).items() if key != "grammar"}), receive
            )})()  # fmt: skip
            return card

    async with loaded(Unheld) as engine:
        with pytest.raises(EngineFailed, match="breaks its schema"):
            await answered(engine, **held_to({"type": "integer"}), max_tokens=20)
