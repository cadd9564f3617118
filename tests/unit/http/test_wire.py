"""The app behind a real server on loopback: clients that hang up, deadlines, keep-alive, backpressure."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import orjson
import pytest

from tests.unit.http.conftest import Served, ask, serving
from tests.unit.http.echo import EchoBackend
from tests.unit.http.test_app import CHAT, events, problem


def client(server: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=10)


async def open_and_send(server: Served, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("order", ["hang", "hang-later", "steady"])
async def test_hanging_up_frees_the_slots_at_once(server: Served, stream: bool, n: int, order: str) -> None:
    body = orjson.dumps(ask(f"{order}:" + "x " * 60, stream=stream, n=n))
    _, writer = await open_and_send(server, body)
    await server.settled(lambda: server.backend.running == n)
    if order != "hang":
        await asyncio.sleep(0.1)
    writer.close()
    await server.settled(lambda: server.backend.running == 0)
    assert len(server.backend.closed) == n


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_in_the_queue_gives_up_the_place(stream: bool) -> None:
    async with serving(EchoBackend(slots=1)) as server:
        _, first = await open_and_send(server, orjson.dumps(ask("hang:")))
        await server.settled(lambda: server.backend.running == 1)
        _, second = await open_and_send(server, orjson.dumps(ask("x", stream=stream)))
        await server.settled(lambda: server.backend.waiting == 1)
        second.close()
        await server.settled(lambda: server.backend.waiting == 0)
        assert server.backend.running == 1
        first.close()
        await server.settled(lambda: server.backend.running == 0)
        async with client(server) as http:
            assert (await http.post(CHAT, json=ask("x"))).status_code == 200


async def test_hanging_up_in_the_middle_of_a_body_is_quiet(server: Served) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{".encode()
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    async with client(server) as http:
        assert (await http.get("/health")).status_code == 200
    assert server.backend.seen == []


async def test_a_full_queue_is_429_with_retry_after_in_streams_too() -> None:
    async with serving(EchoBackend(slots=1, queue=0)) as server, client(server) as http:
        _, first = await open_and_send(server, orjson.dumps(ask("hang:")))
        await server.settled(lambda: server.backend.running == 1)
        for stream in (False, True):
            response = await http.post(CHAT, json=ask("x", stream=stream))
            problem(response, 429, "overloaded")
            assert response.headers["retry-after"] == "2" and response.headers["retry-after-ms"] == "1500"
        first.close()


async def test_time_in_the_queue_is_told_truly() -> None:
    async with serving(EchoBackend(slots=1)) as server, client(server) as http:
        first = asyncio.create_task(http.post(CHAT, json=ask("slow:x")))
        await server.settled(lambda: server.backend.running == 1)
        second = await http.post(CHAT, json=ask("x", stream=True))
        waited = float(second.headers["x-glm-queue-ms"])
        assert waited > 200
        assert float((await first).headers["x-glm-queue-ms"]) < waited


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_deadline_ends_the_request(server: Served, stream: bool) -> None:
    async with client(server) as http:
        started = time.monotonic()
        response = await http.post(CHAT, json=ask("hang:x", stream=stream), headers={"x-request-timeout": "0.3"})
        problem(response, 504, "deadline_exceeded")
        assert time.monotonic() - started > 0.25
        assert server.backend.running == 0


async def test_a_first_byte_that_never_comes_is_504() -> None:
    async with serving(EchoBackend(), first_byte_timeout_s=0.3) as server, client(server) as http:
        assert "first 0.3 s" in problem(
            await http.post(CHAT, json=ask("hang:x", stream=True)), 504, "deadline_exceeded"
        )
        assert server.backend.running == 0


async def test_silence_in_the_middle_is_an_error_event() -> None:
    async with serving(EchoBackend(), idle_timeout_s=0.3) as server, client(server) as http:
        found = events(await http.post(CHAT, json=ask("hang-later:x", stream=True)))
        assert found[-1][0] == "error" and found[-1][1]["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in found and server.backend.running == 0


async def test_a_steady_stream_may_last_longer_than_the_idle_limit() -> None:
    async with serving(EchoBackend(), idle_timeout_s=0.8, first_byte_timeout_s=0.8) as server, client(server) as http:
        found = events(await http.post(CHAT, json=ask("steady:" + "x " * 60, stream=True)))
        assert found[-1] == "[DONE]"


async def test_long_waits_open_the_stream_and_keep_it_alive() -> None:
    settings = {"open_stream_after_s": 0.1, "keepalive_s": 0.1}
    async with serving(EchoBackend(slots=1), **settings) as server, client(server) as http:
        response = await http.post(CHAT, json=ask("slow:x y", stream=True))
        assert response.text.count(": keep-alive\n\n") >= 3
        assert events(response)[-1] == "[DONE]"
        assert response.headers["x-glm-pool"] == "shared"
        # In the queue nothing is known yet of where it will be served: no header rather than an untrue one.
        _, first = await open_and_send(server, orjson.dumps(ask("hang:")))
        await server.settled(lambda: server.backend.running == 1)
        async with http.stream("POST", CHAT, json=ask("x", stream=True)) as waiting:
            assert waiting.status_code == 200 and "x-glm-pool" not in waiting.headers
            first.close()
            assert events_end(await waiting.aread())


def events_end(body: bytes) -> bool:
    return body.endswith(b"data: [DONE]\n\n")


async def test_an_error_after_an_opened_stream_is_an_event() -> None:
    async with serving(EchoBackend(slots=1), open_stream_after_s=0.05) as server, client(server) as http:
        headers = {"x-request-timeout": "0.3"}
        response = await http.post(CHAT, json=ask("hang:x", stream=True), headers=headers)
        assert response.status_code == 200
        assert events(response)[-1][1]["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("limit", ["idle_timeout_s", "request_timeout_s"])
async def test_a_client_that_stops_reading_is_let_go(limit: str) -> None:
    """Its buffers fill, the writes stop, and after the idle limit (or the whole deadline) its slot is free."""
    backend = EchoBackend()
    async with serving(backend, **{limit: 0.5}) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        body = orjson.dumps(ask("flood:x", stream=True))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sock.sendall(head.encode() + body)
        await server.settled(lambda: backend.running == 1)
        await server.settled(lambda: backend.running == 0, within_s=10)
        sock.close()


async def test_a_body_that_does_not_arrive_is_refused() -> None:
    async with serving(EchoBackend(), body_timeout_s=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
        writer.write(head.encode())
        async with asyncio.timeout(5):
            answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 400") and b"did not arrive" in answer
        writer.close()


async def test_a_body_too_large_is_refused_on_the_wire(server: Served) -> None:
    async with client(server) as http:
        headers = {"content-type": "application/json"}
        problem(await http.post(CHAT, content=b" " * (8 * 1024 * 1024 + 1), headers=headers), 413, "body_too_large")
        assert (await http.get("/health")).status_code == 200


async def test_many_streams_at_once_all_end_well() -> None:
    async with serving(EchoBackend(slots=16, queue=1000)) as server:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as http:
            responses = await asyncio.gather(*(http.post(CHAT, json=ask(f"a{i} b c", stream=True)) for i in range(200)))
        for i, response in enumerate(responses):
            *chunks, done = events(response)
            assert done == "[DONE]"
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == f"a{i} b c "
        assert server.backend.output_tokens == 600
