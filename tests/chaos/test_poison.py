"""Single requests that once stopped the service for good: each is refused, and the same replica serves the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service import Service, running

pytestmark = pytest.mark.chaos

POISON: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 9, "maximum": 3},
    {"type": "integer", "minimum": -1, "maximum": -5},
    {"type": "number", "minimum": 0.8, "maximum": 0.2},
    {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6},
    {"type": "object", "properties": {"a": {"items": {"type": "integer", "minimum": 9, "maximum": 3}}}},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "array", "minItems": 10**9},
    {"type": "string", "pattern": "^x{5,2}$"},
    {"type": "string", "pattern": "^(a?){500}a{500}$"},
    {"enum": [f"word{i}" for i in range(50_000)]},
    {"$ref": "#"},
    # Passes all that is read beforehand: found when its grammar is tried.
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1900)}},
]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running("--set", "pools.shared.slots=2", "--set", "pools.shared.engine.threads=1") as service:
        yield service


@pytest.mark.parametrize("schema", POISON)
@pytest.mark.parametrize("field", ["response_format", "tools"])
def test_poison_is_refused_and_the_next_request_is_served(service: Service, field: str, schema: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}],
    }
    body = {"model": service.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    with httpx.Client(base_url=service.url, timeout=60) as client:
        refused = client.post("/v1/chat/completions", json=body | {field: asked[field]})
        if field == "tools" and schema == {"$ref": "#"}:
            assert refused.status_code == 200  # there it is a schema that holds itself
        else:
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert client.get("/ready").status_code == 200
