"""The fleet as one ingress knows it: the latest posts, and what follows from them. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from service.admission.share import Claim, divide
from service.fleet.post import Demand, Post
from service.types import ModelCard, PoolName

QUIET_S = 10.0
"""How long a replica that is missing from the board counts as there while the connection to it works: a board that was
restarted is empty at first, and nothing that runs may depend on it."""


@dataclass(frozen=True, slots=True)
class View:
    """`posts` by id. `missing`: since when a replica that is kept has not been on the board."""

    posts: Mapping[str, Post] = field(default_factory=dict)
    missing: Mapping[str, float] = field(default_factory=dict)

    def updated(self, posts: Iterable[Post], linked: Collection[str], now: float) -> View:
        """The next view: what is on the board, and replicas that are not but are `linked`, for a while."""
        fresh = {post.id: post for post in posts}
        missing: dict[str, float] = {}
        for id, post in self.posts.items():
            if id not in fresh and post.role == "replica" and id in linked:
                since = self.missing.get(id, now)
                if now - since < QUIET_S:
                    fresh[id], missing[id] = post, since
        return View(fresh, missing)

    def replicas(self, pool: PoolName) -> list[Post]:
        return [post for post in self.posts.values() if post.role == "replica" and post.pool == pool]

    def ready(self, pool: PoolName) -> list[Post]:
        return [post for post in self.replicas(pool) if post.ready]

    @property
    def ingresses(self) -> dict[str, Post]:
        return {id: post for id, post in self.posts.items() if post.role == "ingress"}

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        """Where replicas take connections."""
        return {id: post.address for id, post in self.posts.items() if post.role == "replica" and post.address}

    @property
    def cards(self) -> list[ModelCard]:
        """What can be asked for, by name."""
        return list({post.card.name: post.card for post in self.posts.values() if post.card}.values())

    def slots(self, pool: PoolName) -> int:
        return sum(post.stats.slots for post in self.ready(pool) if post.stats)


@dataclass(frozen=True, slots=True)
class Part:
    """What one ingress may admit to a pool. `reserved` of `slots` are for priority alone."""

    slots: int
    reserved: int


class Shares:
    """One ingress's part of each pool's slots, reading after reading.

    Less is taken at once; more only when the reading before said so too, for the ingress that gives it up may not know
    yet. A pool that comes up is taken at once; so is the last that is left of one that shrinks.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._before: dict[PoolName, int] = {}

    def part(self, pool: PoolName, view: View, running: int, waiting: int, held: int, reserved: int) -> Part:
        """`running`, `waiting`: requests of this ingress; `held`: slots it has now; `reserved`: of each replica."""
        slots = view.slots(pool)
        claims = {self._own: Claim(running, waiting)}
        for id, post in view.ingresses.items():
            if id != self._own:
                demand = post.demand.get(pool, Demand())
                claims[id] = Claim(demand.running, demand.waiting)
        mine = divide(slots, claims)[self._own]
        before, self._before[pool] = self._before.get(pool, mine), mine
        part = mine if held == 0 else min(mine, max(before, 1))
        return Part(part, -(-reserved * len(view.ready(pool)) * part // max(1, slots)))
