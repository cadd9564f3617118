"""What stands behind the HTTP app: admission, routing and retries here, engines behind Ray Serve handles."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from deployments import frames
from deployments.board import INTERVAL_S, Board, Demand, Post, here
from deployments.leash import Leash, Lost
from deployments.ray_metrics import RaySink
from service.admission.gate import Gate
from service.admission.keys import KeyRing
from service.admission.reconcile import Watch, words
from service.admission.share import Claim, divide
from service.config import Config
from service.engines import registry
from service.errors import BadRequest, DeadlineExceeded, EngineFailed, NotReady, ServiceError
from service.http.backend import PoolReadiness, Readiness, RequestContext, Served
from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.news import News
from service.metrics.recorders import IngressRecorder
from service.routing.pick import Choice, PoolView, Spill, Wish, home, pick
from service.types import TIERS, Delta, EngineRequest, ModelCard, PoolName

READ_S = 0.25
SMALL_CALL_S = 30.0
PROFILE_CALL_S = 120.0
"""A profile's window is at most 10 s; its trace is written and read after that."""
RETRY_PAUSE_S = 0.2
QUIET_S = 1.0
"""A request that reconciliation calls lost has, beyond doubt, when it has waited this long for a chunk as well."""
QUIET_ENDED_S = 20.0
"""The same where the replica lives and has ended the request: thousands of chunks may still be on their way through
processes that have fallen behind (1000 streams on two cores: seconds)."""
MISSED_S = 10.0
"""How long a request that found no replica counts as demand for one."""
GUESSED_TOKENS = 256
"""Length of an answer whose request names no limit."""
LOST = (ActorDiedError, ActorUnavailableError, RayActorError, DeploymentUnavailableError)
"""The replica went away under the call: before its first byte the request may go to another one."""


class RayBackend:
    """Implements service/http/backend.py's Backend for one ingress process."""

    def __init__(self, id: str, config: Config, handles: Mapping[PoolName, DeploymentHandle[Any]]) -> None:
        self._id, self._config, self._handles = id, config, handles
        self._board, self._metrics, self._sink = Board(), Metrics(), RaySink()
        self._recorder = IngressRecorder(self._metrics)
        self._keys = KeyRing.load(config.admission)
        self._gates = {
            name: Gate(capacity=0, reserved=pool.reserved_slots, bound=config.admission.queue_requests)
            for name, pool in config.pools.items()
        }
        self._posts: list[Post] = []
        self._watch, self._leashes, self._beat = Watch(), dict[str, Leash](), 0
        self._missed: dict[PoolName, deque[float]] = {name: deque(maxlen=1000) for name in config.pools}
        self._start_s: dict[PoolName, float] = {}
        self._parts: dict[PoolName, int] = {}
        self._spill = Spill(config.routing.spill_to_throughput, config.routing.spill_to_latency)
        self._honours = frozenset.intersection(*(registry.honours(p.engine.name) for p in config.pools.values()))
        self._tasks = [asyncio.create_task(self._read_board())]

    # ------------------------------------------------------------------ the board

    async def _read_board(self) -> None:
        """Follow the service's state; keep our books in step with it."""
        news, said = News(), 0.0
        while True:
            now = time.monotonic()
            if now - said >= INTERVAL_S:
                self._board.pin(self._id, self._word())
                said = now
            for name, gate in self._gates.items():
                self._recorder.queued(name, gate.queue.waiting)
            metrics = snapshot(self._metrics)
            self._sink.offer(metrics)
            fresh = news.pick(metrics, now)
            if fresh is not None:
                self._board.pin(self._id, None, fresh)
            posts = await self._board.posts()
            if posts is not None:
                self._posts = posts
                self._reconcile(posts)
            await asyncio.sleep(READ_S)

    def _word(self) -> Post:
        self._beat += 1
        ids = tuple(id for gate in self._gates.values() for id in gate.queue.running_ids)
        demand = {name: self._demand(name, gate) for name, gate in self._gates.items()}
        return Post(self._id, "ingress", phase="ready", ready=True, ids=ids, beat=self._beat, demand=demand, **here())

    def _demand(self, pool: PoolName, gate: Gate) -> Demand:
        missed, since = self._missed[pool], time.monotonic() - MISSED_S
        while missed and missed[0] < since:
            missed.popleft()
        return Demand(
            running=gate.queue.running,
            waiting=gate.queue.waiting,
            missed=len(missed),
            priority_wait_s=gate.oldest_wait_s("priority"),
            queued_tokens=sum(ticket.tokens for ticket in gate.queue.tickets if ticket.tier != "priority"),
        )

    def _reconcile(self, posts: list[Post]) -> None:
        """Slots and quotas: our share of what there is. Requests: none is awaited that no replica has any more."""
        ingresses = {post.id: post for post in posts if post.role == "ingress"}
        self._keys.divide(self._id, ingresses)
        for name, gate in self._gates.items():
            ready = self._ready(name)
            self._resize(name, gate, ready, ingresses)
            self._start_s.update((name, post.start_s) for post in ready if post.start_s is not None)
        replicas = words((post.id, post.beat, post.ids) for post in posts if post.role == "replica")
        for id in self._watch.lost(replicas):
            leash = self._leashes.get(id)
            quiet_s = QUIET_ENDED_S if self._watch.keeper_lives(id, replicas) else QUIET_S
            if leash is not None and leash.waiting_s > quiet_s:
                leash.pull()

    def _resize(self, pool: PoolName, gate: Gate, ready: list[Post], ingresses: dict[str, Post]) -> None:
        """Take our part of the pool's slots. Less is taken at once; more only when the reading before said so too, for
        the ingress that gives it up may not know yet."""
        slots = sum(post.stats.slots for post in ready if post.stats)
        claims = {self._id: Claim(gate.queue.running, gate.queue.waiting)}
        for id, post in ingresses.items():
            if id != self._id:
                demand = post.demand.get(pool, Demand())
                claims[id] = Claim(demand.running, demand.waiting)
        mine = divide(slots, claims)[self._id]
        before, self._parts[pool] = self._parts.get(pool, mine), mine
        reserved = self._config.pools[pool].reserved_slots * len(ready)
        # A pool that comes up is taken at once; so is the last that is left of one that shrinks.
        part = mine if gate.queue.capacity == 0 else min(mine, max(before, 1))
        gate.resize(part, -(-reserved * part // max(1, slots)))

    def _replicas(self, pool: PoolName) -> list[Post]:
        return [post for post in self._posts if post.role == "replica" and post.pool == pool]

    def _ready(self, pool: PoolName) -> list[Post]:
        return [post for post in self._replicas(pool) if post.ready]

    # ------------------------------------------------------------------ what HTTP asks

    def authorize(self, credential: str | None, *, operator: bool = False) -> None:
        if operator:
            self._keys.admit_operator(credential)
        else:
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
                eta_s=0.0 if ready else self._eta_s(name, shown),
            )
        return Readiness(any(pool.ready_replicas for pool in pools.values()), pools)

    def _eta_s(self, pool: PoolName, loading: Post | None) -> float | None:
        """Seconds until a pool without a ready replica can serve: what the one that loads says, else what one took."""
        if loading is not None and loading.eta_s is not None:
            return loading.eta_s
        took = self._start_s.get(pool)
        return took if took is None or loading is None else max(1.0, took - loading.phase_s)

    async def metrics(self) -> bytes:
        own = snapshot(self._metrics)
        self._board.pin(self._id, None, own)
        snapshots, native = await self._board.metrics()
        return merge(snapshots or [own], native)

    # ------------------------------------------------------------------ work

    async def generate(self, request: EngineRequest, context: RequestContext) -> AsyncGenerator[Served | Delta, None]:
        deadline = time.monotonic() + request.timeout_s
        with self._recorder.request(request.endpoint, context.stream, request.timeout_s) as meter:
            caller = self._keys.find(context.credential)
            choice = self._choose(Wish(context.requested_tier, context.mode, caller.ceiling))
            with caller.spend(context.siblings) as budget:
                gate, tokens = self._gates[choice.pool], context.max_tokens or GUESSED_TOKENS
                async with gate.slot(request.id, choice.tier, request.timeout_s, tokens) as waited:
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
        try:
            choice = pick(wish, views, self._spill)
        except NotReady:
            for pool in self._missed:
                if pool in ("shared", home(wish)):
                    self._missed[pool].append(time.monotonic())
            raise
        if choice.reason in ("pool_down", "spill"):
            other: PoolName = "throughput" if choice.pool == "latency" else "latency"
            self._missed[other].append(time.monotonic())
        self._recorder.routed(choice.pool, choice.reason)
        return choice

    async def _attempts(self, choice: Choice, request: EngineRequest, deadline: float) -> AsyncGenerator[Delta, None]:
        """The answer; asked of another replica if one is lost before its first byte (`routing.retries` times)."""
        handle, leash = self._handles[choice.pool], Leash()
        retries = 0
        self._leashes[request.id] = leash
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded("the request's time limit ran out before its answer began")
                message = frames.pack_request(
                    EngineRequest(request.id, request.endpoint, request.body, choice.tier, left)
                )
                begun = False
                self._watch.begin(request.id)
                try:
                    async with contextlib.aclosing(_call(handle, message, self._id)) as chunks:
                        with contextlib.suppress(StopAsyncIteration):
                            while True:
                                chunk = await leash.next(chunks)
                                begun = True
                                yield chunk
                    return
                except (*LOST, EngineFailed) as lost:
                    if begun and isinstance(lost, EngineFailed):
                        raise
                    if begun:
                        raise EngineFailed("the replica was lost while it answered; the answer is incomplete") from lost
                    if isinstance(lost, EngineFailed) and not isinstance(lost, Lost) and not self._another(choice.pool):
                        raise
                    retries += 1
                    if retries > self._config.routing.retries:
                        raise NotReady("no replica could take the request", retry_after_s=2.0) from lost
                    await asyncio.sleep(RETRY_PAUSE_S * retries)
        finally:
            self._watch.end(request.id)
            del self._leashes[request.id]

    def _another(self, pool: PoolName) -> bool:
        """Whether a request that one engine failed could go to a different one."""
        return len(self._ready(pool)) > 1

    def counted(self, credential: str | None) -> AbstractContextManager[object]:
        return self._keys.find(credential).spend(1)

    async def tokenize(self, body: bytes) -> bytes:
        return await self._small("tokenize", body)

    async def detokenize(self, body: bytes) -> bytes:
        return await self._small("detokenize", body)

    async def profile(self, pool: PoolName | None, body: bytes) -> bytes:
        if pool is not None and pool not in self._handles:
            raise BadRequest(f"pool: there is no pool {pool}; pools are {', '.join(self._handles)}", param="pool")
        return await self._small("profile", body, pool, PROFILE_CALL_S)

    async def _small(
        self, method: str, body: bytes, pool: PoolName | None = None, timeout_s: float = SMALL_CALL_S
    ) -> bytes:
        handle = self._handles[pool or self._choose(Wish(None, None)).pool]
        try:
            async with asyncio.timeout(timeout_s):
                message = await getattr(handle, method).remote(body)
        except TimeoutError:
            raise DeadlineExceeded(f"{method} took longer than {timeout_s:.0f} s") from None
        except RayError as lost:
            raise EngineFailed(f"the replica was lost during {method}") from lost
        return _first(message)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._board.pin(self._id, None, snapshot(self._metrics))
        self._board.unpin(self._id)


async def _call(handle: DeploymentHandle[Any], message: bytes, ingress: str) -> AsyncGenerator[Delta, None]:
    """One streamed call of one replica. Leaving early cancels it there, and with it the decoding."""
    response: Any = handle.options(stream=True).generate.remote(message, ingress)
    finished = False
    try:
        async for frame in response:
            for item in frames.unpack(frame):
                if isinstance(item, ServiceError):
                    finished = True
                    raise item
                if isinstance(item, Delta):
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
        if isinstance(item, bytes):
            return item
    raise EngineFailed("the replica answered nothing")
