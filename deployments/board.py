"""One small actor where every process of the service pins what the others need to know: load phases, slots, counters.

A replica that is still loading cannot answer a call: so replicas write and ingresses read. What it keeps, and for how
long, is in pins.py. If the board dies Ray restarts it empty: posts are full again within one interval, and until
`YOUNG_S` they are not believed; metrics of those that live within service/metrics/news.py's `AGAIN_S`, while what
departed processes had counted is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray

from deployments.pins import Pins
from service.fleet.post import Post

NAME, NAMESPACE = "glm5-board", "glm5"
INTERVAL_S = 0.5
YOUNG_S = 2 * INTERVAL_S
CALL_TIMEOUT_S = 2.0


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
