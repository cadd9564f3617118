"""What becomes of a request whose replica died, or whose engine failed. Pure; time is passed in.

A request that is in hand when a replica dies may be the reason. It is asked again once. If that replica dies too it is
condemned where it was the only suspect there; where other suspects were in hand it is asked once more, with none of
them beside it, and condemned if that one dies as well. A condemned request's fingerprint is refused for a while, so
that a client who asks again and again does not take the fleet down.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from service.errors import KillsReplica

CONDEMNED_S = 600.0
MOST_CONDEMNED = 1000
DEATHS = 3
"""Replicas that a request may take with it at most."""

Verdict = Literal["again", "alone", "condemned"]


@dataclass(slots=True)
class Tries:
    """Of one request. `deaths`: replicas that died with it in hand."""

    deaths: int = 0

    @property
    def suspect(self) -> bool:
        return self.deaths > 0

    def died(self, suspects: int) -> Verdict:
        """A replica died with this request in hand. `suspects`: requests there, this one included, that had been in
        hand at a death before."""
        self.deaths += 1
        if self.deaths == 1:
            return "again"
        if self.deaths >= DEATHS or suspects <= 1:
            return "condemned"
        return "alone"


def fingerprint(endpoint: str, body: bytes) -> bytes:
    """Of what a request asks, whoever asks it."""
    return hashlib.sha256(endpoint.encode() + b"\0" + body).digest()


class Condemned:
    """Fingerprints of condemned requests; the oldest go first."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, print: bytes, now: float) -> None:
        self._until.pop(print, None)
        self._until[print] = now + CONDEMNED_S
        while len(self._until) > MOST_CONDEMNED:
            self._until.popitem(last=False)

    def check(self, endpoint: str, body: bytes, now: float) -> None:
        """Raises KillsReplica. Costs nothing while nothing is condemned."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if self._until:
            until = self._until.get(fingerprint(endpoint, body))
            if until is not None:
                raise kills_replica(until - now)


class Suspected:
    """Fingerprints of streams whose replica died after their first word, when they could not be asked again.

    Several alike that one replica took with it are a load or a probe, not a reason: they are not held to it.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, tuple[float, str, bool]] = OrderedDict()
        """Until when, which replica took it, whether it counts."""

    def add(self, print: bytes, replica: str, now: float) -> None:
        before = self._last.pop(print, None)
        alike = before is not None and before[1] == replica
        self._last[print] = (now + CONDEMNED_S, replica, not alike)
        while len(self._last) > MOST_CONDEMNED:
            self._last.popitem(last=False)

    def deaths(self, endpoint: str, body: bytes, now: float) -> int:
        """0 or 1. Costs nothing while nothing is suspected."""
        while self._last and next(iter(self._last.values()))[0] <= now:
            self._last.popitem(last=False)
        if not self._last:
            return 0
        _, _, counts = self._last.get(fingerprint(endpoint, body), (0.0, "", False))
        return int(counts)


def kills_replica(after_s: float) -> KillsReplica:
    return KillsReplica(
        "replicas died while they held this request; it is refused for a while, so that it takes no more of them down",
        retry_after_s=max(1.0, after_s),
    )
