"""The socket's bounds and manners, over real connections: what a client may send, how refusals end, how a port is
shared and given up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from service.http.server import HttpServer
from service.http.settings import HttpSettings

SMALL = 4096


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the length of the body; `/wait` waits for `gate` first; `/flood` writes for ever."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/wait":
        waiting.set()
        await gate.wait()
    body = f"{scope['path']} {size}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


gate: asyncio.Event
waiting: asyncio.Event


@pytest.fixture(autouse=True)
async def events() -> None:
    global gate, waiting
    gate, waiting = asyncio.Event(), asyncio.Event()


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncGenerator[tuple[HttpServer, int]]:
    server = HttpServer(echo, HttpSettings(port=0, max_header_bytes=SMALL, **settings))
    port = await server.start()
    try:
        async with asyncio.timeout(30):
            yield server, port
    finally:
        await server.stop(0.1)


async def exchange(port: int, *parts: bytes) -> bytes:
    """All that comes back for these bytes, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0)
    answer = await reader.read()
    writer.close()
    return answer


def get(path: str = "/", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def refusal(answer: bytes) -> tuple[int, str]:
    """(status, code) of an envelope after which the connection was closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def test_requests_on_one_connection_one_after_another_and_pipelined() -> None:
    async with serving() as (_, port):
        post = b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
        answer = await exchange(port, get("/a") + post + get("/c", "connection: close"))
        assert [answer.count(said) for said in (b"/a 0", b"/b 5", b"/c 0")] == [1, 1, 1]


@pytest.mark.parametrize(
    "head",
    [
        get("/", "x: " + "a" * SMALL),
        get("/" + "a" * SMALL),
        get("/", *(f"x{i}: {'a' * 20}" for i in range(200))),
        b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000,
    ],
    ids=["one header", "path", "many headers", "a header without an end"],
)
async def test_a_head_too_large_is_431_and_no_reset(head: bytes) -> None:
    async with serving() as (_, port):
        assert refusal(await exchange(port, head)) == (431, "headers_too_large")


async def test_the_second_head_of_a_connection_is_bounded_too() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/a"))
        assert b"/a 0" in await reader.readuntil(b"/a 0")
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"a" * 10_000)
                await writer.drain()
        assert refusal(await reader.read()) == (431, "headers_too_large")
        writer.close()


async def test_a_large_body_is_no_head() -> None:
    async with serving() as (_, port):
        body = b"x" * 3_000_000
        head = f"POST /big HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        assert (await exchange(port, head + body)).endswith(b"/big 3000000")


@pytest.mark.parametrize("bad", [b"HELO mail\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"])
async def test_what_is_no_http_is_400_in_the_envelope(bad: bytes) -> None:
    async with serving() as (_, port):
        assert refusal(await exchange(port, bad)) == (400, "invalid_request")


async def test_half_a_head_is_408_and_nothing_at_all_is_closed() -> None:
    async with serving(header_timeout_s=0.2) as (server, port):
        assert refusal(await exchange(port, b"GET / HTTP/1.1\r\nho")) == (408, "request_timeout")
        assert await exchange(port) == b""
        assert not server.state.connections


async def test_half_a_second_head_is_not_waited_for_either() -> None:
    async with serving(header_timeout_s=0.2) as (_, port):
        assert b"/a 0" in (answer := await exchange(port, get("/a") + b"GET / HT"))
        assert b"request_timeout" in answer


async def test_an_idle_connection_is_let_go() -> None:
    async with serving(keep_connection_s=0.2) as (_, port):
        assert (await exchange(port, get("/a"))).endswith(b"/a 0")


async def test_a_connection_too_many_is_told_so() -> None:
    async with serving(max_connections=2) as (_, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert refusal(await exchange(port)) == (503, "not_ready")
        held[0][1].close()
        await asyncio.sleep(0.05)
        assert (await exchange(port, get("/a", "connection: close"))).endswith(b"/a 0")
        held[1][1].close()


async def test_what_runs_ends_and_nothing_new_begins() -> None:
    async with serving() as (server, port):
        running = asyncio.create_task(exchange(port, get("/wait")))
        idle = asyncio.create_task(exchange(port, get("/a")))
        await waiting.wait()
        stopping = asyncio.create_task(server.stop(20.0))
        assert (await idle).endswith(b"/a 0"), "an idle connection is closed at once"
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        assert not running.done() and not server.serving
        gate.set()
        assert (await running).endswith(b"/wait 0")
        await stopping


async def test_what_does_not_end_in_time_is_cut() -> None:
    async with serving() as (server, port):
        running = asyncio.create_task(exchange(port, get("/wait")))
        await waiting.wait()
        await server.stop(0.1)
        with contextlib.suppress(ConnectionError):
            assert b"/wait" not in await running
        assert not server.state.tasks


async def test_two_hold_a_port_and_one_takes_over() -> None:
    async with serving() as (first, port):
        second = HttpServer(echo, HttpSettings(port=port))
        assert await second.start() == port
        await first.stop(1.0)
        for _ in range(20):
            assert (await exchange(port, get("/a", "connection: close"))).endswith(b"/a 0")
        await second.stop(0.1)


async def test_a_port_that_another_holds_is_an_error() -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    server = HttpServer(echo, HttpSettings(port=taken.sockets[0].getsockname()[1]))
    with pytest.raises(OSError):
        await server.start()
    taken.close()
