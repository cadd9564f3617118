"""Calls beside the generations: /tokenize and /detokenize. They wait in no pool's queue, so they have bounds of their
own: bytes and number at once, and a deadline. Their work ends with their reader."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.requests import Request

from service.errors import DeadlineExceeded, Overloaded
from service.http.backend import Backend
from service.http.race import race
from service.http.settings import HttpSettings

QUEUE = 16
"""Calls that wait for a place; the next one gets 429."""


class Places:
    """`most` holders at once, of `size` altogether; first come, first served."""

    def __init__(self, most: int, size: int) -> None:
        self._free, self._size, self._room = most, size, size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """A place for something of `size`; what is larger than all places together has them alone. Raises
        Overloaded where too many wait."""
        size = min(size, self._size)
        await self._enter(size)
        try:
            yield
        finally:
            self._leave(size)

    async def _enter(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self._take(size)
            return
        if len(self._waiting) >= QUEUE:
            raise Overloaded("too many texts wait to be tokenized", retry_after_s=1.0)
        entry = (size, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()
            elif entry[1].done() and not entry[1].cancelled():
                self._leave(size)  # the place came in the same moment
            raise

    def _fits(self, size: int) -> bool:
        return self._free > 0 and size <= self._room

    def _take(self, size: int) -> None:
        self._free, self._room = self._free - 1, self._room - size

    def _leave(self, size: int) -> None:
        self._free, self._room = self._free + 1, self._room + size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, place = self._waiting.popleft()
            if not place.done():
                self._take(size)
                place.set_result(None)


class SmallCalls:
    def __init__(self, backend: Backend, settings: HttpSettings) -> None:
        self._backend, self._deadline_s = backend, settings.tokenize_timeout_s
        self._places = Places(settings.tokenize_at_once, settings.tokenize_bytes)

    async def run(
        self,
        request: Request,
        credential: str | None,
        size: int,
        work: Coroutine[Any, Any, bytes],
        deadline_s: float | None,
    ) -> bytes:
        """What `work`, over a body of `size` bytes, gives. It counts as one request of the caller's limits.

        Raises QuotaExceeded, Overloaded, DeadlineExceeded, and ClientDisconnect when the client has gone.
        """
        limit = min(self._deadline_s, deadline_s or self._deadline_s)
        with contextlib.closing(work), self._backend.counted(credential):
            try:
                async with asyncio.timeout(limit):
                    return await race(request.receive, self._placed(size, work))
            except TimeoutError:
                raise DeadlineExceeded(f"the request took longer than its {limit:g} s") from None

    async def _placed(self, size: int, work: Coroutine[Any, Any, bytes]) -> bytes:
        async with self._places.hold(size):
            return await work
