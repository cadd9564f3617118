"""Slots of one pool as one ingress sees them, and who waits for one. Pure bookkeeping: no clock, no tasks.

Order of waiting: tier first (priority, default, flex; a lower tier has a small share), then the earliest deadline,
then arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from service.admission.rate import Held
from service.types import TIERS, Tier

Answer = Literal["in", "waiting", "full"]
RANK: Mapping[Tier, int] = {tier: rank for rank, tier in enumerate(TIERS)}
SLACK = 64
"""Entries of tickets that left, beyond as many as still wait, before the heap is built anew."""


@dataclass(frozen=True, slots=True, order=False)
class Ticket:
    """A request at the door. `arrived` and `deadline`: seconds on the caller's clock; `tokens`: its longest answer."""

    id: str
    tier: Tier
    deadline: float
    arrived: float = 0.0
    tokens: int = 0


class SlotQueue:
    """`capacity` slots, of which the last `reserved` are for priority alone; at most `bound` tickets wait. `share` of
    what those above it take, by tokens, is a waiting lower tier's; never of the reserve.

    Every method that can free or add a slot returns the tickets that it lets in, in order. An id is used once.
    """

    def __init__(self, capacity: int, reserved: int, bound: int, share: float = 0.0) -> None:
        self._capacity, self._reserved, self._bound = capacity, reserved, bound
        self._running: dict[str, Tier] = {}
        self._ordinary = 0
        """Running requests that are not priority."""
        self._share = share
        self._credit: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
        """Tokens that a tier may take out of turn: earned from those above it while it waits."""
        self._heaps: dict[Tier, list[tuple[float, int, Ticket]]] = {tier: [] for tier in TIERS}
        self._present: dict[str, Ticket] = {}
        self._count: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._tokens: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        """What those that wait ask for, by tier."""
        self._arrivals = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def reserved(self) -> int:
        return self._reserved

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def running_ids(self) -> Iterable[str]:
        return self._running.keys()

    @property
    def waiting(self) -> int:
        return len(self._present)

    @property
    def tickets(self) -> Iterable[Ticket]:
        """Those that wait, in order of arrival."""
        return self._present.values()

    def waiting_ahead(self, tier: Tier) -> int:
        """Tickets that a new one of `tier` with a late deadline would find before it."""
        return sum(self._count[other] for other in TIERS[: RANK[tier] + 1])

    def open_to(self, tier: Tier) -> int:
        """Slots that `tier` may take when nobody else runs. One is open to everybody, however small the share is."""
        return self._capacity if tier == "priority" else min(self._capacity, max(1, self._capacity - self._reserved))

    def tokens_ahead(self, tier: Tier) -> float:
        """What those that `waiting_ahead` counts ask for on average; 0 where there are none."""
        ranks = TIERS[: RANK[tier] + 1]
        return sum(self._tokens[other] for other in ranks) / max(1, self.waiting_ahead(tier))

    def ends_awaited(self, tier: Tier, running: Mapping[str, Held]) -> list[Held]:
        """Of `running` (by id) those whose ends make room among the slots open to `tier`.

        Priority requests within the reserve are no part of it: their slots do not come free for others. Of those beyond
        it, the oldest are expected to leave first.
        """
        if tier == "priority":
            return list(running.values())
        mine = [one for id, one in running.items() if self._running.get(id) == "priority"]
        priority = sorted(mine, key=lambda one: one.age_s, reverse=True)
        reserve = self._capacity - self.open_to(tier)
        ordinary = [one for id, one in running.items() if self._running.get(id) != "priority"]
        return ordinary + priority[: max(0, len(priority) - reserve)]

    def fits(self, tier: Tier) -> bool:
        """Whether a newcomer of `tier` would get a slot at once."""
        return self._fits(tier) and not self.waiting_ahead(tier)

    def offer(self, ticket: Ticket) -> Answer:
        """A slot now, a place in the queue, or neither (then nothing is kept)."""
        assert ticket.id not in self._running and ticket.id not in self._present, ticket.id
        if self.fits(ticket.tier):
            self._enter(ticket)
            return "in"
        if len(self._present) >= self._bound - self._kept_from(ticket.tier):
            return "full"
        self._arrivals += 1
        self._present[ticket.id] = ticket
        self._count[ticket.tier] += 1
        self._tokens[ticket.tier] += ticket.tokens
        heapq.heappush(self._heaps[ticket.tier], (ticket.deadline, self._arrivals, ticket))
        return "waiting"

    def release(self, id: str) -> list[Ticket]:
        """A request ended (or never began). Unknown ids are ignored: release is idempotent."""
        tier = self._running.pop(id, None)
        if tier is not None and tier != "priority":
            self._ordinary -= 1
        return self._fill()

    def withdraw(self, id: str) -> list[Ticket]:
        """A waiting request gave up."""
        ticket = self._leave(id)
        # What left stays in the heap until it surfaces; under a load that never lets it, that would be for ever.
        if ticket is not None:
            tier = ticket.tier
            if len(self._heaps[tier]) > 2 * self._count[tier] + SLACK:
                self._heaps[tier] = [entry for entry in self._heaps[tier] if entry[2].id in self._present]
                heapq.heapify(self._heaps[tier])
        return self._fill()

    def resize(self, capacity: int, reserved: int | None = None) -> list[Ticket]:
        """The pool grew or shrank. Running requests keep their slots; a shrunken pool drains into its new size."""
        self._capacity = capacity
        self._reserved = self._reserved if reserved is None else reserved
        return self._fill()

    def _fits(self, tier: Tier) -> bool:
        if len(self._running) >= self._capacity:
            return False
        return tier == "priority" or self._ordinary < self.open_to(tier)

    def _enter(self, ticket: Ticket) -> None:
        self._running[ticket.id] = ticket.tier
        self._ordinary += ticket.tier != "priority"

    def _leave(self, id: str) -> Ticket | None:
        ticket = self._present.pop(id, None)
        if ticket is not None:
            self._count[ticket.tier] -= 1
            self._tokens[ticket.tier] -= ticket.tokens
        return ticket

    def _kept_from(self, tier: Tier) -> int:
        """Places in the queue that default requests leave to flex ones; priority may take them all."""
        return max(0, int(self._share * self._bound) - self._count["flex"]) if tier == "default" else 0

    def _head(self, tier: Tier) -> Ticket | None:
        heap = self._heaps[tier]
        while heap and heap[0][2].id not in self._present:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _next(self) -> Ticket | None:
        """Who is let in now: a lower tier that has earned its turn, else the best tier that waits."""
        heads = [head for tier in TIERS if (head := self._head(tier)) is not None]
        due = [head for head in heads[1:] if self._credit[head.tier] >= max(1, head.tokens)]
        # If the best tier that waits does not fit, nobody behind it does.
        return next((head for head in (*reversed(due), *heads[:1]) if self._fits(head.tier)), None)

    def _settle(self, ticket: Ticket) -> None:
        """One was let in: those that wait below it earn their share of that; what it took out of turn is paid."""
        cost = float(max(1, ticket.tokens))
        above = any(self._count[tier] for tier in TIERS[: RANK[ticket.tier]])
        self._credit[ticket.tier] = self._credit[ticket.tier] - cost if above else 0.0
        within = ticket.tier == "priority" and len(self._running) - self._ordinary <= self._reserved
        for tier in TIERS[RANK[ticket.tier] + 1 :]:
            if not self._count[tier]:
                self._credit[tier] = 0.0
            elif not within:
                self._credit[tier] += cost * self._share / (1.0 - self._share)

    def _fill(self) -> list[Ticket]:
        entered: list[Ticket] = []
        while (ticket := self._next()) is not None:
            self._leave(ticket.id)
            self._enter(ticket)
            self._settle(ticket)
            entered.append(ticket)
        return entered
