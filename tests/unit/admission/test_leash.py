"""Ending a wait from outside, without touching anything else: other cancels, slow readers, the next wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.leash import Leash, Lost
from service.types import Delta


async def never() -> AsyncIterator[Delta]:
    yield Delta("1")
    await asyncio.sleep(3600)


async def test_a_wait_ends_when_the_leash_is_pulled() -> None:
    leash, chunks = Leash(), never()
    assert (await leash.next(chunks)).text == "1"
    assert leash.waiting_s == 0.0
    asyncio.get_running_loop().call_later(0.02, leash.pull)
    with pytest.raises(Lost):
        await asyncio.wait_for(leash.next(chunks), 5)
    assert asyncio.current_task() is not None and not asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def test_a_pull_without_a_wait_does_nothing() -> None:
    leash, chunks = Leash(), never()
    leash.pull()
    assert (await leash.next(chunks)).text == "1"


async def test_another_cancel_stays_a_cancel() -> None:
    leash = Leash()

    async def follow() -> None:
        chunks = never()
        await leash.next(chunks)
        await leash.next(chunks)

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.01)
    assert leash.waiting_s > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = asyncio.create_task(follow())
    await asyncio.sleep(0.01)
    leash.pull()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_end_is_still_the_end() -> None:
    async def one() -> AsyncIterator[Delta]:
        yield Delta("1")

    leash, chunks = Leash(), one()
    await leash.next(chunks)
    with pytest.raises(StopAsyncIteration):
        await leash.next(chunks)
