"""Bytes beyond ASCII and line ends, in headers, paths and names: an answer or an envelope with an id, over a real
socket; never a text of the server's own."""

from __future__ import annotations

import asyncio
import json

import pytest

from service.http.app import create_app
from service.http.exchange import MOST_NAMES
from service.http.server import HttpServer
from service.http.settings import HttpSettings
from tests.unit.http.conftest import ask
from tests.unit.http.echo import EchoBackend


async def answered(request: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the app's answer."""
    settings = HttpSettings(port=0)
    server = HttpServer(create_app(EchoBackend(), settings), settings)
    port = await server.start()
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
    finally:
        await server.stop(0.1)
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def post(body: bytes, *headers: bytes) -> bytes:
    length = b"content-length: %d" % len(body)
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"connection: close", length, *headers, b"", body]
    if not any(header.startswith(b"content-type") for header in headers):
        lines.insert(1, b"content-type: application/json")
    return b"\r\n".join(lines)


ODD = ["é".encode(), b"\xff", b"a\x80b", "\N{LATIN SMALL LETTER I WITH DIAERESIS}".encode("latin-1")]


@pytest.mark.parametrize("odd", ODD)
async def test_an_id_that_is_no_id_is_made_anew(odd: bytes) -> None:
    status, headers, body = await answered(post(json.dumps(ask("a b")).encode(), b"x-request-id: " + odd))
    assert status == 200 and json.loads(body)["choices"]
    assert headers["x-request-id"].startswith("req_") and headers["x-request-id"].isascii()


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "name", [b"authorization", b"x-api-key", b"x-glm-mode", b"x-request-timeout", b"x-session-id", b"content-type"]
)
async def test_other_headers_are_read_or_refused(name: bytes, odd: bytes) -> None:
    status, headers, body = await answered(post(json.dumps(ask("a b")).encode(), name + b": " + odd))
    assert headers["x-request-id"].startswith("req_")
    assert json.loads(body)["choices"] if status == 200 else json.loads(body)["error"]["message"]
    assert status in (200, 400)


@pytest.mark.parametrize("path", [b"/\xff", "/v1/models/é".encode(), b"/%ff", b"/?x=\xff"])
async def test_paths_are_found_or_not(path: bytes) -> None:
    status, headers, body = await answered(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path)
    assert status in (400, 404) and json.loads(body)["error"]["message"] and headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_names_that_were_taken_are_told_in_one_line(stream: bool) -> None:
    names = ["a\r\nx-more: 1", "é", "\0", "good"]
    asked = ask("a b", stream=stream, thinking={"type": "adaptive"} | dict.fromkeys(names, 1))
    status, headers, _ = await answered(post(json.dumps(asked).encode()))
    assert status == 200 and "x-more" not in headers
    assert headers["x-glm-ignored"] == "thinking.a??x-more: 1, thinking.?, thinking.?, thinking.good"


async def test_many_names_are_cut() -> None:
    asked = ask("a b", thinking={"type": "adaptive"} | {f"{i:064}": 1 for i in range(4000)})
    status, headers, _ = await answered(post(json.dumps(asked).encode()))
    told = headers["x-glm-ignored"].split(", ")
    assert status == 200 and len(told) == MOST_NAMES + 1 and told[-1] == "..."
