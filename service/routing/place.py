"""Which replica of its pool a request goes to. A pure function of what the ingress knows."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass


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


def place(
    candidates: Iterable[Candidate],
    avoid: Collection[str] = (),
    *,
    alone: bool = False,
    turn: int = 0,
    session: str = "",
) -> str | None:
    """The session's home if that has a free slot, else the one with the most free slots; None where there is none.

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
        if at_home.id not in avoid and at_home.mine + at_home.others < at_home.slots:
            return at_home.id
    return min(open_, key=lambda c: (c.id in avoid, c.mine + c.others - c.slots, c.mine)).id


def _draw(session: str, id: str) -> bytes:
    """Rendezvous hashing: every ingress draws alike, and a lost or new replica moves only its share of the sessions."""
    return hashlib.blake2b(f"{session}\0{id}".encode(), digest_size=8).digest()
