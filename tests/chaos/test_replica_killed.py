"""kill -9 of the engine replica in mid-stream, with a real model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service import Service, running

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def fragile() -> Iterator[Service]:
    with running("--set", "pools.shared.slots=2", "--set", "pools.shared.engine.threads=1") as service:
        yield service


async def follow(client: httpx.AsyncClient, body: dict[str, Any], first: asyncio.Event) -> dict[str, Any]:
    """What a client saw of one stream, and when it ended."""
    seen: dict[str, Any] = {"tokens": 0, "done": False, "error": None, "status": None}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            seen["status"] = response.status_code
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    seen["done"] = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        seen["error"] = event["error"]
                    else:
                        seen["tokens"] += 1
                        first.set()
    except httpx.HTTPError as broken:
        seen["error"] = repr(broken)
    seen["ended"] = time.monotonic()
    return seen


async def test_stream_gets_an_error_event_and_the_queue_survives(fragile: Service) -> None:
    model = fragile.model
    long = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": 1500,
        "stream": True,
    }
    short = {**long, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=fragile.url, timeout=120.0) as client:
        began = [asyncio.Event(), asyncio.Event()]
        running_streams = [asyncio.create_task(follow(client, long, event)) for event in began]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in began)), 60)
        queued = asyncio.create_task(follow(client, short, asyncio.Event()))
        await asyncio.sleep(0.5)
        (replica,) = fragile.processes("ServeReplica:glm5:shared")
        killed = time.monotonic()
        replica.kill()
        broken = await asyncio.wait_for(asyncio.gather(*running_streams), 30)
        for seen in broken:
            assert seen["status"] == 200 and seen["tokens"] > 0
            assert isinstance(seen["error"], dict) and seen["error"]["code"] == "engine_failed", seen
            assert not seen["done"]
            assert seen["ended"] - killed < 2.0
        survived = await asyncio.wait_for(queued, 90)
        assert survived["done"] and survived["error"] is None, survived
    print(f"\nready again {time.monotonic() - killed:.1f} s after kill -9")
    fragile.wait_ready(60)
    with fragile.client as client:
        assert client.post("/v1/chat/completions", json={**short, "stream": False}).status_code == 200
    assert fragile.metric("glm_requests_running") == 0
