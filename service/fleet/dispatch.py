"""From an admitted request to its answer: choose a replica, ask it, ask another one where that is right."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable

from service.errors import DeadlineExceeded, EngineFailed, NotReady, ReplicaLost
from service.fleet.retry import CONDEMNED_S, Condemned, Suspected, Tries, fingerprint, kills_replica
from service.fleet.view import View
from service.link.ingress import Link, Links
from service.routing.place import Candidate, place
from service.types import Delta, EngineRequest, PoolName, Tier

PLACE_S = 10.0
"""Longest that an admitted request waits for a replica that can be reached: one that was lost is replaced meanwhile."""
POLL_S = 0.05

log = logging.getLogger("glm5.fleet")


class Dispatch:
    """Of one ingress. `retries`: times that a request is moved to another replica."""

    def __init__(self, own: str, links: Links, retries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._own, self._links, self._retries, self._clock = own, links, retries, clock
        self._view = View()
        self._turn = 0
        self._others: dict[str, int] = {}
        """What each replica runs for other ingresses, as of its last post."""
        self._suspects: dict[str, set[str]] = {}
        """Requests at each replica that were in hand at a death."""
        self.condemned, self._suspected = Condemned(), Suspected()

    def follow(self, view: View) -> None:
        """The fleet is this now."""
        self._view = view
        self._links.follow(view.addresses)
        ids = sorted({self._own, *view.ingresses})
        self._turn = ids.index(self._own)
        self._suspects = {id: found for id, found in self._suspects.items() if id in view.posts}
        self._others = {}
        for id, post in view.posts.items():
            link = self._links.get(id)
            if post.stats is not None and link is not None:
                self._others[id] = max(0, post.stats.running - link.in_hand)

    def reachable(self, pool: PoolName) -> list[Link]:
        """Connections to the replicas of a pool that take requests."""
        return [link for post in self._view.ready(pool) if (link := self._links.get(post.id)) is not None]

    async def answer(
        self, pool: PoolName, request: EngineRequest, tier: Tier, deadline: float, *, whole: bool, session: str = ""
    ) -> AsyncGenerator[Delta | None, None]:
        """The answer of whichever replica gives it. `None` says that what came so far is void and it begins anew: of a
        whole answer, nothing of which has been sent, at any time; of a stream never after its first delta.

        `deadline`: on the clock. Raises ServiceError.
        """
        deaths = self._suspected.deaths(request.endpoint, request.body, self._clock())
        tries, failed, alone = Tries(deaths), set[str](), False
        moves = 0
        while True:
            link = await self._place(pool, deadline, failed, alone, session)
            asked = EngineRequest(request.id, request.endpoint, request.body, tier, self._left(deadline))
            begun = False
            if tries.suspect:
                self._suspects.setdefault(link.replica, set()).add(request.id)
            try:
                async with contextlib.aclosing(link.generate(asked)) as deltas:
                    async for delta in deltas:
                        begun = True
                        yield delta
                return
            except ReplicaLost as lost:
                if begun and not whole:
                    if lost.in_hand:
                        self._cut(request, tries, link.replica)
                    raise EngineFailed("the replica was lost while it answered; the answer is incomplete") from lost
                if lost.in_hand:
                    alone = self._died(request, tries, link.replica)
            except NotReady:
                # It drains, or is reloaded: the next post says so too.
                if begun and not whole:
                    raise
            except EngineFailed:
                if (begun and not whole) or len(self.reachable(pool)) < 2:
                    raise
            finally:
                if not link.ended:
                    self._suspects.get(link.replica, set()).discard(request.id)
            failed.add(link.replica)
            moves += 1
            if moves > self._retries:
                raise NotReady("no replica could take the request", retry_after_s=2.0)
            if begun:
                yield None

    def _died(self, request: EngineRequest, tries: Tries, replica: str) -> bool:
        """Whether the request may be asked again beside no other suspect only. Raises KillsReplica."""
        verdict = tries.died(len(self._suspects.get(replica, ())))
        if verdict == "condemned":
            self.condemned.add(fingerprint(request.endpoint, request.body), self._clock())
            log.error("request %s is refused from now on: %d replicas died with it in hand", request.id, tries.deaths)
            raise kills_replica(CONDEMNED_S)
        return verdict == "alone"

    def _cut(self, request: EngineRequest, tries: Tries, replica: str) -> None:
        """A replica died after the first word of this stream: the next one like it is a suspect, or is refused."""
        print, now = fingerprint(request.endpoint, request.body), self._clock()
        if tries.suspect and len(self._suspects.get(replica, ())) <= 1:
            self.condemned.add(print, now)
            log.error("request %s is refused from now on: replicas died with it in hand", request.id)
        else:
            self._suspected.add(print, replica, now)

    async def call(self, pool: PoolName, method: str, body: bytes, timeout_s: float) -> bytes:
        """A call other than a generation, of any replica. Raises ServiceError."""
        deadline = self._clock() + timeout_s
        link = await self._place(pool, deadline, set(), alone=False)
        try:
            async with asyncio.timeout(timeout_s):
                return await link.call(method, body)
        except TimeoutError:
            raise DeadlineExceeded(f"{method} took longer than {timeout_s:.0f} s") from None
        except ReplicaLost as lost:
            raise EngineFailed(f"the replica was lost during {method}") from lost

    async def _place(self, pool: PoolName, deadline: float, failed: set[str], alone: bool, session: str = "") -> Link:
        began = self._clock()
        while True:
            link = self._pick(pool, failed, alone, session)
            if link is not None:
                return link
            self._left(deadline)
            if not alone and self._clock() - began > PLACE_S:
                raise NotReady("no replica can be reached", retry_after_s=2.0)
            await asyncio.sleep(POLL_S)

    def _pick(self, pool: PoolName, failed: set[str], alone: bool, session: str) -> Link | None:
        links = {link.replica: link for link in self.reachable(pool)}
        candidates = []
        for id, link in links.items():
            stats = self._view.posts[id].stats
            slots = stats.slots if stats is not None else 0
            suspects = len(self._suspects.get(id, ()))
            candidates.append(Candidate(id, slots, link.in_hand, self._others.get(id, 0), suspects))
        chosen = place(candidates, failed, alone=alone, turn=self._turn, session=session)
        return links[chosen] if chosen is not None else None

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded("the request's time limit ran out before its answer began")
        return left
