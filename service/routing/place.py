"""Which replica of its pool a request goes to. A pure function of what the ingress knows."""

from __future__ import annotations

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
    candidates: Iterable[Candidate], avoid: Collection[str] = (), *, alone: bool = False, turn: int = 0
) -> str | None:
    """The one with the most free slots; None where there is none.

    `avoid`: replicas that have failed this request, taken only where there is no other. `alone`: the request may not
    go where another suspect is. `turn`: of equals an ingress begins with another one than its siblings do, for they
    hear of each other's requests only later.
    """
    known = sorted(candidates, key=lambda c: c.id)
    turned = known[turn % len(known) :] + known[: turn % len(known)] if known else []
    open_ = [c for c in turned if not (alone and c.suspects)]
    if not open_:
        return None
    return min(open_, key=lambda c: (c.id in avoid, c.mine + c.others - c.slots, c.mine)).id
