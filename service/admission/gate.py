"""The door of a pool: awaits a slot, keeps the books straight whatever happens to the request that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from service.admission.queue import SlotQueue, Ticket
from service.admission.rate import Held, ServiceRate
from service.errors import DeadlineExceeded, NotReady, Overloaded
from service.types import Tier


class Gate:
    """One pool's slots, for the tasks of one event loop."""

    def __init__(
        self,
        *,
        capacity: int,
        reserved: int,
        bound: int,
        share: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = SlotQueue(capacity, reserved, bound, share)
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._since: dict[str, float] = {}
        """When each running request got its slot."""
        self._asked: dict[str, int] = {}
        """Longest answer of each request that runs or waits, tokens."""
        self._clock = clock
        self._dismissed = False
        self.rate = ServiceRate()

    @property
    def queue(self) -> SlotQueue:
        return self._queue

    def resize(self, capacity: int, reserved: int | None = None) -> None:
        if (capacity, reserved) != (self._queue.capacity, self._queue.reserved):
            self._admit(self._queue.resize(capacity, reserved))

    def dismiss(self) -> None:
        """The process ends: whoever waits, or comes from now on, gets NotReady; those that run keep their slots."""
        self._dismissed = True
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(_ending())

    def expected_wait_s(self, tier: Tier) -> float:
        """What a request that came now would wait, seconds; 0 where a slot is free for it."""
        if self._queue.fits(tier):
            return 0.0
        ahead = self._queue.waiting_ahead(tier)
        # Where a reserved slot is free but not for this tier, the others must end first.
        slots, tokens = self._queue.open_to(tier), self._queue.tokens_ahead(tier)
        return max(0.001, self.rate.wait_s(ahead, slots, self._held(tier), tokens))

    def oldest_wait_s(self, tier: Tier) -> float:
        """How long the longest waiting request of `tier` has waited, seconds."""
        arrivals = [ticket.arrived for ticket in self._queue.tickets if ticket.tier == tier]
        return self._clock() - min(arrivals) if arrivals else 0.0

    @asynccontextmanager
    async def slot(self, id: str, tier: Tier, timeout_s: float, tokens: int = 0) -> AsyncIterator[float]:
        """Hold a slot; yields the seconds waited. Raises Overloaded (queue full), DeadlineExceeded, or
        NotReady (this process ends).

        Leaving the block, in whatever way, gives the slot to the next.
        """
        if self._dismissed:
            raise _ending()
        arrived = self._clock()
        ticket = Ticket(id, tier, arrived + timeout_s, arrived, tokens)
        answer = self._queue.offer(ticket)
        if answer == "full":
            ahead, slots = self._queue.waiting_ahead(tier), self._queue.open_to(tier)
            after = self.rate.retry_after_s(ahead, slots, self._held(tier), self._queue.tokens_ahead(tier))
            raise Overloaded(
                f"all {slots} slots open to {tier} requests are busy and {self._queue.waiting} requests wait; "
                f"try again in {after:.0f} s",
                retry_after_s=after,
            )
        self._asked[id] = tokens
        try:
            if answer == "waiting":
                await self._wait(ticket, timeout_s)
            started = self._since[id] = self._clock()
            try:
                yield started - arrived
            finally:
                now = self._clock()
                del self._since[id]
                self.rate.finished(now - started, now, tokens)
                self._admit(self._queue.release(id))
        finally:
            del self._asked[id]

    async def _wait(self, ticket: Ticket, timeout_s: float) -> None:
        waiter = self._waiters[ticket.id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            self._abandon(ticket, waiter)
            raise DeadlineExceeded(f"the request waited {timeout_s:.0f} s for a slot, its whole time limit") from None
        except (asyncio.CancelledError, NotReady):
            self._abandon(ticket, waiter)
            raise
        finally:
            self._waiters.pop(ticket.id, None)

    def _abandon(self, ticket: Ticket, waiter: asyncio.Future[None]) -> None:
        # The slot may have been given in the same instant: then it goes on to the next.
        granted = waiter.done() and not waiter.cancelled() and waiter.exception() is None
        self._admit(self._queue.release(ticket.id) if granted else self._queue.withdraw(ticket.id))

    def _admit(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            waiter = self._waiters.get(ticket.id)
            if waiter is None or waiter.done():
                # Its task was cancelled in this very turn of the loop and has not yet said so.
                self._admit(self._queue.release(ticket.id))
            else:
                waiter.set_result(None)

    def _held(self, tier: Tier) -> list[Held]:
        """Requests whose end makes room for `tier`."""
        now = self._clock()
        # One that was let in within this turn of the loop has its slot, though its task has not yet said so.
        held = {id: Held(now - self._since.get(id, now), self._asked.get(id, 0)) for id in self._queue.running_ids}
        return self._queue.ends_awaited(tier, held)


def _ending() -> NotReady:
    return NotReady("this front process is being stopped; ask again", retry_after_s=1.0)
