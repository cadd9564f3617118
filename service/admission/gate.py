"""The door of a pool: awaits a slot, keeps the books straight whatever happens to the request that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.admission.queue import SlotQueue, Ticket
from service.admission.rate import ServiceRate
from service.errors import DeadlineExceeded, Overloaded
from service.types import Tier


class Gate:
    """One pool's slots, for the tasks of one event loop."""

    def __init__(self, *, capacity: int, reserved: int, bound: int) -> None:
        self._queue = SlotQueue(capacity, reserved, bound)
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self.rate = ServiceRate()

    @property
    def queue(self) -> SlotQueue:
        return self._queue

    def resize(self, capacity: int) -> None:
        if capacity != self._queue.capacity:
            self._admit(self._queue.resize(capacity))

    def expected_wait_s(self, tier: Tier) -> float:
        """What a request that came now would wait, seconds; 0 where a slot is free."""
        if self._queue.running < self._queue.capacity and not self._queue.waiting:
            return 0.0
        return self.rate.wait_s(self._queue.waiting_ahead(tier), self._queue.capacity)

    @asynccontextmanager
    async def slot(self, id: str, tier: Tier, timeout_s: float) -> AsyncIterator[float]:
        """Hold a slot; yields the seconds waited. Raises Overloaded (queue full) or DeadlineExceeded."""
        arrived = time.monotonic()
        ticket = Ticket(id, tier, arrived + timeout_s)
        answer = self._queue.offer(ticket)
        if answer == "full":
            after = self.rate.retry_after_s(self._queue.waiting, self._queue.capacity)
            raise Overloaded(
                f"all {self._queue.capacity} slots are busy and {self._queue.waiting} requests wait; "
                f"try again in {after:.0f} s",
                retry_after_s=after,
            )
        if answer == "waiting":
            await self._wait(ticket, timeout_s)
        started = time.monotonic()
        try:
            yield started - arrived
        finally:
            now = time.monotonic()
            self.rate.finished(now - started, now)
            self._admit(self._queue.release(id))

    async def _wait(self, ticket: Ticket, timeout_s: float) -> None:
        waiter = self._waiters[ticket.id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            self._abandon(ticket, waiter)
            raise DeadlineExceeded(f"the request waited {timeout_s:.0f} s for a slot, its whole time limit") from None
        except asyncio.CancelledError:
            self._abandon(ticket, waiter)
            raise
        finally:
            self._waiters.pop(ticket.id, None)

    def _abandon(self, ticket: Ticket, waiter: asyncio.Future[None]) -> None:
        # The slot may have been given in the same instant: then it goes on to the next.
        granted = waiter.done() and not waiter.cancelled()
        self._admit(self._queue.release(ticket.id) if granted else self._queue.withdraw(ticket.id))

    def _admit(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            waiter = self._waiters.get(ticket.id)
            if waiter is None or waiter.done():
                self._admit(self._queue.release(ticket.id))
            else:
                waiter.set_result(None)
