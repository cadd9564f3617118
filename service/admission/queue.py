"""Slots of one pool as one ingress sees them, and who waits for one. Pure bookkeeping: no clock, no tasks.

Order of waiting: tier first (priority, default, flex), then the earliest deadline, then arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from service.types import TIERS, Tier

Answer = Literal["in", "waiting", "full"]


@dataclass(frozen=True, slots=True, order=False)
class Ticket:
    """A request at the door. `deadline` is on the caller's clock, seconds."""

    id: str
    tier: Tier
    deadline: float


class SlotQueue:
    """`capacity` slots, of which the last `reserved` are for priority alone; at most `bound` tickets wait.

    Every method that can free or add a slot returns the tickets that it lets in, in order.
    """

    def __init__(self, capacity: int, reserved: int, bound: int) -> None:
        self._capacity, self._reserved, self._bound = capacity, reserved, bound
        self._running: dict[str, Tier] = {}
        self._waiting: list[tuple[int, float, int, Ticket]] = []
        self._present: dict[str, Tier] = {}
        self._arrivals = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._present)

    def waiting_ahead(self, tier: Tier) -> int:
        """Tickets that a new one of `tier` would find before it."""
        rank = TIERS.index(tier)
        return sum(1 for other in self._present.values() if TIERS.index(other) <= rank)

    def offer(self, ticket: Ticket) -> Answer:
        """A slot now, a place in the queue, or neither (then nothing is kept)."""
        if self._fits(ticket.tier) and not self.waiting_ahead(ticket.tier):
            self._running[ticket.id] = ticket.tier
            return "in"
        if len(self._present) >= self._bound:
            return "full"
        self._arrivals += 1
        self._present[ticket.id] = ticket.tier
        heapq.heappush(self._waiting, (TIERS.index(ticket.tier), ticket.deadline, self._arrivals, ticket))
        return "waiting"

    def release(self, id: str) -> list[Ticket]:
        """A request ended (or never began). Unknown ids are ignored: release is idempotent."""
        self._running.pop(id, None)
        return self._fill()

    def withdraw(self, id: str) -> list[Ticket]:
        """A waiting request gave up."""
        self._present.pop(id, None)
        return self._fill()

    def resize(self, capacity: int) -> list[Ticket]:
        """The pool grew or shrank. Running requests keep their slots; a shrunken pool drains into its new size."""
        self._capacity = capacity
        return self._fill()

    def reconcile(self, alive: Iterable[str]) -> list[Ticket]:
        """Keep only the running requests that are really alive; the rest of the books is a leak."""
        keep = set(alive)
        for id in [id for id in self._running if id not in keep]:
            del self._running[id]
        return self._fill()

    def _fits(self, tier: Tier) -> bool:
        if len(self._running) >= self._capacity:
            return False
        if tier == "priority":
            return True
        others = sum(1 for t in self._running.values() if t != "priority")
        # At least one slot is open to everybody, however small this ingress's share of a pool is.
        return others < max(1, self._capacity - self._reserved)

    def _fill(self) -> list[Ticket]:
        entered: list[Ticket] = []
        while self._waiting:
            ticket = self._waiting[0][3]
            if ticket.id not in self._present:
                heapq.heappop(self._waiting)
            elif self._fits(ticket.tier):
                heapq.heappop(self._waiting)
                del self._present[ticket.id]
                self._running[ticket.id] = ticket.tier
                entered.append(ticket)
            else:
                # The head is of the best tier that waits; if it does not fit, nobody behind it does.
                break
        return entered
