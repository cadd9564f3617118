"""Calls of llama.cpp that do not come back, and its own HTTP when it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from service.engines import llamacpp
from service.engines.llamacpp import ASKED_AT_ONCE, LlamaCppEngine
from service.engines.options import LlamaCppOptions
from service.errors import EngineFailed
from service.types import EngineRequest


async def answered(engine: LlamaCppEngine) -> None:
    async for _ in engine.generate(EngineRequest("r", "completions", orjson.dumps({"prompt": "x"}))):
        pass


class Stuck:
    """In llama.cpp's place: a call that does not come back until it is let go."""

    def __init__(self) -> None:
        self.called, self.let_go = threading.Event(), threading.Event()

    def handle_completions(self, body: bytes, receive: Any) -> None:
        self.called.set()
        self.let_go.wait(60)


async def test_a_cancelled_call_that_does_not_come_back_counts_as_running_without_progress() -> None:
    engine = LlamaCppEngine(model="x", served_name="m", slots=1, context_tokens=64, options=LlamaCppOptions(threads=1))
    stuck = engine._server = Stuck()
    asked = asyncio.create_task(answered(engine))
    await asyncio.to_thread(stuck.called.wait, 60)
    asked.cancel()
    await asyncio.wait([asked])
    before = engine.stats()
    await asyncio.sleep(0.05)
    after = engine.stats()
    assert before.running == after.running == 1 and after.heartbeat_age_s > before.heartbeat_age_s
    # One that never began is gone with its caller: the pool has slots + 1 threads.
    others = [asyncio.create_task(answered(engine)) for _ in range(3)]
    await asyncio.sleep(0.05)
    for other in others:
        other.cancel()
    await asyncio.wait(others)
    assert engine.stats().running == 2
    stuck.let_go.set()
    while engine.stats().running:
        await asyncio.sleep(0.01)
    assert engine.stats().heartbeat_age_s == 0.0
    await engine.close()


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[tuple[LlamaCppEngine, list[bytes], asyncio.Event]]:
    """An engine whose llama.cpp takes requests, which are listed, answers none, and hangs up at the event."""
    asked: list[bytes] = []
    hang_up = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n"))
            await hang_up.wait()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    engine = LlamaCppEngine(model="x", served_name="m", slots=1, context_tokens=64, options=LlamaCppOptions())
    port = server.sockets[0].getsockname()[1]
    engine._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600.0)
    try:
        yield engine, asked, hang_up
    finally:
        hang_up.set()
        await engine.close()
        server.close()


async def test_metrics_that_do_not_come_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica must go on speaking: the wait for them has a limit far below that of the other calls."""
    monkeypatch.setattr(llamacpp, "METRICS_S", 0.1)
    async with silent() as (engine, asked, _):
        assert await asyncio.wait_for(engine.native_metrics(), 60) == ""
        assert asked == [b"GET /metrics HTTP/1.1\r\n"]


async def test_a_call_that_was_given_up_keeps_its_place_until_llama_cpp_is_done() -> None:
    async with silent() as (engine, asked, hang_up):
        calls = [asyncio.create_task(engine.tokenize(orjson.dumps({"prompt": "a"}))) for _ in range(ASKED_AT_ONCE + 1)]
        while len(asked) < ASKED_AT_ONCE:
            await asyncio.sleep(0.01)
        for call in calls[:ASKED_AT_ONCE]:
            call.cancel()
        await asyncio.wait(calls[:ASKED_AT_ONCE])
        assert engine._asking.locked() and len(asked) == ASKED_AT_ONCE
        hang_up.set()  # that ends their places, and the one that waited is asked
        with pytest.raises(EngineFailed, match="did not answer /tokenize"):
            await calls[-1]
        assert len(asked) == ASKED_AT_ONCE + 1 and not engine._asking.locked()
