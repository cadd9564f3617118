"""The live figures: one reading for all viewers, none without, failures told, bounds kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from pydantic import TypeAdapter
from starlette.types import Message

from service.errors import EngineFailed, Overloaded
from service.http import live
from service.http.live import Live
from service.http.pulse import ClientStalled
from service.metrics.live import LiveFigures
from tests.unit.http.conftest import Served, serving
from tests.unit.http.echo import EchoBackend

PATH = "/v1/service/live"


class Broken(EchoBackend):
    """Its figures cannot be read, the first `failures` times."""

    failures = 1

    async def metrics(self) -> bytes:
        self.looked += 1
        if self.looked <= self.failures:
            raise EngineFailed("no figures")
        return b""


async def messages(server: Served, count: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client, client.stream("GET", PATH) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [message async for message in _first(response, count)]


async def _first(response: httpx.Response, count: int) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield orjson.loads(line.removeprefix("data: "))
            count -= 1
            if not count:
                return


async def test_ten_viewers_cost_one_reading_each_time(server: Served) -> None:
    seen = await asyncio.gather(*(messages(server, 2) for _ in range(10)))
    made = {message["at"] for viewer in seen for message in viewer}
    assert server.backend.looked <= len(made) + 1  # the last one may have been made for nobody any more
    assert len(made) < 10
    for viewer in seen:
        first, second = (message["at"] for message in viewer)
        assert second - first >= 0.99 * live.INTERVAL_S
    for message in seen[0]:
        TypeAdapter(LiveFigures).validate_python(message)
        assert message["ready"] and message["pools"][0]["readiness"]["phase"] == "serving"


async def test_nothing_is_read_while_nobody_looks(server: Served) -> None:
    await messages(server, 1)
    looked = server.backend.looked
    await asyncio.sleep(3 * live.INTERVAL_S)
    assert server.backend.looked <= looked + 1  # one may have been under way as the viewer left


async def test_a_failure_is_the_last_event_and_the_next_viewer_tries_again() -> None:
    async with serving(Broken()) as server, httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        failed = (await client.get(PATH)).text
        assert failed.startswith("event: error\ndata: ") and '"engine_failed"' in failed
        assert (await messages(server, 1))[0]["pools"]


async def test_a_viewers_time_ends_and_it_comes_again(monkeypatch: pytest.MonkeyPatch, server: Served) -> None:
    monkeypatch.setattr(live, "LIFE_S", 0.5)
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        for _ in range(2):
            # The stream ended, and well, after the message under way.
            assert (await client.get(PATH)).text.count("data: ") in (1, 2)


async def test_one_that_stops_reading_is_let_go_and_others_see_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WRITE_S", 0.2)
    watched, seen = Live(EchoBackend()), asyncio.Event()

    async def stuck(message: Message) -> None:
        await asyncio.Event().wait()

    async def reads(message: Message) -> None:
        seen.set()

    other = asyncio.create_task(watched.follow(reads))
    async with asyncio.timeout(20):
        with pytest.raises(ClientStalled):
            await watched.follow(stuck)
        seen.clear()
        await seen.wait()
    other.cancel()


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "VIEWERS", 1)
    watched, seen = Live(EchoBackend()), asyncio.Event()

    async def reads(message: Message) -> None:
        seen.set()

    viewer = asyncio.create_task(watched.follow(reads))
    async with asyncio.timeout(20):
        await seen.wait()
    with pytest.raises(Overloaded):
        watched.stream()
    viewer.cancel()
    await asyncio.gather(viewer, return_exceptions=True)
    watched.stream()
