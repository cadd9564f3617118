"""A shared replica reloads in its other mode under a load that its own cannot hold; nobody loses an answer by it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.chaos.streams import Seen, body, client, right, settle, stream
from tests.service import running

pytestmark = pytest.mark.chaos

USERS, TOKENS, SLOTS = 40, 12, 64


async def test_a_replica_changes_its_mode_under_load() -> None:
    settings = [
        "model.name=simulated",
        "pools.shared.engine={name: simulated, hardware: 8x-rtx-pro-6000, load_s: 0.5}",
        "pools.shared.slots=2",
        f"pools.shared.other_mode={{slots: {SLOTS}}}",
        "scaling.convert=on",
        "scaling.hardware=8x-rtx-pro-6000",
        "scaling.judge_s=2",
        "admission.queue_requests=200",
    ]
    with running(sets=settings) as service:
        for _ in range(50):
            if service.metric("glm_slots") == 2:
                break
            await asyncio.sleep(0.1)
        assert service.metric("glm_slots") == 2
        (replica,) = {process.pid for process in service.processes("ServeReplica:glm5:shared")}
        every: list[Seen] = []
        began, changed = time.monotonic(), 0.0

        async def user() -> None:
            async with client(service.url) as http:
                while time.monotonic() - began < 60 and (not changed or time.monotonic() - changed < 3):
                    seen = await stream(http, body(TOKENS))
                    every.append(seen)
                    if seen.status == 503:  # while it reloads: Retry-After says when to come back
                        await asyncio.sleep(min(2.0, seen.retry_after or 1.0))

        users = [asyncio.create_task(user()) for _ in range(USERS)]
        while time.monotonic() - began < 60 and not changed:
            await asyncio.sleep(0.5)
            if await asyncio.to_thread(service.metric, "glm_slots") == SLOTS:
                changed = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*users), 60)
        assert changed, "the replica kept its mode"
        assert {process.pid for process in service.processes("ServeReplica:glm5:shared")} == {replica}
        whole = [seen for seen in every if seen.whole]
        waited = [seen for seen in every if seen.status == 503]
        assert len(whole) + len(waited) == len(every), [s.code for s in every if not s.whole and s.status != 503][:5]
        assert all(right(seen, TOKENS) for seen in whole)
        settle(service, 5.0)
        text = service.client.get("/metrics").text
        done = [line for line in text.splitlines() if line.startswith("glm_conversion_decisions_total")]
        assert any(
            'done="true"' in line and 'mode="throughput"' in line and line.endswith((" 1", " 1.0")) for line in done
        ), done
        before = [s for s in whole if s.ended < changed - 2]
        after = [s for s in whole if s.ended > changed]
        print(
            f"\nreloaded {changed - began:.1f} s after the load began; {len(before)} answers before, {len(after)} in "
            f"the 3 s after, {len(waited)} told to come back",
            end="",
        )
