"""Both ends over a real socket: answers, errors, cancels, deaths, strangers, readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from service.errors import BadRequest, EngineFailed, ReplicaLost
from service.link import ingress as ingress_module
from service.link.ingress import Link, Links
from service.link.replica import UNPROVED, ReplicaLink
from service.types import Delta, EngineRequest

SECRET = b"s" * 32
MOST = 1 << 20


class Engine:
    """Says `body` word by word; waits where it says `wait`; fails where it says `fail`."""

    def __init__(self) -> None:
        self.running = 0
        self.gates = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        self.running += 1
        try:
            for word in request.body.decode().split():
                if word == "wait":
                    await self.gates.wait()
                elif word == "fail":
                    raise BadRequest("no such word", param="prompt")
                elif word == "break":
                    raise ZeroDivisionError
                elif word == "much":
                    for _ in range(100):
                        yield Delta("x" * 100_000, output_tokens=1)
                        await asyncio.sleep(0)
                else:
                    yield Delta(word, output_tokens=1)
        finally:
            self.running -= 1

    async def call(self, body: bytes) -> bytes:
        return body[::-1]


@contextlib.asynccontextmanager
async def pair() -> AsyncGenerator[tuple[Engine, ReplicaLink, Links]]:
    engine = Engine()
    replica = ReplicaLink(SECRET, engine.generate, {"reverse": engine.call}, MOST)
    links = Links(SECRET, MOST)
    links.follow({"r1": await replica.listen("127.0.0.1")})
    try:
        async with asyncio.timeout(20):
            while links.get("r1") is None:
                await asyncio.sleep(0.01)
            yield engine, replica, links
    finally:
        links.close()
        await replica.close()


def linked(links: Links) -> Link:
    link = links.get("r1")
    assert link is not None
    return link


def request(body: str) -> EngineRequest:
    return EngineRequest("id", "completions", body.encode())


async def words(link: Link, body: str) -> list[str]:
    return [delta.text async for delta in link.generate(request(body))]


async def until(what: str, true: object) -> None:
    async with asyncio.timeout(10):
        while not true():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_many_answers_over_one_connection() -> None:
    async with pair() as (_, replica, links):
        link = linked(links)
        said = [f"a{i} b{i} c{i}" for i in range(200)]
        assert await asyncio.gather(*(words(link, text) for text in said)) == [text.split() for text in said]
        assert link.in_hand == 0 and replica.streams == 0


async def test_calls_and_errors_keep_their_facts() -> None:
    async with pair() as (_, _, links):
        link = linked(links)
        assert await link.call("reverse", b"abc") == b"cba"
        with pytest.raises(BadRequest, match="knows no call nothing"):
            await link.call("nothing", b"")
        heard = []
        with pytest.raises(BadRequest, match="no such word") as found:
            async for delta in link.generate(request("one fail two")):
                heard.append(delta.text)
        assert heard == ["one"] and found.value.param == "prompt"
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            await words(link, "break")


async def test_leaving_early_stops_the_engine() -> None:
    async with pair() as (engine, replica, links):
        async with contextlib.aclosing(linked(links).generate(request("one wait two"))) as deltas:
            assert (await anext(deltas)).text == "one"
            assert engine.running == 1
        await until("stopped", lambda: engine.running == 0 and replica.streams == 0)
        assert await words(linked(links), "still there") == ["still", "there"]


async def test_a_lost_replica_is_said_to_all_that_wait_with_their_number() -> None:
    async with pair() as (engine, replica, links):
        waiting = [asyncio.create_task(words(linked(links), "wait")) for _ in range(3)]
        await until("all run", lambda: engine.running == 3)
        await replica.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [ReplicaLost] * 3
        assert [end.in_hand for end in ends if isinstance(end, ReplicaLost)] == [3, 3, 3]
        assert links.get("r1") is None and links.linked == set()


async def test_what_came_before_the_loss_is_read_first() -> None:
    async with pair() as (engine, replica, links):
        deltas = linked(links).generate(request("one two wait"))
        heard = [(await anext(deltas)).text]
        await until("runs", lambda: engine.running == 1)
        await replica.close()
        with pytest.raises(ReplicaLost):
            async for delta in deltas:
                heard.append(delta.text)
        assert heard == ["one", "two"]


async def test_a_lost_ingress_stops_its_work_and_no_other() -> None:
    async with pair() as (engine, replica, links):
        other = Links(SECRET, MOST)
        other.follow({"r1": replica._server.sockets[0].getsockname()[:2]})
        await until("linked", lambda: other.get("r1") is not None)
        mine = asyncio.create_task(words(linked(links), "wait mine"))
        theirs = [asyncio.create_task(words(linked(other), "wait")) for _ in range(4)]
        await until("all run", lambda: engine.running == 5)
        other.close()
        await until("theirs stopped", lambda: engine.running == 1)
        engine.gates.set()
        assert await mine == ["mine"]
        await asyncio.gather(*theirs, return_exceptions=True)


async def test_a_stranger_gets_nothing_and_disturbs_nobody() -> None:
    async with pair() as (engine, replica, links):
        address = replica._server.sockets[0].getsockname()[:2]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200\r\n\r\n" + b"x" * 200)
        assert len(await reader.read()) <= 44, "a greeting, then the end"
        wrong = Links(b"w" * 32, MOST)
        wrong.follow({"r1": address})
        await asyncio.sleep(0.5)
        assert wrong.get("r1") is None
        wrong.close()
        assert await words(linked(links), "as before") == ["as", "before"]
        assert engine.running == 0


async def test_silent_strangers_are_bounded() -> None:
    async with pair() as (_, replica, _links):
        address = replica._server.sockets[0].getsockname()[:2]
        held = [await asyncio.open_connection(*address) for _ in range(UNPROVED + 8)]
        ends = await asyncio.gather(*(asyncio.wait_for(reader.read(), 15) for reader, _ in held))
        assert all(len(end) <= 44 for end in ends), "all are let go of, for none proved itself"
        assert len(replica._peers) == 1
        for _, writer in held:
            writer.close()


async def test_a_client_that_does_not_read_costs_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "STREAM_BYTES", 1_000_000)
    async with pair() as (engine, _, links):
        link = linked(links)
        deltas = link.generate(request("much"))
        await anext(deltas)
        await until("given up", lambda: link.in_hand == 0)
        await until("the engine stopped", lambda: engine.running == 0)
        with pytest.raises(EngineFailed, match="reads too slowly"):
            async for _ in deltas:
                pass
        assert await words(link, "others read on") == ["others", "read", "on"]


async def test_a_frame_too_large_ends_the_connection_which_is_made_again() -> None:
    async with pair() as (_, _, links):
        link = linked(links)
        with pytest.raises(ReplicaLost):
            await words(link, "x" * (MOST + 1))
        await until("again", lambda: links.get("r1") not in (None, link))
        assert await words(linked(links), "well") == ["well"]


async def test_work_goes_on_where_the_board_forgets_a_replica() -> None:
    async with pair() as (engine, _, links):
        asked = asyncio.create_task(words(linked(links), "wait done"))
        await until("runs", lambda: engine.running == 1)
        links.follow({})
        engine.gates.set()
        assert await asked == ["done"]
        links.follow({})
        assert links.get("r1") is None
