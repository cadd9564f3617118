"""/tokenize and /detokenize: bytes and number at once, the key's limits, a deadline; work ends with its reader."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import Overloaded
from service.http import small
from service.http.small import Places
from tests.unit.http.conftest import serving
from tests.unit.http.echo import EchoBackend

ASK = {"prompt": "abc"}


@pytest.fixture
def held() -> EchoBackend:
    """Calls that wait until `may_tokenize` is set."""
    backend = EchoBackend()
    backend.may_tokenize.clear()
    return backend


async def test_only_so_many_at_once_and_so_many_waiting(held: EchoBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "QUEUE", 3)
    async with serving(held, tokenize_at_once=2) as served, httpx.AsyncClient(base_url=served.url) as client:
        calls = [asyncio.create_task(client.post("/tokenize", json=ASK)) for _ in range(5)]
        await served.settled(lambda: held.tokenizing == 2 and held.counting == 5)
        refused = await client.post("/detokenize", json={"tokens": [1]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        # Generations are not held up.
        chat = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        held.may_tokenize.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 5
    assert (held.tokenizing, held.counting) == (0, 0)


async def test_bytes_at_once_are_bounded(held: EchoBackend) -> None:
    large = {"prompt": "a" * 700}
    async with serving(held, tokenize_bytes=1024) as served, httpx.AsyncClient(base_url=served.url) as client:
        calls = [asyncio.create_task(client.post("/tokenize", json=large)) for _ in range(3)]
        await served.settled(lambda: held.counting == 3 and held.tokenizing == 1)
        assert (await client.get("/health")).status_code == 200  # the others had their turn
        assert held.tokenizing == 1
        held.may_tokenize.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 3
        # Larger than all places together: alone.
        assert (await client.post("/tokenize", json={"prompt": "a" * 3000})).json()["count"] == 3000


async def test_a_deadline_of_its_own_and_the_client_s(held: EchoBackend) -> None:
    async with serving(held, tokenize_timeout_s=0.2) as served, httpx.AsyncClient(base_url=served.url) as client:
        late = await client.post("/tokenize", json=ASK)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        await served.settled(lambda: held.tokenizing == held.counting == 0)
    async with serving(held) as served, httpx.AsyncClient(base_url=served.url) as client:
        late = await client.post("/tokenize", json=ASK, headers={"x-request-timeout": "0.2"})
        assert late.status_code == 504 and "0.2 s" in late.json()["error"]["message"]


async def test_work_ends_with_its_reader(held: EchoBackend) -> None:
    async with serving(held) as served, httpx.AsyncClient(base_url=served.url) as client:
        call = asyncio.create_task(client.post("/tokenize", json=ASK))
        await served.settled(lambda: held.tokenizing == 1)
        call.cancel()
        await served.settled(lambda: held.tokenizing == held.counting == 0)


async def test_a_call_counts_for_its_key(held: EchoBackend) -> None:
    held.concurrency = 1
    async with serving(held) as served, httpx.AsyncClient(base_url=served.url) as client:
        call = asyncio.create_task(client.post("/tokenize", json=ASK))
        await served.settled(lambda: held.tokenizing == 1)
        refused = await client.post("/tokenize", json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        held.may_tokenize.set()
        assert (await call).status_code == 200
        assert (await client.post("/tokenize", json=ASK)).status_code == 200


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.booleans()), max_size=12))
def test_places_never_hold_more_than_they_have(holders: list[tuple[int, int, bool]]) -> None:
    """Holders of (size, steps, whether one gives up): never too many or too much, all places free at the end."""

    async def play() -> None:
        places, inside = Places(3, 10), []

        async def holder(size: int, steps: int) -> None:
            async with places.hold(size):
                inside.append(min(size, 10))
                assert len(inside) <= 3 and sum(inside) <= 10
                try:
                    for _ in range(steps):
                        await asyncio.sleep(0)
                finally:
                    inside.remove(min(size, 10))

        tasks = []
        for size, steps, gives_up in holders:
            tasks.append(asyncio.create_task(holder(size, steps)))
            await asyncio.sleep(0)
            if gives_up:
                tasks[len(tasks) // 2].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        async with places.hold(10):
            assert not inside

    asyncio.run(play())


async def test_a_full_queue_says_when_to_come_back() -> None:
    places = Places(1, 1)
    async with places.hold(1):
        waiting = [asyncio.create_task(places.hold(1).__aenter__()) for _ in range(small.QUEUE)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await places.hold(1).__aenter__()
        assert refused.value.retry_after_s
        for task in waiting:
            task.cancel()
