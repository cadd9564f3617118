"""What is promised, against a queue that is really played out."""

from __future__ import annotations

import heapq
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.admission.queue import SlotQueue, Ticket
from service.admission.rate import MOST_RETRY_S, Held, ServiceRate
from service.types import Tier


def truth(ahead: int, slots: int, left: list[float], held: float) -> float:
    """Play it out: `left` seconds of those that run, then everybody ahead for `held`."""
    ends = [0.0] * max(0, slots - len(left)) + sorted(left)
    heapq.heapify(ends)
    for _ in range(max(0, len(left) - slots)):
        heapq.heappop(ends)
    for _ in range(ahead):
        heapq.heappush(ends, heapq.heappop(ends) + held)
    return ends[0]


@given(
    st.integers(0, 200),
    st.integers(1, 32),
    st.lists(st.floats(0, 20), max_size=32),
    st.floats(0.1, 20),
)
@settings(max_examples=200, deadline=None)
def test_exact_where_all_requests_are_alike(ahead: int, slots: int, ages: list[float], held: float) -> None:
    ages = [min(age, held) for age in ages[:slots]]
    rate = ServiceRate()
    rate.finished(held, 0.0)
    assert abs(
        rate.wait_s(ahead, slots, [Held(age) for age in ages]) - truth(ahead, slots, [held - a for a in ages], held)
    ) < 1e-6 * (1 + ahead)


def test_median_error_with_lengths_at_random() -> None:
    """Lengths that vary by a factor of four either way: half of the promises are within a third."""
    rng = random.Random(7)
    rate, now = ServiceRate(), 0.0
    for _ in range(100):
        now += 1.0
        rate.finished(rng.uniform(2, 8), now)
    errors = []
    for _ in range(300):
        ahead = rng.randrange(8, 40)
        running = [(rng.uniform(2, 8)) for _ in range(8)]
        ages = [length * rng.random() for length in running]
        left = [length - age for length, age in zip(running, ages, strict=True)]
        ends = sorted(left)
        heapq.heapify(ends)
        for _ in range(ahead):
            heapq.heappush(ends, heapq.heappop(ends) + rng.uniform(2, 8))
        errors.append(abs(rate.wait_s(ahead, 8, [Held(age) for age in ages]) - ends[0]) / ends[0])
    assert statistics.median(errors) < 0.33


def test_follows_a_change_of_load() -> None:
    rate = ServiceRate()
    for second in range(100):
        rate.finished(1.0, float(second))
    for second in range(100, 160):
        rate.finished(5.0, float(second))
    assert 4.5 < rate.held_s < 5.0
    assert ServiceRate().held_s == 0.0


def test_limits() -> None:
    rate = ServiceRate()
    assert rate.wait_s(3, 0, []) == MOST_RETRY_S
    assert rate.wait_s(0, 1, [Held(7.0)]) == 0.0, "one that has run for so long may end at any moment, for all we know"
    assert rate.wait_s(1, 1, [Held(7.0)]) == 7.0
    assert rate.retry_after_s(0, 1, [Held(0.0)]) == 1.0
    rate.finished(1e9, 0.0)
    assert rate.retry_after_s(5, 1, [Held(0.0)]) == MOST_RETRY_S


@pytest.mark.parametrize("reserved", [0, 3])
def test_a_mixed_trace_played_out_on_a_virtual_clock(reserved: int) -> None:
    """Answers of 16 to 2048 tokens, 20 ms each, in phases of short and long ones; some priority. What a default request
    is told when it comes, against when it gets its slot: median error below 25 %."""
    rng, slots = random.Random(11), 8
    queue, rate = SlotQueue(slots, reserved, 500), ServiceRate()
    now, ends, since, asked = 0.0, list[tuple[float, str]](), dict[str, float](), dict[str, int]()
    told: dict[str, tuple[float, float]] = {}
    errors: list[float] = []

    def enter(id: str) -> None:
        since[id] = now
        heapq.heappush(ends, (now + 0.2 + asked[id] * 0.02, id))
        if id in told:
            came, promised = told.pop(id)
            if now - came > 1.0:
                errors.append(abs(promised - (now - came)) / (now - came))

    coming = 0.0
    for number in range(1500):
        # A burst fills the queue, then it runs down: short requests, then long ones.
        burst, place = divmod(number, 50)
        coming = max(coming, ends[-1][0] if place == 0 and ends else 0.0) + (60.0 if place == 0 else 0.1)
        while ends and ends[0][0] <= coming:
            now, id = heapq.heappop(ends)
            rate.finished(now - since.pop(id), now, asked.pop(id))
            for ticket in queue.release(id):
                enter(ticket.id)
        now, id = coming, str(number)
        tier: Tier = "priority" if rng.random() < 0.1 else "default"
        asked[id] = rng.choice((16, 64, 256)) if burst % 2 else rng.choice((64, 512, 2048))
        if not queue.fits(tier) and tier == "default" and burst > 2:
            held = {one: Held(now - since[one], asked[one]) for one in queue.running_ids}
            open_to, tokens = queue.open_to(tier), queue.tokens_ahead(tier)
            awaited = queue.ends_awaited(tier, held)
            told[id] = (now, rate.wait_s(queue.waiting_ahead(tier), open_to, awaited, tokens))
        if queue.offer(Ticket(id, tier, now + 1e6, now, asked[id])) == "in":
            enter(id)
    assert len(errors) > 300
    assert statistics.median(errors) < 0.25, statistics.median(errors)
