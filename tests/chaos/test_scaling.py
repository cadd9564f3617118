"""A trace on real Ray: a burst of chat over a steady batch, four boxes as a custom resource, latency from zero.

GLM5_TRACE_BURST_S sets the burst's length (default 20 s); GLM5_TRACE_STATIC=1 plays the same trace on a fixed 2+2
split.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from typing import Any

import httpx
import pytest

from tests.chaos.streams import Seen, body, client, settle, stream
from tests.service import Service, running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

QUIET_S = 5.0
BURST_S = float(os.environ.get("GLM5_TRACE_BURST_S", "20"))
BATCH_WORKERS = 90
CHAT_TOKENS, BATCH_TOKENS = 8, 10
"""Few tokens and slow steps: a request holds its slot for 0.8 s or 2 s, and streaming costs the test machine little."""
STEPS = ("pools.latency.engine.step_ms=100", "pools.throughput.engine.step_ms=200")
BUDGET = 4


def replicas(service: Service) -> dict[str, int]:
    """Processes of each pool, whether they load, serve or drain."""
    return {pool: len(service.processes(f"ServeReplica:glm5:{pool}")) for pool in ("latency", "throughput")}


async def play(service: Service) -> tuple[list[Seen], list[Seen], list[tuple[float, dict[str, int]]]]:
    rng = random.Random(1)
    chat: list[asyncio.Task[Seen]] = []
    batch: list[Seen] = []
    fleet: list[tuple[float, dict[str, int]]] = []
    began = time.monotonic()
    total = QUIET_S + BURST_S + 2.5 * QUIET_S + 4.0

    async def worker(http: httpx.AsyncClient) -> None:
        while time.monotonic() - began < total:
            batch.append(await stream(http, body(BATCH_TOKENS, service_tier="flex")))

    async def watch() -> None:
        while time.monotonic() - began < total:
            fleet.append((time.monotonic() - began, await asyncio.to_thread(replicas, service)))
            await asyncio.sleep(0.3)

    async with client(service.url) as http:
        others: list[asyncio.Task[Any]] = [asyncio.create_task(worker(http)) for _ in range(BATCH_WORKERS)]
        others.append(asyncio.create_task(watch()))
        while (now := time.monotonic() - began) < total - 2 * QUIET_S:
            rate = 8.0 if QUIET_S <= now < QUIET_S + BURST_S else 1.0
            chat.append(asyncio.create_task(stream(http, body(CHAT_TOKENS, service_tier="priority"))))
            await asyncio.sleep(rng.expovariate(rate))
        seen = list(await asyncio.wait_for(asyncio.gather(*chat), 60))
        await asyncio.wait_for(asyncio.gather(*others), 60)
    return seen, batch, fleet


async def test_the_policy_follows_a_trace() -> None:
    static = bool(os.environ.get("GLM5_TRACE_STATIC"))
    settings = ["routing.spill_to_throughput=false", *STEPS]
    if not static:
        settings.append("pools.latency.min_replicas=0")
    if static:
        settings += [f"pools.{p}.{k}=2" for p in ("latency", "throughput") for k in ("min_replicas", "max_replicas")]
    with running("deployments/profiles/sim-two-pools.yaml", sets=settings) as service:
        seen, batch, fleet = await play(service)
        settle(service, 5.0)
        moves = service.metric("glm_replica_starts_total")
    waits = sorted(s.first - s.sent for s in seen if s.first)
    tokens = sum(BATCH_TOKENS for s in batch if s.whole)
    most = max(now["latency"] for _, now in fleet)
    print(
        f"\n{'static 2+2' if static else 'policy'}: {len(seen)} chats, p50 TTFT {waits[len(waits) // 2]:.2f} s, "
        f"p95 {waits[int(0.95 * len(waits))]:.2f} s; batch {tokens / fleet[-1][0]:.0f} tok/s; latency replicas at most "
        f"{most}, at the end {fleet[-1][1]['latency']}; {moves:.0f} replica starts in all",
        end="",
    )
    assert all(s.whole for s in seen), [s.code for s in seen if not s.whole][:5]
    assert all(s.whole for s in batch), "a scale-down cut an answer"
    held = [sum(now.values()) for _, now in fleet]
    # One sample may see a process that has given its box back and not yet ended.
    assert all(min(pair) <= BUDGET for pair in itertools.pairwise(held)), f"more replicas than boxes: {held}"
    if not static:
        assert fleet[0][1]["latency"] == 0, "the latency pool began at zero"
        assert most >= 2, "the burst brought no replica"
        assert fleet[-1][1]["throughput"] >= 2 or fleet[-1][1]["latency"] < most, "the boxes were not given back"
