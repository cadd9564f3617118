"""How several ingresses divide the slots that they all admit to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one ingress has at a pool: requests that hold a slot, and requests that wait for one."""

    running: int = 0
    waiting: int = 0


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
