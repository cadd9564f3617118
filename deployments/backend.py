"""What stands behind the HTTP app: admission, routing and retries here, engines behind Ray Serve handles."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from deployments import frames
from deployments.board import INTERVAL_S, Board, Post
from service.admission.gate import Gate
from service.admission.keys import KeyRing
from service.config import Config
from service.engines import registry
from service.errors import DeadlineExceeded, EngineFailed, NotReady, ServiceError
from service.http.backend import PoolReadiness, Readiness, RequestContext, Served
from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.recorders import IngressRecorder
from service.routing.pick import Choice, PoolView, Spill, Wish, pick
from service.types import TIERS, Chunk, EngineRequest, ModelCard, PoolName

READ_S = 0.25
SMALL_CALL_S = 30.0
RETRY_PAUSE_S = 0.2
LOST = (ActorDiedError, ActorUnavailableError, RayActorError, DeploymentUnavailableError)
"""The replica went away under the call: before its first byte the request may go to another one."""


class RayBackend:
    """Implements service/http/backend.py's Backend for one ingress process."""

    def __init__(self, id: str, config: Config, handles: Mapping[PoolName, DeploymentHandle[Any]]) -> None:
        self._id, self._config, self._handles = id, config, handles
        self._board, self._metrics = Board(), Metrics()
        self._recorder = IngressRecorder(self._metrics)
        self._keys = KeyRing.load(config.admission)
        self._gates = {
            name: Gate(capacity=0, reserved=pool.reserved_slots, bound=config.admission.queue_requests)
            for name, pool in config.pools.items()
        }
        self._posts: list[Post] = []
        self._spill = Spill(config.routing.spill_to_throughput, config.routing.spill_to_latency)
        self._honours = frozenset.intersection(*(registry.honours(p.engine.name) for p in config.pools.values()))
        self._tasks = [asyncio.create_task(self._read_board())]

    # ------------------------------------------------------------------ the board

    async def _read_board(self) -> None:
        """Follow the service's state; resize the gates to this ingress's share of the slots."""
        last, said = b"", 0.0
        while True:
            now = time.monotonic()
            if now - said >= INTERVAL_S:
                self._board.pin(self._id, Post(self._id, "ingress", phase="ready", ready=True))
                said = now
            for name, gate in self._gates.items():
                self._recorder.queued(name, gate.queue.waiting)
            if (metrics := snapshot(self._metrics)) != last:
                self._board.pin(self._id, None, metrics)
                last = metrics
            posts = await self._board.posts()
            if posts is not None:
                self._posts = posts
                ingresses = max(1, sum(1 for post in posts if post.role == "ingress"))
                for name, gate in self._gates.items():
                    slots = sum(post.stats.slots for post in self._ready(name) if post.stats)
                    gate.resize(-(-slots // ingresses))
            await asyncio.sleep(READ_S)

    def _replicas(self, pool: PoolName) -> list[Post]:
        return [post for post in self._posts if post.role == "replica" and post.pool == pool]

    def _ready(self, pool: PoolName) -> list[Post]:
        return [post for post in self._replicas(pool) if post.ready]

    # ------------------------------------------------------------------ what HTTP asks

    def authorize(self, credential: str | None) -> None:
        self._keys.find(credential)

    def models(self) -> list[ModelCard]:
        cards = {post.card.name: post.card for post in self._posts if post.card}
        return list(cards.values())

    def honours(self) -> frozenset[str]:
        return self._honours

    def readiness(self) -> Readiness:
        pools: dict[PoolName, PoolReadiness] = {}
        for name, settings in self._config.pools.items():
            replicas, ready = self._replicas(name), self._ready(name)
            loading = max((p for p in replicas if not p.ready), key=lambda p: p.fraction or 0.0, default=None)
            shown = ready[0] if ready else loading
            phase, detail = (
                (shown.phase, shown.failure or shown.detail) if shown else ("starting", "waiting for a replica")
            )
            pools[name] = PoolReadiness(
                ready_replicas=len(ready),
                target_replicas=max(settings.min_replicas, len(replicas)),
                phase="failed" if shown and shown.failure else phase,
                detail=detail,
                fraction=None if shown is None or shown.ready else shown.fraction,
                eta_s=0.0 if ready else (shown.eta_s if shown else None),
            )
        return Readiness(any(pool.ready_replicas for pool in pools.values()), pools)

    async def metrics(self) -> bytes:
        own = snapshot(self._metrics)
        self._board.pin(self._id, None, own)
        snapshots, native = await self._board.metrics()
        return merge(snapshots or [own], native)

    # ------------------------------------------------------------------ work

    async def generate(self, request: EngineRequest, context: RequestContext) -> AsyncGenerator[Served | Chunk, None]:
        deadline = time.monotonic() + request.timeout_s
        with self._recorder.request(request.endpoint, request.stream) as meter:
            caller = self._keys.find(context.credential)
            choice = self._choose(Wish(context.requested_tier, context.mode, caller.ceiling))
            with caller.spend() as budget:
                gate = self._gates[choice.pool]
                async with gate.slot(request.id, choice.tier, request.timeout_s) as waited:
                    served = Served(choice.tier, choice.pool, waited)
                    meter.served(served)
                    yield served
                    async with contextlib.aclosing(self._attempts(choice, request, deadline)) as chunks:
                        async for chunk in chunks:
                            meter.chunk(chunk)
                            budget.used(chunk)
                            yield chunk

    def _choose(self, wish: Wish) -> Choice:
        pools = self.readiness().pools
        views = {
            name: PoolView(
                ready=pools[name].ready_replicas > 0 and gate.queue.capacity > 0,
                wait_s={tier: gate.expected_wait_s(tier) for tier in TIERS},
                eta_s=pools[name].eta_s,
            )
            for name, gate in self._gates.items()
        }
        choice = pick(wish, views, self._spill)
        self._recorder.routed(choice.pool, choice.reason)
        return choice

    async def _attempts(self, choice: Choice, request: EngineRequest, deadline: float) -> AsyncGenerator[Chunk, None]:
        """The answer; asked of another replica if one is lost before its first byte (`routing.retries` times)."""
        handle = self._handles[choice.pool]
        retries = 0
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded("the request's time limit ran out before its answer began")
            message = frames.pack_request(
                EngineRequest(request.id, request.endpoint, request.body, request.stream, choice.tier, left)
            )
            begun = False
            try:
                async with contextlib.aclosing(_call(handle, message)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except LOST as lost:
                if begun:
                    raise EngineFailed("the replica was lost while it answered; the answer is incomplete") from lost
                retries += 1
                if retries > self._config.routing.retries:
                    raise NotReady("no replica could take the request", retry_after_s=2.0) from lost
                await asyncio.sleep(RETRY_PAUSE_S * retries)

    async def tokenize(self, body: bytes) -> bytes:
        return await self._small("tokenize", body)

    async def detokenize(self, body: bytes) -> bytes:
        return await self._small("detokenize", body)

    async def _small(self, method: str, body: bytes) -> bytes:
        choice = self._choose(Wish(None, None))
        try:
            async with asyncio.timeout(SMALL_CALL_S):
                message = await getattr(self._handles[choice.pool], method).remote(body)
        except TimeoutError:
            raise DeadlineExceeded(f"{method} took longer than {SMALL_CALL_S:.0f} s") from None
        except RayError as lost:
            raise EngineFailed(f"the replica was lost during {method}") from lost
        return _first(message)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._board.unpin(self._id)


async def _call(handle: DeploymentHandle[Any], message: bytes) -> AsyncGenerator[Chunk, None]:
    """One streamed call of one replica. Leaving early cancels it there, and with it the decoding."""
    response: Any = handle.options(stream=True).generate.remote(message)
    finished = False
    try:
        async for frame in response:
            for item in frames.unpack(frame):
                if isinstance(item, ServiceError):
                    finished = True
                    raise item
                yield item
        finished = True
    except BackPressureError as full:
        finished = True
        raise NotReady("the replicas take no more requests", retry_after_s=1.0) from full
    except TaskCancelledError as cancelled:
        raise EngineFailed("the replica cancelled the request") from cancelled
    except LOST:
        finished = True
        raise
    except (RayError, RayServeException) as failure:
        finished = True
        raise EngineFailed(f"the replica failed: {type(failure).__name__}") from failure
    finally:
        if not finished:
            response.cancel()


def _first(message: bytes) -> bytes:
    for item in frames.unpack(message):
        if isinstance(item, ServiceError):
            raise item
        return item.data
    raise EngineFailed("the replica answered nothing")
