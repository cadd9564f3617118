"""A flood of flex never delays priority by more than one decode step beyond its own slots.

Gate and simulated engine as a replica has them, in one process, in real time.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import orjson

from service.admission.gate import Gate
from service.engines.options import SimulatedOptions
from service.engines.simulated import SimulatedEngine
from service.types import EngineRequest, Tier

STEP_S = 0.05
SLOTS, RESERVED = 8, 2
JITTER_S = 0.03
"""What a busy test machine adds to a wake-up."""


async def ttft(gate: Gate, engine: SimulatedEngine, id: str, tier: Tier, tokens: int) -> float:
    """Seconds from arrival to the first token."""
    arrived, first = time.monotonic(), 0.0
    asked = orjson.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens})
    async with gate.slot(id, tier, 60.0, tokens):
        async for chunk in engine.generate(EngineRequest(id, "chat", asked, tier)):
            if chunk.output_tokens and not first:
                first = time.monotonic() - arrived
    return first


async def test_priority_keeps_its_slots_in_a_flood() -> None:
    options = SimulatedOptions(step_ms=STEP_S * 1e3)
    engine = SimulatedEngine(
        model="simulated", served_name="simulated", slots=SLOTS, context_tokens=4096, options=options
    )
    await engine.load(lambda progress: None)
    gate = Gate(capacity=SLOTS, reserved=RESERVED, bound=1000)
    try:
        alone = [await ttft(gate, engine, f"alone-{i}", "priority", 3) for i in range(6)]
        flood = [asyncio.create_task(ttft(gate, engine, f"flex-{i}", "flex", 20)) for i in range(300)]
        await asyncio.sleep(5 * STEP_S)
        assert gate.queue.running == SLOTS - RESERVED and gate.queue.waiting > 200
        crowd: list[float] = []
        for i in range(6):
            # As many at once as priority has slots of its own.
            pair = (ttft(gate, engine, f"p-{i}-{j}", "priority", 3) for j in range(RESERVED))
            crowd += await asyncio.gather(*pair)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        late = statistics.median(crowd) - statistics.median(alone)
        print(
            f"\nfirst token alone {statistics.median(alone) * 1e3:.0f} ms, "
            f"in the flood {[round(x * 1e3) for x in crowd]} ms, a step {STEP_S * 1e3:.0f} ms",
            end="",
        )
        assert late < STEP_S + JITTER_S
        assert gate.queue.running == 0 and gate.queue.waiting == 0
        assert engine.stats().running == 0
    finally:
        await engine.close()


async def test_beyond_its_own_slots_priority_is_still_first() -> None:
    """With every slot taken, the next slot that any flex request leaves goes to priority, whoever came before."""
    gate = Gate(capacity=2, reserved=1, bound=100)
    order: list[str] = []
    release = asyncio.Event()

    async def hold(id: str, tier: Tier) -> None:
        async with gate.slot(id, tier, 10.0):
            order.append(id)
            await release.wait()

    tasks = [asyncio.create_task(hold(f"f{i}", "flex")) for i in range(3)]
    tasks += [asyncio.create_task(hold(f"p{i}", "priority")) for i in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["f0", "p0"]
    release.set()
    await asyncio.gather(*tasks)
    assert order[2] == "p1"
