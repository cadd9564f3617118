"""The queue against a plain list that is sorted anew at every step: same order, same refusals, no slot lost or made."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.admission.queue import SLACK, SlotQueue, Ticket
from service.types import TIERS, Tier


@dataclass
class Plain:
    """What a queue should do, with no thought for speed."""

    capacity: int
    reserved: int
    bound: int
    running: dict[str, Tier] = field(default_factory=dict)
    waiting: list[tuple[int, float, int, Ticket]] = field(default_factory=list)
    count: int = 0

    def fits(self, tier: Tier) -> bool:
        others = sum(t != "priority" for t in self.running.values())
        open_to_others = max(1, self.capacity - self.reserved)
        return len(self.running) < self.capacity and (tier == "priority" or others < open_to_others)

    def offer(self, ticket: Ticket) -> str:
        rank = TIERS.index(ticket.tier)
        if self.fits(ticket.tier) and not any(entry[0] <= rank for entry in self.waiting):
            self.running[ticket.id] = ticket.tier
            return "in"
        if len(self.waiting) >= self.bound:
            return "full"
        self.count += 1
        self.waiting.append((rank, ticket.deadline, self.count, ticket))
        return "waiting"

    def fill(self) -> list[str]:
        entered = []
        while self.waiting:
            best = min(self.waiting)
            if not self.fits(best[3].tier):
                break
            self.waiting.remove(best)
            self.running[best[3].id] = best[3].tier
            entered.append(best[3].id)
        return entered


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue, self.plain, self.made = SlotQueue(2, 1, 4), Plain(2, 1, 4), 0

    @rule(tier=st.sampled_from(TIERS), deadline=st.integers(0, 5))
    def offer(self, tier: Tier, deadline: int) -> None:
        self.made += 1
        ticket = Ticket(str(self.made), tier, float(deadline))
        assert self.queue.offer(ticket) == self.plain.offer(ticket)

    @precondition(lambda self: self.plain.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.plain.running)))
        del self.plain.running[id]
        assert [t.id for t in self.queue.release(id)] == self.plain.fill()
        assert self.queue.release(id) == [], "idempotent"

    @precondition(lambda self: self.plain.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.plain.waiting))
        self.plain.waiting.remove(entry)
        assert [t.id for t in self.queue.withdraw(entry[3].id)] == self.plain.fill()

    @rule(capacity=st.integers(0, 6), reserved=st.integers(0, 3))
    def resize(self, capacity: int, reserved: int) -> None:
        self.plain.capacity, self.plain.reserved = capacity, reserved
        assert [t.id for t in self.queue.resize(capacity, reserved)] == self.plain.fill()

    @invariant()
    def same_books(self) -> None:
        assert set(self.queue.running_ids) == set(self.plain.running)
        assert self.queue.waiting == len(self.plain.waiting) <= 4
        for tier in TIERS:
            ahead = sum(entry[0] <= TIERS.index(tier) for entry in self.plain.waiting)
            assert self.queue.waiting_ahead(tier) == ahead
            assert self.queue.fits(tier) == (self.plain.fits(tier) and not ahead)

    @invariant()
    def nobody_waits_beside_a_free_slot(self) -> None:
        if self.plain.waiting:
            assert not self.plain.fits(min(self.plain.waiting)[3].tier)


TestQueueIsTheList = Machine.TestCase
TestQueueIsTheList.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_order_is_tier_then_deadline_then_arrival() -> None:
    queue = SlotQueue(1, 0, 10)
    assert queue.offer(Ticket("holder", "flex", 0.0)) == "in"
    for id, tier, deadline in (
        ("flex", "flex", 1.0),
        ("late", "priority", 9.0),
        ("default", "default", 1.0),
        ("early", "priority", 2.0),
        ("early, second", "priority", 2.0),
    ):
        assert queue.offer(Ticket(id, tier, deadline)) == "waiting"  # type: ignore[arg-type]
    order, holder = [], "holder"
    while entered := queue.release(holder):
        holder = entered[0].id
        order.append(holder)
    assert order == ["early", "early, second", "late", "default", "flex"]


def test_reserved_slots_are_for_priority() -> None:
    queue = SlotQueue(4, 2, 10)
    assert [queue.offer(Ticket(f"f{i}", "flex", 1.0)) for i in range(3)] == ["in", "in", "waiting"]
    assert [queue.offer(Ticket(f"p{i}", "priority", 1.0)) for i in range(3)] == ["in", "in", "waiting"]
    # A flex slot that ends goes to the priority request that waits, not to the flex one before it.
    assert [t.id for t in queue.release("f0")] == ["p2"]
    # Now two of three priority requests sit in the reserved slots, so the second open one is free for flex again.
    assert [t.id for t in queue.release("p0")] == ["f2"]


@given(st.integers(0, 400))
@settings(max_examples=20, deadline=None)
def test_abandoned_tickets_do_not_pile_up(flood: int) -> None:
    """A thousand flex requests that give up behind a priority one that stays: memory is bounded by who still waits."""
    queue = SlotQueue(1, 0, 10)
    queue.offer(Ticket("holder", "priority", 0.0))
    queue.offer(Ticket("first", "priority", 0.0))
    for i in range(flood):
        queue.offer(Ticket(str(i), "flex", float(i)))
        queue.withdraw(str(i))
        assert len(queue._heaps["flex"]) <= 2 * queue.waiting + SLACK + 1


@pytest.mark.parametrize("reserved", [0, 2])
def test_a_flood_of_default_requests_leaves_flex_its_share(reserved: int) -> None:
    """Slots' time on a virtual clock; a slot is held for as long as its request asks for."""
    rng, queue = random.Random(3), SlotQueue(8, reserved, 400, share=0.05)
    now, made, ends = 0.0, 0, list[tuple[float, str, Tier]]()
    held: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)

    def enter(ticket: Ticket) -> None:
        held[ticket.tier] += ticket.tokens
        heapq.heappush(ends, (now + ticket.tokens, ticket.id, ticket.tier))

    def flood() -> None:
        nonlocal made
        tier: Tier
        for tier in ("default", "flex"):
            answer = "waiting"
            while answer != "full" and queue.waiting < 400:
                made += 1
                ticket = Ticket(str(made), tier, now + 60, now, rng.choice((16, 64, 256)))
                answer = queue.offer(ticket)
                if answer == "in":
                    enter(ticket)

    flood()
    for _ in range(5000):
        now, id, _ = heapq.heappop(ends)
        for ticket in queue.release(id):
            enter(ticket)
        flood()
    assert 0.045 < held["flex"] / sum(held.values()) < 0.055
    assert sum(tier != "priority" for _, _, tier in ends) <= 8 - reserved, "the reserve stays priority's"
