"""A request's way among real connections to small replicas that die, fail, drain and come back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from service.errors import BadRequest, DeadlineExceeded, EngineFailed, KillsReplica, NotReady
from service.fleet.dispatch import Dispatch
from service.fleet.post import Post
from service.fleet.view import View
from service.link.ingress import Links
from service.link.replica import ReplicaLink
from service.types import Delta, EngineRequest, EngineStats

SECRET = b"s" * 32
MOST = 1 << 20


class Replica:
    """Says its id, then `end`. `does`: what it does instead, at the first word or after it."""

    def __init__(self, id: str, does: str = "") -> None:
        self.id, self.does = id, does
        self.asked = 0
        self.link = ReplicaLink(SECRET, self.generate, {"echo": self.echo}, MOST)
        self.address = ("", 0)
        self.go = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        self.asked += 1
        if self.does == "refuse":
            raise BadRequest("wrong")
        if self.does == "drain":
            raise NotReady("draining")
        if self.does == "fail":
            raise EngineFailed("broken")
        if self.does == "wait":
            await self.go.wait()
        if self.does == "die" or b"poison" in request.body:
            await self.die()
        yield Delta(self.id, output_tokens=1)
        if self.does == "fail after":
            raise EngineFailed("broken")
        if self.does == "die after":
            await asyncio.sleep(0.05)
            await self.die()
        yield Delta("end", finish="stop")

    async def die(self) -> None:
        for peer in list(self.link._peers):
            peer._transport.abort()
        await asyncio.Event().wait()

    async def echo(self, body: bytes) -> bytes:
        return body


@contextlib.asynccontextmanager
async def fleet(*replicas: Replica, retries: int = 2) -> AsyncGenerator[Dispatch]:
    dispatch = Dispatch("ingress", Links(SECRET, MOST), retries)
    for replica in replicas:
        replica.address = await replica.link.listen("127.0.0.1")
    follow(dispatch, *replicas)
    try:
        async with asyncio.timeout(30):
            while len(dispatch.reachable("shared")) < len(replicas):
                await asyncio.sleep(0.01)
            yield dispatch
    finally:
        dispatch._links.close()
        for replica in replicas:
            await replica.link.close()


def follow(dispatch: Dispatch, *replicas: Replica) -> None:
    posts = [Post(r.id, "replica", "shared", ready=True, stats=EngineStats(8), address=r.address) for r in replicas]
    dispatch.follow(View().updated(posts, (), 0.0))


async def ask(
    dispatch: Dispatch, *, whole: bool, body: bytes = b"{}", within_s: float = 20.0, session: str = ""
) -> list[str]:
    """The texts that count, with `|` where an answer began anew."""
    heard: list[str] = []
    request = EngineRequest(f"id-{id(heard)}", "chat", body, timeout_s=within_s)
    deadline = time.monotonic() + within_s
    async for delta in dispatch.answer("shared", request, "default", deadline, whole=whole, session=session):
        heard.append("|" if delta is None else delta.text)
    return heard


@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer(whole: bool) -> None:
    async with fleet(Replica("a"), Replica("b")) as dispatch:
        assert await ask(dispatch, whole=whole) == ["a", "end"]


async def test_turns_of_a_session_go_to_one_replica_and_sessions_to_all() -> None:
    async with fleet(Replica("a"), Replica("b")) as dispatch:
        homes = {}
        for session in map(str, range(8)):
            homes[session] = [(await ask(dispatch, whole=False, session=session))[0] for _ in range(3)]
        assert all(len(set(turns)) == 1 for turns in homes.values()), homes
        assert {turns[0] for turns in homes.values()} == {"a", "b"}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("does", ["die", "fail", "drain"])
async def test_before_the_first_word_another_replica_is_asked(does: str, whole: bool) -> None:
    async with fleet(Replica("a", does), Replica("b")) as dispatch:
        assert await ask(dispatch, whole=whole) == ["b", "end"]


@pytest.mark.parametrize("does", ["die after", "fail after"])
async def test_a_whole_answer_begins_anew_and_a_stream_ends(does: str) -> None:
    async with fleet(Replica("a", does), Replica("b")) as dispatch:
        assert await ask(dispatch, whole=True) == ["a", "|", "b", "end"]
    async with fleet(Replica("a", does), Replica("b")) as dispatch:
        with pytest.raises(EngineFailed):
            await ask(dispatch, whole=False)


async def test_the_request_s_own_fault_is_nobody_else_s() -> None:
    a, b = Replica("a", "refuse"), Replica("b")
    async with fleet(a, b) as dispatch:
        with pytest.raises(BadRequest):
            await ask(dispatch, whole=True)
        assert b.asked == 0


async def test_an_engine_that_fails_alone_is_not_asked_again() -> None:
    a = Replica("a", "fail")
    async with fleet(a) as dispatch:
        with pytest.raises(EngineFailed, match="broken"):
            await ask(dispatch, whole=True)
        assert a.asked == 1


async def test_moves_are_bounded() -> None:
    replicas = [Replica(id, "drain") for id in "abcd"]
    async with fleet(*replicas, retries=2) as dispatch:
        with pytest.raises(NotReady):
            await ask(dispatch, whole=True)
        assert sum(replica.asked for replica in replicas) == 3


async def test_poison_takes_two_replicas_and_is_refused_from_then_on() -> None:
    replicas = [Replica(id) for id in "abcd"]
    async with fleet(*replicas, retries=5) as dispatch:
        with pytest.raises(KillsReplica):
            await ask(dispatch, whole=True, body=b"poison")
        assert sum(replica.asked for replica in replicas) == 2
        with pytest.raises(KillsReplica):
            dispatch.condemned.check("chat", b"poison", time.monotonic())
        assert (await ask(dispatch, whole=True))[-1] == "end"


async def test_who_was_beside_the_poison_gets_an_answer() -> None:
    """One innocent request is in hand wherever the poison kills; it is never condemned."""
    replicas = [Replica(id, "wait") for id in "abcdef"]
    async with fleet(*replicas, retries=5) as dispatch:
        poison = asyncio.create_task(ask(dispatch, whole=True, body=b"poison"))
        beside = [asyncio.create_task(ask(dispatch, whole=True)) for _ in range(11)]
        while sum(replica.asked for replica in replicas) < 12:
            await asyncio.sleep(0.01)
        for replica in replicas:
            replica.go.set()
        with pytest.raises(KillsReplica):
            await poison
        assert all(heard[-1] == "end" for heard in await asyncio.gather(*beside))


async def test_a_deadline_ends_the_wait_for_a_replica() -> None:
    async with fleet() as dispatch:
        with pytest.raises(DeadlineExceeded):
            await ask(dispatch, whole=True, within_s=0.2)


async def test_a_request_waits_for_the_replica_that_comes() -> None:
    late = Replica("late")
    async with fleet() as dispatch:
        asked = asyncio.create_task(ask(dispatch, whole=True))
        await asyncio.sleep(0.1)
        late.address = await late.link.listen("127.0.0.1")
        follow(dispatch, late)
        assert await asked == ["late", "end"]
        await late.link.close()


async def test_requests_spread_over_equal_replicas() -> None:
    replicas = [Replica(id, "wait") for id in "abcd"]
    async with fleet(*replicas) as dispatch:
        asked = [asyncio.create_task(ask(dispatch, whole=True)) for _ in range(20)]
        while sum(replica.asked for replica in replicas) < 20:
            await asyncio.sleep(0.01)
        assert [replica.asked for replica in replicas] == [5, 5, 5, 5]
        for replica in replicas:
            replica.go.set()
        await asyncio.gather(*asked)


async def test_small_calls() -> None:
    a = Replica("a")
    async with fleet(a) as dispatch:
        assert await dispatch.call("shared", "echo", b"abc", 5.0) == b"abc"
        with pytest.raises(BadRequest, match="knows no call"):
            await dispatch.call("shared", "nothing", b"", 5.0)


async def test_a_stream_that_kills_after_its_first_word_is_refused_after_the_second_death() -> None:
    async with fleet(*(Replica(id, "die after") for id in "abc")) as dispatch:
        for _ in range(2):
            dispatch.condemned.check("chat", b"worse", time.monotonic())
            with pytest.raises(EngineFailed, match="incomplete"):
                await ask(dispatch, whole=False, body=b"worse")
        with pytest.raises(KillsReplica):
            dispatch.condemned.check("chat", b"worse", time.monotonic())
        dispatch.condemned.check("chat", b"another", time.monotonic())


async def test_alike_streams_that_one_replica_took_with_it_are_no_suspects() -> None:
    async with fleet(Replica("a", "die after")) as dispatch:
        cut = await asyncio.gather(*(ask(dispatch, whole=False) for _ in range(4)), return_exceptions=True)
        assert all(isinstance(fault, EngineFailed) for fault in cut)
        assert dispatch._suspected.deaths("chat", b"{}", time.monotonic()) == 0
