"""How true Retry-After is: the real gate in virtual time, against its own queue played out.

The truth of a promise: when a request that had been let into the full queue, at its end, would have got its slot.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import statistics
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from service.admission.gate import Gate
from service.admission.queue import SlotQueue, Ticket
from service.errors import Overloaded
from service.types import Tier

SLOTS, BOUND, REQUESTS = 8, 24, 4000
MEAN_S = 3.0
T = TypeVar("T")
NEVER_S = 1e6
"""Deadline of requests that are not to meet it."""


class Door:
    """A gate whose requests hold their slots for so long as they are told, on a clock that jumps from end to end."""

    def __init__(self, *, reserved: int = 0, slots: int = SLOTS, bound: int = BOUND) -> None:
        self.now = 0.0
        self.gate = Gate(capacity=slots, reserved=reserved, bound=bound, clock=lambda: self.now)
        self.order: list[str] = []
        """Who got a slot, in order."""
        self.grants: list[float] = []
        """When they got it."""
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask(self, id: str, tier: Tier, held_s: float, *, timeout_s: float = NEVER_S) -> float | None:
        """A request comes. None if it was let in or waits, else what it was promised, seconds."""
        task = asyncio.create_task(self._hold(id, tier, held_s, timeout_s))
        self._tasks.add(task)
        await self._settle()
        if not task.done():
            return None
        self._tasks.discard(task)
        refused = task.exception()
        assert isinstance(refused, Overloaded)
        return refused.retry_after_s

    async def _hold(self, id: str, tier: Tier, held_s: float, timeout_s: float) -> None:
        async with self.gate.slot(id, tier, timeout_s):
            self.order.append(id)
            self.grants.append(self.now)
            end = asyncio.get_running_loop().create_future()
            heapq.heappush(self._ends, (self.now + held_s, len(self.order), end))
            await end

    async def until(self, when: float) -> None:
        """Time goes on; every request that ends before has ended, and the next has its slot."""
        while self._ends and self._ends[0][0] <= when:
            self.now, _, end = heapq.heappop(self._ends)
            end.set_result(None)
            await self._settle()
        self.now = when

    async def _settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        done = {task for task in self._tasks if task.done()}
        self._tasks -= done
        for task in done:
            if isinstance(task.exception(), Overloaded):
                continue
            task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def at_the_door(scenario: Callable[[Door], Coroutine[Any, Any, T]], **settings: int) -> T:
    async def run() -> T:
        door = Door(**settings)
        try:
            return await scenario(door)
        finally:
            await door.close()

    return asyncio.run(run())


def played_out(
    reserved: int, running: list[tuple[Tier, float]], waiting: list[Tier], mine: Tier, held_s: float
) -> float:
    """Seconds until a request of `mine` that came last would have its slot: the queue itself, without any bound.

    `running`: tier and age of those that hold a slot; everybody holds one for `held_s`.
    """
    queue = SlotQueue(SLOTS, reserved, BOUND + 1)
    ends: list[tuple[float, str]] = []
    for at, (tier, age) in enumerate(running):
        assert queue.offer(Ticket(f"r{at}", tier, 0.0)) == "in"
        heapq.heappush(ends, (held_s - age, f"r{at}"))
    for at, tier in enumerate([*waiting, mine]):
        assert queue.offer(Ticket(f"w{at}", tier, NEVER_S)) == "waiting"
    while True:
        now, id = heapq.heappop(ends)
        for ticket in queue.release(id):
            if ticket.id == f"w{len(waiting)}":
                return now
            heapq.heappush(ends, (now + held_s, ticket.id))


@pytest.mark.parametrize(("reserved", "right"), [(0, 8.0), (2, 10.0), (4, 14.0), (6, 26.0)])
def test_reserved_slots_are_no_promise_to_others(reserved: int, right: float) -> None:
    """8 slots, all that are open to flex just taken, 24 flex requests wait, each holds its slot for 2 s."""
    held_s = 2.0

    async def scenario(door: Door) -> float | None:
        for at in range(SLOTS - reserved):
            assert await door.ask(f"first {at}", "flex", held_s) is None
        await door.until(held_s)  # the rate has been measured, and all slots are free
        for at in range(SLOTS - reserved + BOUND):
            assert await door.ask(str(at), "flex", held_s) is None
        return await door.ask("refused", "flex", held_s)

    promised = at_the_door(scenario, reserved=reserved)
    assert promised == pytest.approx(right)
    running: list[tuple[Tier, float]] = [("flex", 0.0)] * (SLOTS - reserved)
    assert played_out(reserved, running, ["flex"] * BOUND, "flex", held_s) == pytest.approx(right)


@pytest.mark.parametrize("reserved", [0, 2, 4, 6])
@pytest.mark.parametrize("priority", [1, 2, 5, 8])
@pytest.mark.parametrize("mine", ["flex", "default", "priority"])
def test_who_runs_in_the_reserve_ends_for_nobody_else(reserved: int, priority: int, mine: Tier) -> None:
    """So many slots are held by priority requests, in the reserve and beyond it; only flex waits, 24 of them."""
    held_s, step_s = 2.0, 0.125

    async def scenario(door: Door) -> tuple[float | None, list[tuple[Tier, float]]]:
        assert await door.ask("first", "flex", held_s) is None
        await door.until(held_s)
        begun: list[tuple[Tier, float]] = []
        free = min(SLOTS - priority, SLOTS - reserved)
        for tier, many in (("priority", priority), ("flex", free)):
            for at in range(many):
                assert await door.ask(f"{tier} {at}", tier, held_s) is None
                begun.append((tier, door.now))
                await door.until(door.now + step_s)
        for at in range(BOUND):
            assert await door.ask(str(at), "flex", held_s) is None
        assert (door.gate.queue.running, door.gate.queue.waiting) == (len(begun), BOUND)
        promised = (
            door.gate.expected_wait_s(mine) if door.gate.queue.fits(mine) else await door.ask("refused", mine, held_s)
        )
        return promised, [(tier, door.now - at) for tier, at in begun]

    promised, running = at_the_door(scenario, reserved=reserved)
    if mine == "priority" and len(running) < SLOTS:
        assert promised == 0.0
    else:
        right = played_out(reserved, running, ["flex"] * BOUND, mine, held_s)
        assert promised == pytest.approx(max(1.0, right))


def test_a_promise_follows_what_was_measured() -> None:
    """The same queue, after answers of 7 s and after answers of 2 s."""

    async def after(door: Door, held_s: float) -> float | None:
        assert await door.ask("before", "default", held_s) is None
        await door.until(held_s)
        assert door.gate.rate.held_s == pytest.approx(held_s)
        for at in range(3):
            assert await door.ask(str(at), "default", held_s) is None
        await door.until(door.now + 0.5)
        return await door.ask("refused", "default", held_s)

    for held_s in (7.0, 2.0):
        promised = at_the_door(lambda door, held_s=held_s: after(door, held_s), slots=1, bound=2)  # type: ignore[misc]
        assert promised == pytest.approx(3 * held_s - 0.5)


def test_the_nearest_deadline_is_served_first() -> None:
    async def scenario(door: Door) -> list[str]:
        for id, timeout_s in (("holder", 50.0), ("in 90 s", 90.0), ("in 60 s", 60.0), ("in 75 s", 75.0)):
            assert await door.ask(id, "default", 1.0, timeout_s=timeout_s) is None
            await door.until(door.now + 0.1)
        await door.until(10.0)
        return door.order

    assert at_the_door(scenario, slots=1) == ["holder", "in 60 s", "in 75 s", "in 90 s"]


def refusals(length: Callable[[random.Random], float], reserved: int) -> list[tuple[float, float]]:
    """(promised, true) seconds of every refusal at 1.5 times what the slots open to flex can serve."""

    async def scenario(door: Door) -> list[tuple[float, float]]:
        rng = random.Random(3)
        promised: list[tuple[float, float, int]] = []
        for number in range(REQUESTS):
            await door.until(door.now + rng.expovariate(1.5 * (SLOTS - reserved) / MEAN_S))
            place = len(door.grants) + door.gate.queue.waiting
            after = await door.ask(str(number), "flex", length(rng))
            if after is not None:
                promised.append((door.now, after, place))
        return [(after, door.grants[place] - at) for at, after, place in promised if place < len(door.grants)]

    return at_the_door(scenario, reserved=reserved)


@pytest.mark.parametrize("reserved", [0, 4])
@pytest.mark.parametrize(
    ("name", "length", "most"),
    [
        ("alike", lambda rng: MEAN_S, 0.02),
        ("uniform, 1 to 5 s", lambda rng: rng.uniform(1, 5), 0.15),
        ("exponential", lambda rng: rng.expovariate(1 / MEAN_S), 0.25),
        ("nine short, one long", lambda rng: 1.0 if rng.random() < 0.9 else 21.0, 0.5),
    ],
)
def test_median_error_of_retry_after(
    name: str, length: Callable[[random.Random], float], most: float, reserved: int
) -> None:
    found = refusals(length, reserved)
    errors = [abs(promise - truth) / truth for promise, truth in found if truth > 0]
    bias = statistics.median(promise / truth for promise, truth in found if truth > 0)
    print(
        f"\n{name}, {reserved} reserved: {len(found)} refusals, median error {statistics.median(errors):.1%}, "
        f"median of promised / true {bias:.2f}",
        end="",
    )
    assert len(found) > 500
    assert statistics.median(errors) < most
