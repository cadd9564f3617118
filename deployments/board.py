"""One small actor where every process of the service pins what the others need to know: load phases, slots, counters.

A replica that is still loading cannot answer a call, and Serve hides which replica answers one: so replicas write and
ingresses read. What it keeps, and for how long, is in pins.py. If the board dies Ray restarts it empty: posts are full
again within one interval, and until `YOUNG_S` they are not believed; metrics of those that live within
service/metrics/news.py's `AGAIN_S`, while what departed processes had counted is lost.

Posts also carry what reconciliation needs (service/admission/reconcile.py): the ids that each process believes to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import orjson
import ray

from deployments.pins import Pins
from service.types import EngineStats, ModelCard, PoolName

NAME, NAMESPACE = "glm5-board", "glm5"
INTERVAL_S = 0.5
YOUNG_S = 2 * INTERVAL_S
LOADING_STALE_S = 120.0
"""A process that loads may be silent for long: llama.cpp's loader keeps Python's lock."""
CALL_TIMEOUT_S = 2.0

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

    `ids`: requests that a replica runs, or that an ingress holds a slot for. `beat` grows with every post of a process.
    `start_s`: what a replica took from its constructor to ready. `node`, `pid`: where it is.
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
    ids: tuple[str, ...] = ()
    beat: int = 0
    start_s: float | None = None
    demand: dict[PoolName, Demand] = field(default_factory=dict)
    node: str = ""
    pid: int = 0

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Post:
        tree = orjson.loads(data)
        card, stats = tree.pop("card"), tree.pop("stats")
        return Post(
            ids=tuple(tree.pop("ids")),
            demand={pool: Demand(**demand) for pool, demand in tree.pop("demand").items()},
            **tree,
            card=ModelCard(**card) if card else None,
            stats=EngineStats(**stats) if stats else None,
        )


def here() -> dict[str, Any]:
    """`node` and `pid` of this process."""
    return {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}


class _Board(Pins):
    """The actor's body. All methods are short; Ray runs them one after the other."""

    def __init__(self) -> None:
        super().__init__(ray.get_runtime_context().get_node_id())


class Board:
    """The board as one process sees it. Finds or makes the actor, and makes it again if it is lost."""

    def __init__(self) -> None:
        self._actor: Any = None

    def _handle(self) -> Any:
        if self._actor is None:
            self._actor = (
                ray.remote(_Board)
                .options(
                    name=NAME,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_restarts=-1,
                    max_task_retries=0,
                )
                .remote()
            )
        return self._actor

    def pin(self, id: str, post: Post | None, metrics: bytes | None = None, native: str | None = None) -> None:
        """Say something; never waits and never fails: the next interval says it again."""
        with self._forgiving():
            self._handle().pin.remote(id, None if post is None else post.encode(), metrics, native)

    def unpin(self, id: str) -> None:
        with self._forgiving():
            self._handle().unpin.remote(id)

    async def posts(self) -> list[Post] | None:
        """Everybody's latest word, or None where the board does not answer or is too young to know."""
        with self._forgiving():
            age, raw = await asyncio.wait_for(self._handle().posts.remote(), CALL_TIMEOUT_S)
            return [Post.decode(item) for item in raw] if age > YOUNG_S else None
        return None

    def posts_now(self, timeout_s: float = CALL_TIMEOUT_S) -> list[Post] | None:
        """`posts` for a caller without an event loop (the command line)."""
        with self._forgiving():
            _, raw = ray.get(self._handle().posts.remote(), timeout=timeout_s)
            return [Post.decode(item) for item in raw]
        return None

    async def metrics(self) -> tuple[list[bytes], dict[str, str]]:
        with self._forgiving():
            snapshots, native = await asyncio.wait_for(self._handle().metrics.remote(), CALL_TIMEOUT_S)
            return snapshots, native
        return [], {}

    @contextlib.contextmanager
    def _forgiving(self) -> Any:
        try:
            yield
        except (ray.exceptions.RayError, TimeoutError, ValueError):
            self._actor = None
