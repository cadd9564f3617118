"""A shared replica reloads for one user, and back under a load that this mode cannot hold; nobody loses an answer."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.chaos.streams import Seen, body, client, right, settle, stream
from tests.service import running

pytestmark = pytest.mark.chaos

USERS, TOKENS, SLOTS, FEW = 40, 12, 64, 2


async def test_a_replica_changes_its_mode_for_one_user_and_back_under_load() -> None:
    settings = [
        "model.name=simulated",
        "pools.shared.engine={name: simulated, hardware: 8x-rtx-pro-6000, load_s: 0.5}",
        f"pools.shared.slots={SLOTS}",
        f"pools.shared.other_mode={{slots: {FEW}, engine: {{mtp: true}}}}",
        "scaling.convert=on",
        "scaling.hardware=8x-rtx-pro-6000",
        "scaling.judge_s=2",
        "admission.queue_requests=200",
    ]
    with running(sets=settings) as service:
        for _ in range(50):
            if service.metric("glm_slots") == SLOTS:
                break
            await asyncio.sleep(0.1)
        assert service.metric("glm_slots") == SLOTS
        (replica,) = {process.pid for process in service.processes("ServeReplica:glm5:shared")}
        every: list[Seen] = []
        began, changed, more_s, pause_s = time.monotonic(), 0.0, 0.0, 0.0

        async def user() -> None:
            async with client(service.url) as http:
                while time.monotonic() - began < 60 and (not changed or time.monotonic() - changed < more_s):
                    seen = await stream(http, body(TOKENS))
                    every.append(seen)
                    if seen.status == 503:  # while it reloads: Retry-After says when to come back
                        await asyncio.sleep(min(2.0, seen.retry_after or 1.0))
                    await asyncio.sleep(pause_s)

        async def load(users: int, slots: int) -> None:
            """So many users at once until the replica has `slots` slots; where there are many, 3 s more."""
            nonlocal began, changed, more_s, pause_s
            began, changed = time.monotonic(), 0.0
            # One user is priority: the reload waits for a gap between his requests.
            more_s, pause_s = (0.0, 0.3) if users == 1 else (3.0, 0.0)
            tasks = [asyncio.create_task(user()) for _ in range(users)]
            while time.monotonic() - began < 60 and not changed:
                await asyncio.sleep(0.5)
                if await asyncio.to_thread(service.metric, "glm_slots") == slots:
                    changed = time.monotonic()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert changed, f"{users} users: the replica has not got {slots} slots"
            print(f"\nreloaded {changed - began:.1f} s after {users} users came", end="")

        await load(1, FEW)
        await load(USERS, SLOTS)
        assert {process.pid for process in service.processes("ServeReplica:glm5:shared")} == {replica}
        whole = [seen for seen in every if seen.whole]
        waited = [seen for seen in every if seen.status == 503]
        assert len(whole) + len(waited) == len(every), [s.code for s in every if not s.whole and s.status != 503][:5]
        assert all(right(seen, TOKENS) for seen in whole)
        settle(service, 5.0)
        text = service.client.get("/metrics").text
        done = [line for line in text.splitlines() if line.startswith("glm_conversion_decisions_total")]
        for mode in ("latency", "throughput"):
            assert any(
                'done="true"' in line and f'mode="{mode}"' in line and line.endswith((" 1", " 1.0")) for line in done
            ), done
        before = [s for s in whole if s.ended < changed - 2]
        after = [s for s in whole if s.ended > changed]
        told = f"{len(before)} answers before the last reload, {len(after)} in the 3 s after"
        print(f"\n{told}, {len(waited)} told to come back", end="")
