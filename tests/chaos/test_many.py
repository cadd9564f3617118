"""Ten thousand short answers through kills: none lost, none twice. A thousand clients at once at eight slots.

GLM5_CHAOS_REQUESTS sets the first number (default 1500 for two busy cores; docs/modes.md has 10,000).
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from tests.chaos.streams import WORDS, at_once, body, books, client, settle
from tests.service import Service, running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("GLM5_CHAOS_REQUESTS", "1500"))
AT_ONCE = 64
TOKENS = 3
KILLS = 2


async def test_none_lost_none_twice(fragile_pair: Service) -> None:
    """Whole answers (not streamed) may be asked again when a replica dies: every client gets exactly one."""
    service = fragile_pair
    before = await asyncio.to_thread(books, service)
    todo = iter(range(REQUESTS))
    answers: dict[int, tuple[str, str]] = {}
    failures: list[Any] = []

    async def worker() -> None:
        async with client(service.url) as http:
            for number in todo:
                response = await http.post("/v1/chat/completions", json=body(TOKENS, stream=False))
                if response.status_code != 200:
                    failures.append((number, response.status_code, response.text[:200]))
                    continue
                tree = response.json()
                assert number not in answers
                answers[number] = (tree["id"], tree["choices"][0]["message"]["content"])

    async def killer() -> None:
        for kill in range(KILLS):
            while len(answers) < REQUESTS * (kill + 1) / (KILLS + 2):
                await asyncio.sleep(0.05)
            for _ in range(100):
                if len(replicas := service.processes("ServeReplica:glm5:shared")) == 2:
                    break
                await asyncio.sleep(0.2)
            replicas[kill % 2].kill()

    began = time.monotonic()
    async with asyncio.timeout(800):
        await asyncio.gather(killer(), *(worker() for _ in range(AT_ONCE)))
    took = time.monotonic() - began
    await asyncio.to_thread(settle, service, 5.0)
    after = await asyncio.to_thread(books, service)
    made = after["output_tokens"] - before["output_tokens"]
    print(
        f"\n{len(answers)} of {REQUESTS} answered in {took:.1f} s through {KILLS} kills, "
        f"engines made {made:.0f} tokens",
        end="",
    )
    assert not failures, failures[:3]
    assert len(answers) == REQUESTS, "lost"
    assert len({id for id, _ in answers.values()}) == REQUESTS, "two clients got the same answer"
    assert all(text == " the river runs" for _, text in answers.values())
    # The engines' own counters: each answer once. A kill loses what a replica had counted since its last word,
    # and what it was at is made again.
    at_risk = KILLS * AT_ONCE * TOKENS * 10
    assert REQUESTS * TOKENS - at_risk <= made <= REQUESTS * TOKENS + KILLS * AT_ONCE * TOKENS
    assert after["ok"] - before["ok"] == REQUESTS, "the ingresses ended as many requests as there were"


def memory_mib(service: Service) -> float:
    found = [p.memory_info().rss for p in service.processes("ServeReplica:glm5")]
    return sum(found) / 2**20


async def test_a_thousand_at_once_at_eight_slots() -> None:
    """Few and slow steps, so that this machine's cores are there for the thousand and not for the tokens of eight."""
    tokens, step_s = 12, 0.25
    settings = (
        "pools.shared.slots=4",
        f"pools.shared.engine.step_ms={step_s * 1e3:.0f}",
        "admission.queue_requests=24",
        "http.request_timeout_s=120",
        "http.first_byte_timeout_s=100",
    )
    with running("deployments/profiles/sim-chaos.yaml", sets=settings) as service:
        before = memory_mib(service)
        crowd = asyncio.create_task(at_once(service.url, body(tokens), 1000, 150.0))
        during = before
        while not crowd.done():
            await asyncio.wait([crowd], timeout=0.5)
            during = max(during, memory_mib(service))
        seen = crowd.result()
        served = [s for s in seen if s.status == 200]
        refused = [s for s in seen if s.status == 429]
        assert len(served) + len(refused) == 1000, {s.status for s in seen}
        expected = "".join(f" {WORDS[i % len(WORDS)]}" for i in range(tokens))
        assert all(s.text == expected and b"data: [DONE]" in s.data for s in served)
        # Whoever finds neither a slot (8) nor a place in a queue (2 x 24) is refused; some places come free meanwhile.
        assert 48 <= len(served) < 250
        assert all(b"retry-after: " in s.data.lower() for s in refused)
        waits = sorted(s.answered for s in refused)
        # Gaps between tokens as the ingresses saw them.
        gap = service.metric("glm_itl_seconds_sum") / service.metric("glm_itl_seconds_count")
        p99 = waits[int(0.99 * len(waits))]
        print(
            f"\n1000 at once: {len(served)} served, {len(refused)} refused, p50 {waits[len(waits) // 2] * 1e3:.0f} ms, "
            f"p99 {p99 * 1e3:.0f} ms, {len(refused) / waits[-1]:.0f} a second; memory {before:.0f} -> "
            f"{during:.0f} MiB; a served token came every {gap * 1e3:.0f} ms (a step is {step_s * 1e3:.0f})",
            end="",
        )
        assert during - before < 400
        assert p99 < 40.0
        assert gap < 2 * step_s
        settle(service, 3.0)
