"""How true Retry-After is: the real queue and rate under a load that saturates, in virtual time.

The truth of a promise: when a request that had been let into the full queue, at its end, would have got its slot.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable

import pytest

from service.admission.queue import SlotQueue, Ticket
from service.admission.rate import ServiceRate

SLOTS, BOUND, REQUESTS = 8, 24, 4000
MEAN_S = 3.0


def refusals(length: Callable[[random.Random], float], seed: int = 3) -> list[tuple[float, float]]:
    """(promised, true) seconds of every refusal at 1.5 times what the slots can serve."""
    rng = random.Random(seed)
    queue, rate = SlotQueue(SLOTS, 0, BOUND), ServiceRate()
    since: dict[str, float] = {}
    ends: list[tuple[float, str]] = []
    grants: list[float] = []
    promised: list[tuple[float, float, int]] = []
    now = 0.0

    def grant(ticket: Ticket, at: float) -> None:
        since[ticket.id] = at
        grants.append(at)
        heapq.heappush(ends, (at + length(rng), ticket.id))

    def until(when: float) -> None:
        while ends and ends[0][0] <= when:
            at, id = heapq.heappop(ends)
            rate.finished(at - since.pop(id), at)
            for ticket in queue.release(id):
                grant(ticket, at)

    for number in itertools.count():
        now += rng.expovariate(1.5 * SLOTS / MEAN_S)
        until(now)
        if number == REQUESTS:
            break
        ticket = Ticket(str(number), "default", now + 1000.0, now)
        answer = queue.offer(ticket)
        if answer == "in":
            grant(ticket, now)
        elif answer == "full":
            after = rate.retry_after_s(queue.waiting, SLOTS, [now - at for at in since.values()])
            promised.append((now, after, len(grants) + queue.waiting))
    return [(after, grants[place] - at) for at, after, place in promised if place < len(grants)]


@pytest.mark.parametrize(
    ("name", "length", "most"),
    [
        ("alike", lambda rng: MEAN_S, 0.02),
        ("uniform, 1 to 5 s", lambda rng: rng.uniform(1, 5), 0.15),
        ("exponential", lambda rng: rng.expovariate(1 / MEAN_S), 0.25),
        ("nine short, one long", lambda rng: 1.0 if rng.random() < 0.9 else 21.0, 0.5),
    ],
)
def test_median_error_of_retry_after(name: str, length: Callable[[random.Random], float], most: float) -> None:
    found = refusals(length)
    errors = [abs(promise - truth) / truth for promise, truth in found if truth > 0]
    bias = statistics.median(promise / truth for promise, truth in found if truth > 0)
    print(
        f"\n{name}: {len(found)} refusals, median error {statistics.median(errors):.1%}, "
        f"median of promised / true {bias:.2f}",
        end="",
    )
    assert len(found) > 500
    assert statistics.median(errors) < most
