"""A replica whose own tasks have ended would serve on in silence: its health says so instead."""

from __future__ import annotations

import asyncio

import pytest

from deployments.replica import Replica


async def test_a_task_that_has_ended_is_a_fault_with_its_reason() -> None:
    async def broken() -> None:
        raise AttributeError("the engine has no such method")

    replica = object.__new__(Replica)
    replica._tasks = [asyncio.create_task(asyncio.sleep(60)), asyncio.create_task(broken())]
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="a task of the replica has ended") as found:
        await replica.check_health()
    assert isinstance(found.value.__cause__, AttributeError)
    replica._tasks[0].cancel()
