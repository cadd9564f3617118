"""Work that ends with its reader: run against the client's disconnect and against guards, leaving nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def race(receive: Receive, work: Coroutine[Any, Any, T], *guards: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, or its error, or the error of the guard that raised first; ClientDisconnect when the client
    has gone (its request body must have been read). On return everything started here has ended and let go of what it
    held, cancelled if need be."""
    main = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(guard) for guard in (_gone(receive), *guards)]
    try:
        done, _ = await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
        if main in done:
            return main.result()
        for guard in others:
            if guard in done:
                guard.result()
        raise AssertionError("a guard ended without an error")
    finally:
        for task in (main, *others):
            task.cancel()
        await asyncio.gather(main, *others, return_exceptions=True)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure cancels the others and is raised as itself."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
