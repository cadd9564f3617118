"""Which replica of its pool a request goes to. A pure function of what the ingress knows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

CROWD = 1.25
"""A home takes so many times its share of what runs: consistent hashing with bounded loads (Mirrokni, Thorup,
Zadimoghaddam, 2018). Without it, callers whose conversations begin alike would fill one replica while others idle."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that can be reached. `mine`: requests that this ingress has there; `others`: what the replica said it
    runs beyond those."""

    id: str
    slots: int
    mine: int = 0
    others: int = 0
    suspects: int = 0
    """Of mine, those that were in hand when a replica died."""

    @property
    def load(self) -> int:
        return self.mine + self.others


def place(
    candidates: Iterable[Candidate],
    avoid: Collection[str] = (),
    *,
    alone: bool = False,
    turn: int = 0,
    session: str = "",
) -> str | None:
    """The session's home if that has a free slot and is not crowded, else the one with the most free slots; None where
    there is none.

    `avoid`: replicas that have failed this request, taken only where there is no other. `alone`: the request may not
    go where another suspect is. `turn`: of equals an ingress begins with another one than its siblings do, for they
    hear of each other's requests only later. `session`: what turns of one conversation have in common; empty: no home.
    """
    known = sorted(candidates, key=lambda c: c.id)
    turned = known[turn % len(known) :] + known[: turn % len(known)] if known else []
    open_ = [c for c in turned if not (alone and c.suspects)]
    if not open_:
        return None
    if session:
        at_home = max(open_, key=lambda c: (c.id not in avoid, _draw(session, c.id)))
        if at_home.id not in avoid and at_home.load < min(at_home.slots, _most(at_home, open_)):
            return at_home.id
    return min(open_, key=lambda c: (c.id in avoid, c.load - c.slots, c.mine)).id


def _most(home: Candidate, all_: list[Candidate]) -> int:
    """Requests that a home runs at most, the one to come among them."""
    share = home.slots / max(sum(c.slots for c in all_), 1)
    return math.ceil(CROWD * share * (sum(c.load for c in all_) + 1))


def _draw(session: str, id: str) -> bytes:
    """Rendezvous hashing: every ingress draws alike, and a lost or new replica moves only its share of the sessions."""
    return hashlib.blake2b(f"{session}\0{id}".encode(), digest_size=8).digest()
