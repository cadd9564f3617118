"""One small actor where every process of the service pins what the others need to know: load phases, slots, counters.

A replica that is still loading cannot answer a call, and Serve hides which replica answers one: so replicas write and
ingresses read. The board holds the latest word of each process only. A process on the board's own node is gone when
its pid is; one elsewhere, when it has not spoken for `STALE_S` (here too, after `HUNG_S`: it hangs). If the board dies
Ray restarts it empty, and it is full again within one interval: until `YOUNG_S` it is not believed.

Posts also carry what reconciliation needs (service/admission/reconcile.py): the ids that each process believes to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import orjson
import psutil
import ray

from service.metrics.exchange import fold
from service.types import EngineStats, ModelCard, PoolName

NAME, NAMESPACE = "glm5-board", "glm5"
INTERVAL_S = 0.5
STALE_S = 5.0
HUNG_S = 10.0
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


@dataclass
class _Pinned:
    post: bytes = b""
    metrics: bytes = b""
    native: str = ""
    local_pid: int = 0
    seen: float = field(default_factory=time.monotonic)


class _Board:
    """The actor's body. All methods are short; Ray runs them one after the other."""

    def __init__(self) -> None:
        self._pinned: dict[str, _Pinned] = {}
        self._departed: bytes = b""
        self._silent: dict[str, bytes] = {}
        """Metrics of processes that fell silent; they count, and are dropped again if the process comes back."""
        self._born = time.monotonic()
        self._node = ray.get_runtime_context().get_node_id()

    def pin(self, id: str, post: bytes | None, metrics: bytes | None, native: str | None = None) -> None:
        entry = self._pinned.setdefault(id, _Pinned())
        self._silent.pop(id, None)
        entry.seen = time.monotonic()
        if post is not None:
            entry.post = post
            tree = orjson.loads(post)
            entry.local_pid = tree["pid"] if tree["node"] == self._node else 0
        if metrics is not None:
            entry.metrics = metrics
        if native is not None:
            entry.native = native

    def unpin(self, id: str) -> None:
        """A process leaves on purpose: what it counted stays in the totals."""
        entry = self._pinned.pop(id, None)
        if entry is not None and entry.metrics:
            self._departed = fold(self._departed, entry.metrics)

    def posts(self) -> tuple[float, list[bytes]]:
        """(age of this board in seconds, everybody's latest post)."""
        self._drop_gone()
        return time.monotonic() - self._born, [entry.post for entry in self._pinned.values() if entry.post]

    def metrics(self) -> tuple[list[bytes], dict[str, str]]:
        """Snapshots of all processes (departed ones folded into one) and each replica's native text."""
        self._drop_gone()
        snapshots = [entry.metrics for entry in self._pinned.values() if entry.metrics]
        native = {id: entry.native for id, entry in self._pinned.items() if entry.native}
        departed = self._departed
        for silent in filter(None, self._silent.values()):
            departed = fold(departed, silent)
        return [*([departed] if departed else []), *snapshots], native

    def _drop_gone(self) -> None:
        now = time.monotonic()
        for id, entry in list(self._pinned.items()):
            silent_s = now - entry.seen
            if entry.local_pid and not _lives(entry.local_pid):
                self.unpin(id)
            elif silent_s > (HUNG_S if entry.local_pid else STALE_S):
                self._silent[id] = self._pinned.pop(id).metrics or self._silent.get(id, b"")


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


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
