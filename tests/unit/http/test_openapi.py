"""The OpenAPI document is complete; thousands of generated requests meet no 5xx and no undocumented status."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.http.app import create_app
from service.http.dialects.chat_body import ChatBody
from service.http.schema import CompletionRequest
from service.http.settings import HttpSettings
from tests.unit.http.echo import EchoBackend

EXAMPLES = int(os.environ.get("GLM5_SCHEMATHESIS_EXAMPLES", "150"))
"""Generated requests per endpoint; raise it for a long run."""

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

statuses: Counter[tuple[str, int]] = Counter()


def app() -> FastAPI:
    return create_app(EchoBackend(slots=64, queue=64), HttpSettings(max_n=4))


# The live figures have no end to wait for; test_live.py reads them.
schema = schemathesis.openapi.from_asgi("/openapi.json", app()).exclude(path="/v1/service/live")
schema.config.generation.update(modes=list(schemathesis.GenerationMode))


@schema.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), database=None
)
def test_generated_requests(case: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "echo"  # else nearly all would end at 404
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if 0.1 <= float(case.headers["x-request-timeout"]) < 10:
            case.headers["x-request-timeout"] = "10"  # a 504 under load would be right, and is tested elsewhere
    response = case.call()
    statuses[case.path, response.status_code] += 1
    case.validate_response(response, checks=CHECKS)


def test_the_generated_requests_came_through_and_were_many() -> None:
    """Both good and bad requests were among them, or the test above shows nothing."""
    if not statuses:
        pytest.skip("runs after test_generated_requests")
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/tokenize",
    ):
        assert statuses[path, 200] >= 20 and statuses[path, 400] >= 20, statuses
    assert statuses.total() >= 4 * EXAMPLES


# ---------------------------------------------------------------- the document


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return app().openapi()


def test_every_route_is_documented_and_nothing_else(document: dict[str, Any]) -> None:
    routes = {
        (route.path.replace(":path", ""), method.lower())  # type: ignore[attr-defined]
        for route in app().routes
        for method in getattr(route, "methods", ()) or ()
        if getattr(route, "include_in_schema", False) and method != "HEAD"
    }
    assert routes == {(path, method) for path, item in document["paths"].items() for method in item}


def test_every_field_is_in_the_schema_with_its_range(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for model in (ChatBody, CompletionRequest):
        shown = schemas[model.__name__]
        assert shown["additionalProperties"] is False
        assert shown["properties"].keys() == model.model_fields.keys()
    chat = schemas["ChatBody"]["properties"]
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in chat["temperature"]["anyOf"]
    assert {"type": "integer", "minimum": 1, "maximum": 4} in chat["n"]["anyOf"]  # as this app's settings narrow it
    assert set(schemas["ChatBody"]["required"]) == {"model", "messages"}


def test_every_error_status_has_the_envelope(document: dict[str, Any]) -> None:
    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "403", "404", "405", "413", "429", "500", "503", "504"}
    for status, response in responses.items():
        if status != "200":
            assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorEnvelope"}


def test_the_schemas_are_valid_json_schema_and_their_references_resolve(document: dict[str, Any]) -> None:
    Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [ref for value in node.values() for ref in references(value)]
        return [ref for value in node for ref in references(value)] if isinstance(node, list) else []

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
