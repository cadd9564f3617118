"""Grammars are tried in a process of their own: what kills, hangs or grows does so there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from service.engines import llamacpp_trial
from service.engines.llamacpp_grammar import grammar, plain, wanted_schema
from service.engines.llamacpp_tools import wrap
from service.engines.llamacpp_trial import Trials
from service.errors import BadRequest, EngineFailed, Overloaded

WHOLE = grammar({"type": "integer", "minimum": 3, "maximum": 12})


@pytest.fixture
async def trials() -> AsyncIterator[Trials]:
    made = Trials()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "integer", "minimum": 9, "maximum": 3}, "greater than maximum"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "greater than maxLength"),
        ({"type": "array", "minItems": 10**9}, "MiB"),
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "'z' is unsatisfiable"),
        ({"type": "string", "pattern": "a^b"}, "lookarounds"),
        ({"type": "number", "multipleOf": 2, "exclusiveMaximum": 0}, "nothing fits it"),
        # Found too large only when it is followed: llama.cpp would go on without a grammar.
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1900)}}, "max is 2000"),
    ],
)
async def test_what_cannot_be_followed_is_refused_and_the_next_one_is_served(
    trials: Trials, schema: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        await trials.prove(grammar(schema))
    assert "\n" not in refused.value.message
    await trials.prove(WHOLE)


async def test_a_verdict_is_reached_once(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = grammar({"type": "integer", "minimum": 9, "maximum": 3})
    for _ in range(3):
        await asyncio.gather(*(trials.prove(WHOLE) for _ in range(5)))
        with pytest.raises(BadRequest):
            await trials.prove(bad)
    assert trials.tried == 2
    monkeypatch.setattr(llamacpp_trial, "REMEMBERED", 1)
    for expected in (3, 4, 5):
        await trials.prove(grammar({"type": "integer", "minimum": expected}))
        assert trials.tried == expected


async def test_one_that_takes_for_ever_is_ended(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped while it reads: nobody answers."""
    await trials.prove(WHOLE)
    monkeypatch.setattr(llamacpp_trial, "DEADLINE_S", 0.5)
    child = trials._child
    assert child is not None
    child.send_signal(19)
    with pytest.raises(BadRequest, match="took more than"):
        await trials.prove(grammar({"type": "boolean"}))
    assert child.returncode is not None
    monkeypatch.undo()
    await trials.prove(grammar({"type": "null"}))


async def test_who_gives_up_leaves_no_answer_for_the_next(trials: Trials) -> None:
    await trials.prove(WHOLE)
    giving_up = asyncio.create_task(trials.prove(grammar({"enum": [f"w{i}" for i in range(900)]})))
    await asyncio.sleep(0)
    giving_up.cancel()
    with pytest.raises(BadRequest, match="greater"):
        await trials.prove(grammar({"type": "integer", "minimum": 9, "maximum": 3}))


async def test_only_so_many_wait(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp_trial, "WAITING", 2)
    asked = (trials.prove(grammar({"type": "integer", "minimum": least})) for least in range(5))
    verdicts = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(verdict) for verdict in verdicts] == [type(None)] * 2 + [Overloaded] * 3


@pytest.mark.parametrize(
    ("text", "cut", "says"),
    [
        ("5", False, None), ("12", False, None), ("13", False, "left the grammar"), ("", False, "too early"),
        ("", True, None), ("1", True, None), ("x", True, "left the grammar"),
    ],
)  # fmt: skip
async def test_answers_are_judged(trials: Trials, text: str, cut: bool, says: str | None) -> None:
    if says is None:
        await trials.judge(WHOLE, text, cut=cut)
    else:
        with pytest.raises(EngineFailed, match=says):
            await trials.judge(WHOLE, text, cut=cut)


@pytest.mark.parametrize(
    ("parameters", "is_plain"),
    [
        (None, True),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}}}, True),
        ({"type": "object", "properties": {"minimum": {"enum": [1, 2], "description": "least"}}}, True),
        ({"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {}}, "required": ["a"]}, True),
        ({"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}, True),
        ({"type": "object", "properties": {"a": {"type": "number", "minimum": 3}}}, False),
        ({"type": "object", "properties": {"a": {"type": "string", "enum": ["x", 1]}}}, False),
        ({"type": "object", "properties": {"a": {"type": "integer", "const": True}}}, False),
        ({"type": "object", "required": ["a"]}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x", "enum": ["x"]}}}, False),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, False),
        ({"properties": {"a": {}}}, False),
        ({"type": "object", "$defs": {"x": {"type": "string", "pattern": "^a$"}}}, False),
        ({"type": "object", "additionalProperties": {"type": "array", "maxItems": 2}}, False),
        ({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(500)}}, False),
    ],
)
def test_only_plain_parameters_are_left_to_llama_cpp(parameters: Any, is_plain: bool) -> None:
    assert plain([{"function": {"name": "f", "parameters": parameters}}]) is is_plain


@pytest.mark.parametrize(("choice", "many"), [({"type": "function", "function": {"name": "f"}}, 1), ("required", 8)])
async def test_a_named_tool_is_called_once_by_the_grammar_itself(trials: Trials, choice: Any, many: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    held = grammar(wanted_schema(wrap({"messages": [], "tools": [tool], "tool_choice": choice})) or {})
    calls = ['{"name": "f", "arguments": {}}'] * (many + 1)
    await trials.judge(held, f'{{"tool_calls": [{", ".join(calls[:many])}]}}', cut=False)
    with pytest.raises(EngineFailed, match="breaks its schema"):
        await trials.judge(held, f'{{"tool_calls": [{", ".join(calls)}]}}', cut=False)
