"""The gate under a real event loop: whatever a request does and whenever it is cancelled, its slot comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.admission.gate import Gate
from service.errors import DeadlineExceeded, Overloaded
from service.types import TIERS, Tier


def empty(gate: Gate) -> bool:
    return gate.queue.running == 0 and gate.queue.waiting == 0 and not gate._waiters and not gate._since


async def hold(gate: Gate, id: str, tier: Tier, turns: int, timeout_s: float = 5.0) -> str:
    async with gate.slot(id, tier, timeout_s):
        assert gate.queue.running <= gate.queue.capacity
        for _ in range(turns):
            await asyncio.sleep(0)
    return id


async def turns_of(make: object) -> int:
    """Turns of the loop that a scenario takes when nobody is cancelled."""
    task = asyncio.ensure_future(make)  # type: ignore[call-overload]
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_cancel_at_every_turn_leaks_nothing(victim: int) -> None:
    """Three requests for one slot; one of them is cancelled after k turns of the loop, for every k there is."""
    for turn in range(40):
        gate = Gate(capacity=1, reserved=0, bound=10)
        tasks = [asyncio.create_task(hold(gate, str(i), "default", 4)) for i in range(3)]
        for _ in range(turn):
            await asyncio.sleep(0)
        was_done = tasks[victim].done()
        tasks[victim].cancel()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        for at, end in enumerate(ends):
            if at == victim and not was_done:
                assert isinstance(end, asyncio.CancelledError)
            else:
                assert end == str(at)
        assert empty(gate), turn


async def test_cancelled_in_the_turn_that_grants_the_slot() -> None:
    """The waiter's future is set and its task cancelled before it runs: the slot goes on to the next."""
    gate = Gate(capacity=1, reserved=0, bound=10)
    first, second = (asyncio.create_task(hold(gate, id, "default", 3)) for id in "ab")
    third = asyncio.create_task(hold(gate, "c", "default", 0))
    while not first.done():
        await asyncio.sleep(0)
    assert gate._waiters["b"].done(), "the slot was handed over in this turn"
    second.cancel()
    assert await asyncio.wait_for(third, 1) == "c"
    assert empty(gate)


async def test_the_deadline_frees_the_place_in_the_queue() -> None:
    gate = Gate(capacity=1, reserved=0, bound=1)
    async with gate.slot("holder", "default", 1.0):
        with pytest.raises(DeadlineExceeded):
            async with gate.slot("late", "default", 0.01):
                pass
        assert gate.queue.waiting == 0
    assert empty(gate)


async def test_full_says_when_to_come_back() -> None:
    now = [100.0]
    gate = Gate(capacity=1, reserved=0, bound=0, clock=lambda: now[0])
    async with gate.slot("before", "default", 50.0):
        now[0] += 9.0
    async with gate.slot("holder", "default", 50.0):
        now[0] += 2.0
        with pytest.raises(Overloaded, match=r"slots open to default .* try again in 7 s") as refused:
            async with gate.slot("more", "default", 50.0):
                pass
    assert refused.value.retry_after_s == pytest.approx(9.0 - 2.0)
    assert empty(gate)


async def test_those_that_wait_say_how_much_they_will_generate() -> None:
    gate = Gate(capacity=1, reserved=0, bound=5)

    async def generate(id: str, tokens: int) -> None:
        async with gate.slot(id, "flex", 50.0, tokens):
            pass

    async with gate.slot("holder", "flex", 50.0, 1000):
        tasks = [asyncio.create_task(generate(str(tokens), tokens)) for tokens in (700, 30)]
        await asyncio.sleep(0)
        assert [ticket.tokens for ticket in gate.queue.tickets] == [700, 30]
    await asyncio.gather(*tasks)
    assert empty(gate)


async def test_an_error_inside_gives_the_slot_back() -> None:
    gate = Gate(capacity=1, reserved=0, bound=0)
    with pytest.raises(RuntimeError):
        async with gate.slot("a", "default", 1.0):
            raise RuntimeError
    assert empty(gate)


async def test_growing_lets_the_waiting_in() -> None:
    gate = Gate(capacity=0, reserved=0, bound=5)
    tasks = [asyncio.create_task(hold(gate, str(i), "default", 50)) for i in range(3)]
    await asyncio.sleep(0)
    assert gate.queue.waiting == 3
    gate.resize(2, 0)
    await asyncio.sleep(0)
    assert (gate.queue.running, gate.queue.waiting) == (2, 1)
    await asyncio.gather(*tasks)
    assert empty(gate)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 2), st.integers(0, 12))
def test_chaos(seed: int, capacity: int, reserved: int, bound: int) -> None:
    """Sixty requests come, are cancelled, run into deadlines, fail and are resized around; then the books are empty."""

    async def scenario() -> None:
        rng = random.Random(seed)
        gate = Gate(capacity=capacity, reserved=reserved, bound=bound)

        async def one(id: str) -> None:
            with contextlib.suppress(Overloaded, DeadlineExceeded, KeyError):
                timeout_s = rng.choice([5.0, 5.0, 0.0, 0.001])
                async with gate.slot(id, rng.choice(TIERS), timeout_s):
                    for _ in range(rng.randrange(6)):
                        await asyncio.sleep(0)
                    if rng.random() < 0.1:
                        raise KeyError

        tasks = []
        for i in range(60):
            tasks.append(asyncio.create_task(one(str(i))))
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
            if rng.random() < 0.1:
                gate.resize(rng.randrange(1, 5), rng.randrange(3))
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert empty(gate)

    asyncio.run(scenario())


async def test_expected_wait_knows_who_may_have_a_slot() -> None:
    gate = Gate(capacity=3, reserved=1, bound=10)
    assert gate.expected_wait_s("flex") == 0.0
    async with gate.slot("a", "flex", 1.0), gate.slot("b", "flex", 1.0):
        assert gate.expected_wait_s("priority") == 0.0
        assert gate.expected_wait_s("flex") > 0.0, "the last slot is reserved"
    assert empty(gate)


async def test_oldest_wait() -> None:
    now = [100.0]
    gate = Gate(capacity=1, reserved=0, bound=5, clock=lambda: now[0])
    async with gate.slot("a", "priority", 50.0):
        waiting = asyncio.create_task(hold(gate, "b", "priority", 0, 50.0))
        await asyncio.sleep(0)
        now[0] = 103.0
        assert gate.oldest_wait_s("priority") == 3.0 and gate.oldest_wait_s("flex") == 0.0
    await waiting
    assert empty(gate)
