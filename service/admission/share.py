"""How several ingresses divide the slots that they all admit to, and the limits of a key. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one ingress has at a pool: requests that hold a slot, and requests that wait for one."""

    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Which of `of` equal parts of every limit one process enforces, counted from 0."""

    index: int = 0
    of: int = 1

    @staticmethod
    def among(own: str, others: Iterable[str]) -> Part:
        """The place of `own` in the order of all ids: processes that know the same ids hold different parts."""
        ids = sorted({own, *others})
        return Part(ids.index(own), len(ids))

    def share(self, limit: int) -> int:
        """This process's share. All shares add up to `limit`; the first few processes have one more than the others."""
        return limit // self.of + (self.index < limit % self.of)

    def largest(self, limit: int) -> int:
        """The largest share that any of the processes has."""
        return -(-limit // self.of)


def divide(total: int, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Slots of each ingress. They add up to `total`; all compute the same from the same claims.

    First everybody keeps what runs; then those that wait get slots, one each in turn; what is left is dealt out evenly,
    for whoever gets the next request. So no slot stays empty at one ingress while requests wait at another. With more
    ingresses than slots each still gets one (an ingress without a slot would refuse everybody): then the sum is larger,
    and a request too many waits in its engine.
    """
    names = sorted(claims)
    if not total or not names:
        return dict.fromkeys(names, 0)
    shares = {name: claims[name].running for name in names}
    left = total - sum(shares.values())
    left = _deal(shares, {name: claims[name].waiting for name in names}, left)
    if left > 0:
        # Evenly in all, not evenly on top: one that runs much has much to give back soon.
        level = {name: max(0, -(-total // len(names)) - shares[name]) for name in names}
        left = _deal(shares, level, left)
        _deal(shares, dict.fromkeys(names, left), left)
    return {name: max(1, slots) for name, slots in shares.items()}


def _deal(shares: dict[str, int], most: dict[str, int], left: int) -> int:
    """Give `left` slots out evenly, to nobody more than its `most`; returns what nobody took."""
    open_ = [name for name in sorted(most) if most[name] > 0]
    while left > 0 and open_:
        each = max(1, min(left // len(open_), min(most[name] for name in open_)))
        for name in open_:
            given = min(each, left)
            shares[name] += given
            most[name] -= given
            left -= given
        open_ = [name for name in open_ if most[name] > 0]
    return left
