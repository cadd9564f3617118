"""One small actor where every process of the service pins what the others need to know: load phases, slots, counters.

A replica that is still loading cannot answer a call, and Serve hides which replica answers one: so replicas write and
ingresses read. The board holds the latest word of each process only; one that has not spoken for `STALE_S` is gone.
If the board dies Ray restarts it empty, and it is full again within one interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import orjson
import ray

from service.metrics.exchange import fold
from service.types import EngineStats, ModelCard, PoolName

NAME, NAMESPACE = "glm5-board", "glm5"
INTERVAL_S = 0.5
STALE_S = 3.0
LOADING_STALE_S = 120.0
"""A process that loads may be silent for long: llama.cpp's loader keeps Python's lock."""
CALL_TIMEOUT_S = 2.0

Role = Literal["replica", "ingress"]


@dataclass(frozen=True)
class Post:
    """What one process says about itself."""

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

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Post:
        tree = orjson.loads(data)
        card, stats = tree.pop("card"), tree.pop("stats")
        return Post(**tree, card=ModelCard(**card) if card else None, stats=EngineStats(**stats) if stats else None)


@dataclass
class _Pinned:
    post: bytes = b""
    metrics: bytes = b""
    native: str = ""
    seen: float = field(default_factory=time.monotonic)


class _Board:
    """The actor's body. All methods are short; Ray runs them one after the other."""

    def __init__(self) -> None:
        self._pinned: dict[str, _Pinned] = {}
        self._departed: bytes = b""

    def pin(self, id: str, post: bytes | None, metrics: bytes | None, native: str | None = None) -> None:
        entry = self._pinned.setdefault(id, _Pinned())
        entry.seen = time.monotonic()
        if post is not None:
            entry.post = post
        if metrics is not None:
            entry.metrics = metrics
        if native is not None:
            entry.native = native

    def unpin(self, id: str) -> None:
        """A process leaves on purpose: what it counted stays in the totals."""
        entry = self._pinned.pop(id, None)
        if entry is not None and entry.metrics:
            self._departed = fold(self._departed, entry.metrics)

    def posts(self) -> list[bytes]:
        self._drop_stale()
        return [entry.post for entry in self._pinned.values() if entry.post]

    def metrics(self) -> tuple[list[bytes], dict[str, str]]:
        """Snapshots of all processes (departed ones folded into one) and each replica's native text."""
        self._drop_stale()
        snapshots = [entry.metrics for entry in self._pinned.values() if entry.metrics]
        native = {id: entry.native for id, entry in self._pinned.items() if entry.native}
        return [*([self._departed] if self._departed else []), *snapshots], native

    def _drop_stale(self) -> None:
        now = time.monotonic()
        for id, entry in tuple(self._pinned.items()):
            if now - entry.seen > (STALE_S if b'"ready":true' in entry.post else LOADING_STALE_S):
                self.unpin(id)


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
        """Everybody's latest word, or None where the board does not answer."""
        with self._forgiving():
            raw = await asyncio.wait_for(self._handle().posts.remote(), CALL_TIMEOUT_S)
            return [Post.decode(item) for item in raw]
        return None

    def posts_now(self, timeout_s: float = CALL_TIMEOUT_S) -> list[Post] | None:
        """`posts` for a caller without an event loop (the command line)."""
        with self._forgiving():
            return [Post.decode(item) for item in ray.get(self._handle().posts.remote(), timeout=timeout_s)]
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
