"""kill -9 of every kind of process under many streams, one after the other, on real Ray with the simulated engine.

GLM5_CHAOS_STREAMS sets how many streams run (default 60: two busy cores; 200 in docs/modes.md).
"""

from __future__ import annotations

import asyncio
import os
import time

import httpx
import pytest

from tests.chaos.streams import Seen, body, books, client, ended, right, settle, stream, tally
from tests.service import Service

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STREAMS = int(os.environ.get("GLM5_CHAOS_STREAMS", "60"))
TOKENS = 100 if STREAMS <= 60 else 150
DEADLINE_S = 60.0
AGREE_S = 2.0
VICTIMS = {
    "replica": ("ServeReplica:glm5:shared", 30.0),
    "ingress": ("ServeReplica:glm5:ingress", 30.0),
    "controller": ("ServeController", 30.0),
    "board": ("ray::_Board", 30.0),
}
"""Process titles, and the longest that the service may be without one."""


async def under_load(service: Service, victim: str) -> tuple[list[Seen], float]:
    """All streams, with the victim killed when most of them have begun; and when it was killed."""
    async with client(service.url) as http:
        before = {p.pid for p in service.processes(VICTIMS[victim][0])}
        tasks = [asyncio.create_task(stream(http, body(TOKENS))) for _ in range(STREAMS)]
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            if (await asyncio.to_thread(books, service))["held"] >= 0.5 * STREAMS:
                break
        (process, *_) = [p for p in service.processes(VICTIMS[victim][0]) if p.pid in before]
        killed = time.monotonic()
        process.kill()
        return await ended(tasks, DEADLINE_S), killed


@pytest.mark.parametrize("victim", VICTIMS)
async def test_every_stream_ends_and_the_books_agree(fragile_pair: Service, victim: str) -> None:
    service = fragile_pair
    seen, killed = await under_load(service, victim)
    last = max(s.ended for s in seen)
    assert last > killed, "all had ended before the kill"
    for one in seen:
        assert one.end in ("whole", "error")
        assert one.ended - one.sent < DEADLINE_S
        assert not one.whole or right(one, TOKENS), f"a whole answer has wrong words: {one.text!r}"
        assert not one.first or one.whole or one.code in ("engine_failed", "RemoteProtocolError", "ReadError"), one.code
    if victim in ("controller", "board"):
        assert all(one.whole for one in seen), f"nothing that runs needs the {victim}"
    back = await asyncio.to_thread(service.wait_ready, VICTIMS[victim][1])
    recovered = await recover(service, victim)
    agree = await asyncio.to_thread(settle, service, max(AGREE_S, AGREE_S + killed - last))
    print(
        f"\n{victim}: {STREAMS} streams ended as {dict(tally(seen))}, the last {last - killed:.1f} s after kill -9; "
        f"answering again {time.monotonic() - killed - agree:.1f} s after it (/ready {back:.1f} s after the last end), "
        f"the victim replaced {recovered - killed:.1f} s after it; books empty after {agree:.1f} s",
        end="",
    )


async def recover(service: Service, victim: str) -> float:
    """When a request is served and as many processes of the kind run as before."""
    title, within_s = VICTIMS[victim]
    wanted = 2 if victim in ("replica", "ingress") else 1
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        async with client(service.url) as http:
            one = await stream(http, body(2))
        alive = len(service.processes(title))
        if one.whole and alive >= wanted:
            return time.monotonic()
        await asyncio.sleep(0.2)
    raise AssertionError(f"no {victim} {within_s} s after it was killed")


async def test_an_engine_does_not_work_for_an_ingress_that_is_gone(fragile_pair: Service) -> None:
    """All that one ingress asked for stops in the engines within 2 s of its death; the other's goes on."""
    service = fragile_pair
    async with client(service.url) as http:
        tasks = [asyncio.create_task(stream(http, body(1000, max_tokens=1000))) for _ in range(20)]
        deadline = time.monotonic() + 20
        while (await asyncio.to_thread(books, service))["inside"] < 20 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        service.processes("ServeReplica:glm5:ingress")[0].kill()
        killed = time.monotonic()
        agreed = 0.0
        while time.monotonic() - killed < 10.0:
            try:
                found = await asyncio.to_thread(books, service)
            except httpx.HTTPError:
                continue
            if found["inside"] == found["held"] < 20:
                agreed = time.monotonic() - killed
                break
            await asyncio.sleep(0.05)
        print(f"\nthe engines let go of a dead ingress's requests after {agreed:.1f} s", end="")
        assert 0 < agreed < AGREE_S, found
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    settle(service, AGREE_S)
