"""What the processes of the service tell each other about themselves: a status post each, on the board."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

import orjson

from service.types import EngineStats, ModelCard, PoolName

Role = Literal["replica", "ingress"]


@dataclass(frozen=True)
class Demand:
    """What one ingress has at a pool. `missed`: requests lately refused or sent elsewhere for want of it."""

    running: int = 0
    waiting: int = 0
    missed: int = 0
    priority_wait_s: float = 0.0
    queued_tokens: int = 0


@dataclass(frozen=True)
class Post:
    """What one process says about itself.

    `address`: (host, port) where a replica takes the connections of ingresses. `start_s`: what a replica took from its
    constructor to ready. `node`, `pid`: where it is.
    """

    id: str
    role: Role
    pool: PoolName | None = None
    phase: str = ""
    detail: str = ""
    fraction: float | None = None
    eta_s: float | None = None
    phase_s: float = 0.0
    ready: bool = False
    failure: str = ""
    card: ModelCard | None = None
    stats: EngineStats | None = None
    address: tuple[str, int] | None = None
    start_s: float | None = None
    demand: dict[PoolName, Demand] = field(default_factory=dict)
    node: str = ""
    pid: int = 0

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Post:
        tree = orjson.loads(data)
        card, stats, address = tree.pop("card"), tree.pop("stats"), tree.pop("address")
        return Post(
            demand={pool: Demand(**demand) for pool, demand in tree.pop("demand").items()},
            **tree,
            card=ModelCard(**card) if card else None,
            stats=EngineStats(**stats) if stats else None,
            address=(address[0], address[1]) if address else None,
        )
