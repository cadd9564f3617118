"""What is promised, against a queue that is really played out."""

from __future__ import annotations

import heapq
import random
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from service.admission.rate import MOST_RETRY_S, ServiceRate


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
    assert abs(rate.wait_s(ahead, slots, ages) - truth(ahead, slots, [held - a for a in ages], held)) < 1e-6 * (
        1 + ahead
    )


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
        errors.append(abs(rate.wait_s(ahead, 8, ages) - ends[0]) / ends[0])
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
    assert rate.wait_s(0, 1, [7.0]) == 0.0, "one that has run for so long may end at any moment, for all we know"
    assert rate.wait_s(1, 1, [7.0]) == 7.0
    assert rate.retry_after_s(0, 1, [0.0]) == 1.0
    rate.finished(1e9, 0.0)
    assert rate.retry_after_s(5, 1, [0.0]) == MOST_RETRY_S
