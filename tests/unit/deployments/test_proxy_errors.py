"""Whatever Serve's proxy answers with when an ingress is missing or dies, a client reads OpenAI's envelope."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pytest

from deployments.proxy_errors import Envelope

JSON = [(b"content-type", b"application/json"), (b"x-request-id", b"r")]
TEXT = [(b"content-type", b"text/plain")]


def start(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes = b"", more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def through(*messages: dict[str, Any] | Exception) -> list[dict[str, Any]]:
    """What a client gets of these; an exception is raised by the proxy in their stead."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            if isinstance(message, Exception):
                raise message
            await send(message)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    with contextlib.suppress(ConnectionError):
        await Envelope(app)({"type": "http", "path": "/v1/models"}, None, send)
    return sent


async def test_answers_pass_untouched() -> None:
    good = await through(start(200, JSON), part(b"{", more=True), part(b"}"))
    assert [m["body"] for m in good[1:]] == [b"{", b"}"]
    assert (b"x-request-id", b"r") not in good[0]["headers"]
    ours = await through(start(404, JSON), part(b'{"error": 1}'))
    assert (ours[0]["status"], ours[1]["body"]) == (404, b'{"error": 1}')


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ((start(500, TEXT), part(b"Internal Server Error")), 500),
        ((start(404, TEXT), part(b"no application")), 503),
        ((start(503, JSON), part()), 503),
        ((start(500, JSON),), 500),
        ((start(500, JSON), ConnectionError("the ingress died")), 500),
    ],
)
async def test_what_is_no_envelope_becomes_one(messages: tuple[Any, ...], status: int) -> None:
    head, body = await through(*messages)
    assert head["status"] == status
    assert orjson.loads(body["body"])["error"]["code"]
    assert dict(head["headers"])[b"content-length"] == str(len(body["body"])).encode()
