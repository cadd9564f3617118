"""Awaiting the next chunk, but not for ever: whoever knows that none will come may end the wait from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from service.errors import EngineFailed
from service.types import Delta


class Lost(EngineFailed):
    """Nobody has the request any more; before its first byte it may be asked again."""


class Leash:
    """Of one request. `pull` makes a wait in progress raise Lost; where nobody waits it does nothing, for then a slow
    reader holds the answer up, not the engine."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._since = 0.0
        self._pulled = False

    @property
    def waiting_s(self) -> float:
        """How long the present wait has lasted; 0 where nobody waits."""
        return time.monotonic() - self._since if self._task is not None else 0.0

    def pull(self) -> None:
        if self._task is not None and not self._pulled:
            self._pulled = True
            self._task.cancel()

    async def next(self, chunks: AsyncIterator[Delta]) -> Delta:
        """As `anext(chunks)`. A cancel from elsewhere stays one."""
        self._task, self._since = asyncio.current_task(), time.monotonic()
        task = self._task
        try:
            return await anext(chunks)
        except asyncio.CancelledError:
            if self._pulled and task is not None and task.uncancel() == 0:
                raise Lost("the replica was lost while it held this request") from None
            raise
        finally:
            self._task = None
            self._pulled = False
