"""An engine that only fails: its clients are served by the other replica, and Serve replaces it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.chaos.streams import body, client
from tests.service import Service, running

pytestmark = pytest.mark.chaos

GOOD = 40
"""Requests that a replica answers before it breaks."""


def pids(service: Service) -> set[int]:
    return {process.pid for process in service.processes("ServeReplica:glm5:shared")}


async def test_a_failing_engine_is_passed_over_and_replaced() -> None:
    settings = [
        "model.name=simulated",
        f"pools.shared.engine={{name: simulated, step_ms: 5, breaks_after: {GOOD}}}",
        "pools.shared.min_replicas=2",
        "pools.shared.max_replicas=2",
        "pools.shared.slots=4",
        "routing.retries=3",
        "ray.num_cpus=6",
    ]
    with running(sets=settings) as service:
        before = pids(service)
        assert len(before) == 2
        right: list[bool] = []
        began = time.monotonic()
        async with client(service.url) as http:
            while pids(service) <= before and time.monotonic() - began < 60:
                response = await http.post("/v1/chat/completions", json=body(2, stream=False))
                right.append(response.status_code == 200)
                if sum(right) > GOOD:
                    await asyncio.sleep(0.2)  # one is broken by now, or soon
        replaced = pids(service) - before
        answered = sum(right)
        print(
            f"\n{answered} answered, {len(right) - answered} failed, replaced after {time.monotonic() - began:.1f} s",
            end="",
        )
        assert replaced, "the circuit never opened"
        assert answered > GOOD
        # The one that is left may break too before Serve has replaced the first; until then a failure before the first
        # byte is asked again, so all that both can answer was answered (each has also answered a warm-up).
        if False in right:
            assert right.index(False) >= 2 * (GOOD - 1)
        service.wait_ready(60)
