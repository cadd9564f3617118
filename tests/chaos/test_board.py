"""kill -9 of the board while nobody asks for anything: what idle processes had counted comes back, and once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.streams import body, client, settle, stream
from tests.service import Service, running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

BOARD = "ray::_Board"
WITHIN_S = 30.0


@pytest.fixture
def fresh_pair() -> Iterator[Service]:
    """Two replicas behind two ingresses, of which none has ever left: what departed ones counted dies with a board."""
    with running("deployments/profiles/sim-chaos.yaml") as service:
        yield service


def counted(service: Service) -> tuple[float, float]:
    """(tokens of all replicas, slots of all replicas); nothing where the board does not answer yet."""
    try:
        return service.metric("glm_output_tokens_total"), service.metric("glm_slots")
    except httpx.HTTPError:
        return 0.0, 0.0


async def test_a_new_board_learns_what_idle_replicas_had_counted(fresh_pair: Service) -> None:
    service = fresh_pair
    async with client(service.url) as http:
        seen = await asyncio.gather(*(stream(http, body(20)) for _ in range(8)))
    assert all(one.whole for one in seen)
    await asyncio.to_thread(settle, service, 10.0)
    before = await asyncio.to_thread(counted, service)
    assert before == (8 * 20, before[1]) and before[1] > 0
    (board,) = service.processes(BOARD)
    board.kill()
    board.wait(10)
    deadline = time.monotonic() + WITHIN_S
    while not service.processes(BOARD) or await asyncio.to_thread(counted, service) != before:
        now = await asyncio.to_thread(counted, service)
        assert time.monotonic() < deadline, f"{now} tokens and slots in /metrics, {before} before the board was killed"
        await asyncio.sleep(0.2)
