"""Schemas that would kill or stall an engine are refused by keyword, path and limit; ordinary ones pass."""

import copy
from enum import Enum
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, Field

from service.errors import BadRequest, UnsupportedField
from service.http.plan import Headers, Plan, make_plan
from service.http.schema import ChatRequest
from service.http.schemas import MAX_NODES, fit_schemas
from service.http.settings import HttpSettings
from service.http.validate import validate
from service.types import ModelCard

AT = "response_format.json_schema.schema"


def answer(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def fault(schema: dict[str, Any], engine: str | None = None) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        fit_schemas(answer(schema), engine)
    assert caught.value.param is not None and caught.value.message.startswith(caught.value.param)
    return caught.value


DEADLY: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "integer", "minimum": 9, "maximum": 3}, ".minimum", "no number fits minimum 9 and maximum 3"),
    ({"type": "integer", "minimum": -1, "maximum": -5}, ".minimum", "no number fits"),
    ({"type": ["null", "integer"], "minimum": 9, "maximum": 3}, ".minimum", "no number fits"),
    ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, ".minimum", "no integer fits"),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6}, ".exclusiveMinimum", "no integer fits"),
    ({"type": "integer", "exclusiveMinimum": 5, "maximum": 5}, ".exclusiveMinimum", "no number fits"),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": 5, "maximum": 5}, ".exclusiveMinimum", "no number fits"),
    ({"type": "integer", "minimum": 10**19}, ".minimum", "at most 9007199254740992 in size"),
    ({"type": "integer", "minimum": "3"}, ".minimum", "must be a number"),
    ({"type": "integer", "exclusiveMinimum": True}, ".exclusiveMinimum", "must be a number"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, ".minLength", r"minLength \(5\) is larger than maxLength"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, ".minItems", "larger than maxItems"),
    ({"type": "object", "minProperties": 3, "maxProperties": 2}, ".minProperties", "larger than maxProperties"),
    ({"type": "string", "maxLength": 2001}, ".maxLength", "at most 2000, not 2001"),
    ({"type": "array", "minItems": 10**9}, ".minItems", "at most 2000"),
    ({"type": "string", "minLength": -1}, ".minLength", "0 or more"),
    ({"type": "string", "minLength": 1.5}, ".minLength", "whole number"),
    ({"type": "string", "minLength": None}, ".minLength", "whole number"),
    ({"type": "string", "pattern": "^x{5,2}$"}, ".pattern", "5 is larger than 2"),
    ({"type": "string", "pattern": "^(a?){500}a{500}$"}, ".pattern", "more than 40 choices"),
    ({"type": "string", "pattern": "^" + "a?" * 200 + "a{200}$"}, ".pattern", "more than 40 choices"),
    ({"type": "string", "pattern": "^(a|aa){500}$"}, ".pattern", "more than 40 choices"),
    ({"type": "string", "pattern": "^(a?){40}a{1800}$"}, ".pattern", "more than 4000"),
    ({"type": "string", "pattern": "^((a{100}){100}){100}$"}, ".pattern", "more than 2000 characters"),
    ({"type": "string", "pattern": "^a{999999999}$"}, ".pattern", "more than 2000 characters"),
    ({"type": "string", "pattern": "^a{9999999999}$"}, ".pattern", "no repetition"),
    ({"type": "string", "pattern": "^a{,}$"}, ".pattern", "no repetition"),
    ({"type": "string", "pattern": "a" * 513}, ".pattern", "512 characters, not 513"),
    ({"type": "string", "pattern": "^(a$"}, ".pattern", "leaves a group open"),
    ({"type": "string", "pattern": "^a)$"}, ".pattern", "never opened"),
    ({"type": "string", "pattern": 3}, ".pattern", "must be a string"),
    ({"enum": [f"word{i}" for i in range(1001)]}, ".enum", "1000 values"),
    ({"enum": ["x" * 70_000]}, ".enum", "65536 bytes"),
    ({"enum": []}, ".enum", "at least one"),
    ({"anyOf": [{"const": i} for i in range(1001)]}, ".anyOf[0].const", "1000 values"),
    ({"$ref": "#"}, "", "leads back"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "", "leads back"),
    ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, ".$ref", "points to nothing"),
    ({"$ref": "https://example.com/schema"}, ".$ref", "into the same schema"),
    ({"$ref": "#/x", "x": {"type": "integer", "minimum": 9, "maximum": 3}}, ".$ref.minimum", "no number fits"),
    ({"$ref": "#/default", "default": {"type": "string", "pattern": "^x{5,2}$"}}, ".$ref.pattern", "larger than"),
]


@pytest.mark.parametrize("engine", [None, "vllm", "llamacpp"])
@pytest.mark.parametrize(("schema", "where", "says"), DEADLY)
def test_what_kills_or_stalls_an_engine(schema: dict[str, Any], where: str, says: str, engine: str | None) -> None:
    refused = fault(schema, engine)
    assert refused.param == AT + where and refused.status == 400
    with pytest.raises(BadRequest, match=says):
        raise refused


@pytest.mark.parametrize(
    ("around", "path"),
    [
        (lambda bad: {"type": "object", "properties": {"a": {"items": bad}}}, ".properties.a.items"),
        (lambda bad: {"anyOf": [{"type": "null"}, bad]}, ".anyOf[1]"),
        (lambda bad: {"prefixItems": [bad]}, ".prefixItems[0]"),
        (lambda bad: {"patternProperties": {"^a": bad}}, ".patternProperties.^a"),
        (lambda bad: {"additionalProperties": bad}, ".additionalProperties"),
        (lambda bad: {"$defs": {"D": bad}}, ".$defs.D"),
    ],
)
def test_faults_below_the_top_are_found_and_named(around: Any, path: str) -> None:
    bad = {"type": "integer", "minimum": 9, "maximum": 3}
    assert fault(around(bad)).param == f"{AT}{path}.minimum"


def test_limits_count_over_the_whole_request() -> None:
    assert "2000 subschemas" in fault({"anyOf": [{"type": "null"} for _ in range(2000)]}).message
    assert "add up to 50000" in fault({"prefixItems": [{"maxLength": 2000} for _ in range(26)]}).message
    assert "262144 bytes" in fault({"description": "x" * 300_000}).message
    raw = answer({"enum": list(range(600))}) | tool({"properties": {"a": {"enum": list(range(600))}}})
    with pytest.raises(BadRequest) as caught:
        fit_schemas(raw, None)
    assert caught.value.param == "tools[0].function.parameters.properties.a.enum"


def test_references_that_double_at_each_step_are_refused() -> None:
    steps = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
    refused = fault({"$ref": "#/$defs/d0", "$defs": {**steps, "d40": {"type": "string"}}})
    assert f"more than {MAX_NODES}" in refused.message


class Colour(Enum):
    red = "red"
    green = "green"


class Address(BaseModel):
    street: str = Field(min_length=1, max_length=200)
    zip: str = Field(pattern=r"^\d{5}(-\d{4})?$")


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    height: float | None = None
    colour: Colour = Colour.red
    addresses: list[Address] = Field(min_length=0, max_length=10)
    friends: list["Person"] = []
    notes: dict[str, str | int] = {}


@pytest.mark.parametrize("engine", [None, "vllm", "llamacpp"])
@pytest.mark.parametrize(
    "schema",
    [
        Person.model_json_schema(),
        {},
        {"type": "object"},
        {"type": "object", "properties": {"minimum": {"type": "string"}, "enum": {"type": "integer"}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "additionalProperties": False, "required": ["a"], "properties": {"a": {"const": 1}}},
        {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7},
        {"type": "integer", "minimum": 5, "maximum": 5},
        {"type": "integer", "minimum": -5, "maximum": -1},
        {"type": "string", "minLength": 2, "maxLength": 2},
        {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z]{2,})*$"},
        {"type": "string", "pattern": r"^(?:\d{1,3}\.){3}\d{1,3}$"},
        {"type": "string", "pattern": r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
        {"type": "string", "pattern": r"^\{[{}()|?*]{1,500}\}$"},
        {"type": "string", "enum": ["a", "b"], "default": "a", "examples": [{"minimum": "x"}]},
        {"enum": [f"word{i}" for i in range(1000)]},
    ],
)
def test_ordinary_schemas_pass(schema: dict[str, Any], engine: str | None) -> None:
    fit_schemas(answer(schema), engine)
    fit_schemas(tool(schema), engine)


def planned(raw: dict[str, Any], engine: str) -> Plan:
    return make_plan(
        validate(ChatRequest, raw),
        raw,
        id="id",
        headers=Headers(),
        settings=HttpSettings(),
        cards=[ModelCard("m", engine, "none", context_tokens=64, vocab_size=1000)],
        honours=frozenset(ChatRequest.model_fields),
    )


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_requests_are_planned_only_with_fit_schemas(engine: str) -> None:
    bad = {"type": "array", "contains": {"type": "integer"}}
    demanded = tool({"type": "object", "properties": {"a": bad}}) | {"tool_choice": "required"}
    for field in (answer(bad), demanded):
        raw = {"model": "m", "messages": [{"role": "user", "content": "x"}], **field}
        with pytest.raises(UnsupportedField, match="contains cannot be enforced"):
            planned(raw, engine)


def test_engines_are_given_the_canonical_schema_and_the_request_stays_as_it_came() -> None:
    schema = {"$schema": "x", "type": "object", "properties": {"a": {"$ref": "#/definitions/A"}},
              "definitions": {"A": {"type": "string", "uniqueItems": False}, "B": {}}}  # fmt: skip
    raw = {"model": "m", "messages": [{"role": "user", "content": "x"}], **answer(schema)}
    before = copy.deepcopy(raw)
    body = orjson.loads(planned(raw, "vllm").parts[0].request.body)
    assert body["response_format"]["json_schema"] == {
        "name": "a",
        "schema": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}},
    }
    assert raw == before


def test_vllm_s_free_choice_of_tools_is_held_to_no_schema_and_says_so_to_nobody() -> None:
    """docs/http.md: there the model sees the parameters and nothing enforces them."""
    asked = tool({"type": "object", "not": {"required": ["a"]}})
    assert fit_schemas(asked, "vllm") == asked
    for engine, choice in (("llamacpp", "auto"), ("vllm", "required"), (None, "auto")):
        with pytest.raises(UnsupportedField, match="not cannot be enforced"):
            fit_schemas(asked | {"tool_choice": choice}, engine)


def test_definitions_of_two_tools_do_not_mix() -> None:
    def with_definition(name: str, kind: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    fit = fit_schemas({"tools": [with_definition("f", "string"), with_definition("g", "integer")]}, "llamacpp")
    definitions = [tool["function"]["parameters"]["$defs"] for tool in fit["tools"]]
    assert definitions == [{"f.X": {"type": "string"}}, {"g.X": {"type": "integer"}}]


def test_a_schema_that_holds_itself_gets_a_name() -> None:
    fit = fit_schemas(answer({"type": "object", "properties": {"next": {"$ref": "#"}}}), None)
    itself = {"type": "object", "properties": {"next": {"$ref": "#/$defs/root"}}}
    assert fit["response_format"]["json_schema"]["schema"] == itself | {"$defs": {"root": itself}}


UNENFORCED: list[tuple[dict[str, Any], str, str]] = [
    ({"not": {"type": "string"}}, ".not", "say what is allowed"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, ".if", "anyOf"),
    ({"type": "array", "contains": {"type": "integer"}}, ".contains", "prefixItems"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems", "check it in the answer"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, ".propertyNames", "patternProperties"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired", "anyOf"),
    ({"type": "object", "unevaluatedProperties": False}, ".unevaluatedProperties", "additionalProperties"),
    ({"type": "string", "nullable": True}, ".nullable", '"null" into type'),
    ({"type": "string", "format": "json-pointer"}, ".format", "one of date, date-time"),
    ({"x-guidance": {"lenient": True}}, ".x-guidance", "switch"),
    ({"items": {"$id": "http://example.com/x"}}, ".items.$id", "outermost"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf", "exclude each other"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ".oneOf", "use anyOf"),
    ({"properties": {"a": {}}, "minProperties": 1}, ".minProperties", "not required"),
    ({"minimun": 3}, ".minimun", "did you mean 'minimum'"),
    ({"type": "strnig"}, ".type", "must be one of array, boolean"),
    ({"type": "array", "items": [{"type": "integer"}]}, ".items", "prefixItems"),
    ({"type": "number", "multipleOf": 2, "exclusiveMaximum": 0}, ".multipleOf", "below 0"),
    ({"type": "number", "multipleOf": 0}, ".multipleOf", "above 0"),
    ({"type": "number", "multipleOf": 0.00001234567}, ".multipleOf", "at most 10000"),
    ({"properties": ["a"]}, ".properties", "object of schemas"),
    ({"required": "a"}, ".required", "must list names"),
    ({"patternProperties": {"^(?!x)": {}}}, ".patternProperties.^(?!x)", r"only \(\?:"),
    ({"anyOf": []}, ".anyOf", "at least one schema"),
    ({"type": "string", "pattern": "^(?=a)b$"}, ".pattern", r"\(\?:"),
    ({"type": "string", "pattern": r"^(a)\1$"}, ".pattern", r"\\1"),
    ({"type": "string", "pattern": r"^\bword$"}, ".pattern", r"\\b"),
    ({"type": "string", "pattern": r"^\p{L}$"}, ".pattern", r"\\p"),
    ({"type": "string", "pattern": "^[a&&b]$"}, ".pattern", "&&"),
    ({"type": "string", "pattern": "^[[:alpha:]]$"}, ".pattern", r"\["),
    ({"type": "string", "pattern": "^[]a]$"}, ".pattern", r"\]"),
    ({"type": "string", "pattern": "^a++$"}, ".pattern", "repeats a repetition"),
    ({"type": "string", "pattern": "^a{,3}$"}, ".pattern", "no repetition"),
    ({"type": "string", "pattern": "a^b"}, ".pattern", "begin"),
    ({"type": "string", "pattern": "a$b"}, ".pattern", "end"),
]


@pytest.mark.parametrize("engine", [None, "vllm", "llamacpp"])
@pytest.mark.parametrize(("schema", "where", "says"), UNENFORCED)
def test_what_cannot_be_enforced_is_refused_by_name(
    schema: dict[str, Any], where: str, says: str, engine: str | None
) -> None:
    refused = fault(schema, engine)
    assert refused.param == AT + where
    with pytest.raises(BadRequest, match=says):
        raise refused


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "additionalItems": True},
        {"type": "object", "propertyNames": {"type": "string"}, "unevaluatedProperties": True},
        {"type": "string", "nullable": False, "format": "password"},
        {"$id": "http://example.com/x", "$schema": "http://json-schema.org/draft-07/schema#", "x-order": 3, "mine": []},
    ],
)
def test_what_forbids_nothing_is_left_out(schema: dict[str, Any]) -> None:
    left = fit_schemas(answer(schema), "vllm")["response_format"]["json_schema"]["schema"]
    assert left.keys() <= {"type", "x-order", "mine"}


def test_a_request_without_schemas_passes() -> None:
    fit_schemas({"prompt": "x"}, "llamacpp")
    fit_schemas({"response_format": {"type": "text"}, "tools": None}, "llamacpp")
    fit_schemas({"tools": [{"type": "function", "function": {"name": "f"}}]}, "llamacpp")
